"""StreamingGenomeDataset: batches of windows from a corpus, the same whoever reads them and however often it stops.

The batch with global number b of an epoch holds the windows [b B, (b + 1) B) of that epoch's plan. Rank r of R takes
the batches b = r, r + R, r + 2R, ...; of those, worker w of W takes every W-th. So the stream of a rank doesn't
depend on the number of workers, and the union over ranks doesn't depend on the number of ranks. Batches that are used
up are counted over all ranks, so a run may continue on another number of ranks: what is left is shared out anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from genomoe.data.collate import POOL, Batch, Encoder
from genomoe.data.corpus import Corpus, Segments
from genomoe.data.sampling import EpochPlan, SamplingConfig, Windows
from genomoe.genome.alphabet import Tokenizer
from genomoe.genome.errors import GenoMoEError, IntegrityError

STATE_VERSION = 1


class StreamingGenomeDataset(IterableDataset[Batch]):
    """Yields whole batches (use it with ``DataLoader(dataset, batch_size=None)``).

    Args:
        corpus: where the bases are.
        config: how windows are cut and ordered.
        tokenizer: letters to ids.
        batch_size: windows of a batch; when packing, a batch holds about batch_size x context_length tokens.
        context_length: tokens of a window; must agree with config.window.
        soft_mask_weight: weight of lower-case targets in sources whose case is masking.
        pack: pack windows of different length one after another (THD) instead of padding them.
        pad_to_multiple: when packing, round every sequence up to a multiple of this many tokens.
        segments: where windows may be cut; None means the corpus's own.
        drop_last: leave out an epoch's incomplete last batch. Otherwise it is filled with rows of weight 0 and
            index -1, so that batches keep their shape and all ranks make the same number of steps.
        fill_last: False yields the incomplete last batch as it is (single rank only).
    """

    def __init__(
        self,
        corpus: Corpus,
        config: SamplingConfig,
        tokenizer: Tokenizer,
        *,
        batch_size: int,
        context_length: int,
        soft_mask_weight: float = 0.1,
        pack: bool = False,
        pad_to_multiple: int = 1,
        segments: Segments | None = None,
        drop_last: bool = False,
        fill_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise GenoMoEError(f"batch_size must be at least 1, got {batch_size}.")
        if config.window != context_length * tokenizer.bases_per_token:
            raise GenoMoEError(
                f"The sampling window has {config.window} bases; context_length {context_length} with the "
                f"{tokenizer.name} tokenizer needs {context_length * tokenizer.bases_per_token}."
            )
        self.corpus, self.config, self.tokenizer = corpus, config, tokenizer
        self.batch_size, self.context_length = batch_size, context_length
        self.pack, self.pad_to_multiple = pack, pad_to_multiple
        self.segments = corpus.segments if segments is None else segments
        self.drop_last, self.fill_last = drop_last, fill_last
        self.encoder = Encoder(tokenizer, soft_mask_weight)
        self._weights = np.array([source.weight for source in corpus.sources])
        self._names = [source.name for source in corpus.sources]
        self.epoch = self.consumed = self.steps = 0
        self.set_shard(rank, world_size)
        self._plan: EpochPlan | None = None
        self._bounds: tuple[int, np.ndarray] | None = None

    def set_shard(self, rank: int, world_size: int) -> None:
        """Which of how many data-parallel ranks this process is."""
        if not 0 <= rank < world_size:
            raise GenoMoEError(f"rank {rank} does not exist among {world_size} ranks.")
        self.rank, self.world_size = rank, world_size

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` from its beginning."""
        self.epoch, self.consumed, self.steps = epoch, 0, 0

    def advance(self) -> None:
        """Count one batch of every rank as used: the stream continues after it, here and in a saved state."""
        self.consumed = min(self.consumed + self.world_size, self.num_batches)
        self.steps += 1

    def plan(self) -> EpochPlan:
        """The current epoch's windows."""
        if self._plan is None or self._plan.epoch != self.epoch:
            self._plan = EpochPlan(self.segments, self._weights, self.config, self.epoch)
            self._bounds = None
        return self._plan

    def bounds(self) -> np.ndarray:
        """[batches + 1] number of the first window of each batch of the whole epoch, over all ranks."""
        plan = self.plan()
        if self._bounds is None or self._bounds[0] != self.epoch:
            total = len(plan)
            if self.pack:
                edges = self._packed_bounds(plan)
            else:
                edges = np.append(np.arange(0, total, self.batch_size), total)
            if self.drop_last and not self.pack:
                edges = edges[: total // self.batch_size + 1]
            if self.drop_last:
                whole = (len(edges) - 1) // self.world_size * self.world_size
                edges = edges[: whole + 1]
            self._bounds = (self.epoch, edges)
        return self._bounds[1]

    def _packed_bounds(self, plan: EpochPlan) -> np.ndarray:
        """Greedy, in order: a batch ends where the next sequence would exceed the token budget."""
        budget = self.batch_size * self._padded(np.array([self.context_length]))[0]
        edges, total, step = [0], len(plan), 1 << 16
        used = 0
        for lo in range(0, total, step):
            windows = plan.windows(lo, min(lo + step, total))
            sizes = self._padded(self._tokens_of(windows.ends - windows.starts))
            cumulative = np.cumsum(sizes)
            place = 0
            while True:
                base = int(cumulative[place - 1]) if place else 0
                stop = int(np.searchsorted(cumulative, base + budget - used, side="right"))
                if stop >= len(sizes):
                    used += int(cumulative[-1]) - base
                    break
                edges.append(lo + stop)
                place, used = stop, 0
        return np.append(edges, total)

    def _tokens_of(self, bases: np.ndarray) -> np.ndarray:
        k = self.tokenizer.bases_per_token
        return bases // k + bases % k

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        return -(-tokens // self.pad_to_multiple) * self.pad_to_multiple

    @property
    def num_batches(self) -> int:
        """Batches of the whole epoch, over all ranks."""
        return len(self.bounds()) - 1

    @property
    def remaining(self) -> int:
        """Batches this rank still gets in the current epoch."""
        return -(-(self.num_batches - self.consumed) // self.world_size)

    def __len__(self) -> int:
        """Batches this rank gets in the whole epoch, those already used included."""
        return self.steps + self.remaining

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the current epoch: every batch of this rank and worker that isn't consumed yet."""
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader = BlockCache(self.corpus, self.plan(), budget=self.cache_bases(workers))
        bounds = self.bounds()
        first = self.consumed + self.rank
        for step in range(worker, self.remaining, workers):
            number = min(first + step * self.world_size, self.num_batches)
            following = min(number + 1, self.num_batches)
            yield self.make_batch(int(bounds[number]), int(bounds[following]), reader)

    def cache_bases(self, workers: int) -> int:
        """Bases of decoded blocks one worker may keep."""
        share = -(-self.config.lanes // workers)
        return (share + 1) * (self.config.group_bases + self.plan().block_bases + self.config.window)

    def make_batch(self, lo: int, hi: int, reader: BlockCache | None = None) -> Batch:
        """The batch of the windows lo..hi-1 of the current epoch."""
        reader = reader or BlockCache(self.corpus, self.plan(), budget=self.cache_bases(1))
        windows = self.plan().windows(lo, hi)
        lengths = windows.ends - windows.starts
        rows = len(lengths) if self.pack or not self.fill_last else self.batch_size
        rows = max(rows, 1)
        filler = rows - len(lengths)
        if self.pack:
            sizes = self._padded(self._tokens_of(_extended(lengths, filler, 1)))
        else:
            sizes = np.full(rows, self.context_length)
        codes, starts = self._gather(windows, sizes * self.tokenizer.bases_per_token, reader)
        names = tuple(self._names[source] for source in windows.sources)
        return self.encoder.batch(
            codes,
            starts=starts,
            lengths=_extended(lengths, filler, 0),
            sizes=sizes,
            packed=self.pack,
            index=_extended(windows.number, filler, -1),
            tags=names + ("",) * filler,
        )

    def _gather(self, windows: Windows, room: np.ndarray, reader: BlockCache) -> tuple[np.ndarray, np.ndarray]:
        """Codes of the windows, each at the start of its room of that many bases, on the strand it is read from."""
        starts = np.cumsum(room) - room
        codes = POOL.empty(int(room.sum()), np.uint8)
        codes.fill(self.encoder.pad_id)
        columns = (windows.starts, windows.ends, windows.blocks, windows.minus, starts)
        for start, end, block, minus, place in zip(*(c.tolist() for c in columns), strict=False):
            self.encoder.encode(reader.get(block, start, end), codes[place : place + end - start], minus=minus)
        return codes, starts

    def fingerprint(self) -> dict[str, Any]:
        """What a resumed run must share with the run that was saved."""
        return {
            "files": self.corpus.fingerprint(),
            "sampling": self.config.to_dict(),
            "tokenizer": self.tokenizer.to_dict(),
            "pack": self.pack,
            "batch_size": self.batch_size,
            "pad_to_multiple": self.pad_to_multiple,
            "bases": int((self.segments.ends - self.segments.starts).sum()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: JSON-ready.

        `consumed` counts the epoch's used batches over all ranks, `steps` those of each rank.
        """
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "steps": self.steps,
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with exactly the next batch.

        The number of workers may differ. The number of ranks may differ too: batches are numbered over all ranks,
        so the new ranks share out the batches that are left, none lost and none twice.

        Raises IntegrityError when a file changed, and GenoMoEError when a setting did, naming it.
        """
        if state.get("version") != STATE_VERSION:
            raise IntegrityError(
                f"The data state has version {state.get('version')!r}; this GenoMoE reads version {STATE_VERSION}."
            )
        check_fingerprint(state["fingerprint"], self.fingerprint())
        self.epoch, self.consumed, self.steps = (int(state[key]) for key in ("epoch", "consumed", "steps"))
        if self.remaining <= 0:
            self.set_epoch(self.epoch + 1)


def _extended(values: np.ndarray, count: int, value: int) -> np.ndarray:
    return np.concatenate([values, np.full(count, value, dtype=values.dtype)])


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raises IntegrityError for a changed, missing or added file, GenoMoEError for a changed setting."""
    before, now = saved["files"], current["files"]
    if sorted(before.values()) != sorted(now.values()):
        for name in sorted(set(before) | set(now)):
            if before.get(name) != now.get(name):
                what = "changed" if name in before and name in now else "left" if name in before else "joined"
                raise IntegrityError(
                    f"{name} {what} the training corpus since the checkpoint was written; "
                    "restore it, or start a new run."
                    if what != "changed"
                    else f"{name} changed since the checkpoint was written; restore it, or start a new run."
                )
    for key in ("sampling", "tokenizer", "pack", "batch_size", "pad_to_multiple", "bases"):
        if saved[key] != current[key]:
            detail = f"{saved[key]!r} then, {current[key]!r} now"
            if isinstance(saved[key], dict):
                names = [name for name in saved[key] | current[key] if saved[key].get(name) != current[key].get(name)]
                detail = ", ".join(f"{n}: {saved[key].get(n)!r} then, {current[key].get(n)!r} now" for n in names)
            raise GenoMoEError(
                f"The data stream can't be resumed with another {key} ({detail}); use the saved setting."
            )


class BlockCache:
    """Decoded blocks, each read once in one piece and kept while there is room (least recently used goes first)."""

    def __init__(self, corpus: Corpus, plan: EpochPlan, *, budget: int) -> None:
        self._corpus, self._budget = corpus, budget
        self._starts, self._ends = plan.block_spans
        self._blocks: OrderedDict[int, tuple[int, np.ndarray]] = OrderedDict()
        self._held = 0

    def get(self, block: int, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis, which must start in `block`; don't write to them."""
        origin, letters = self._get(block)
        return letters[start - origin : end - origin]

    def _get(self, block: int) -> tuple[int, np.ndarray]:
        found = self._blocks.get(block)
        if found is not None:
            self._blocks.move_to_end(block)
            return found
        start = int(self._starts[block])
        letters = self._corpus.read(start, int(self._ends[block]))
        self._held += len(letters)
        while self._held > self._budget and self._blocks:
            _, (_, dropped) = self._blocks.popitem(last=False)
            self._held -= len(dropped)
        self._blocks[block] = (start, letters)
        return start, letters


def epoch_windows(dataset: StreamingGenomeDataset) -> Iterator[Windows]:
    """All windows of the current epoch in order, a few thousand at a time (for tests and reports)."""
    plan = dataset.plan()
    for lo in range(0, len(plan), 4096):
        yield plan.windows(lo, min(lo + 4096, len(plan)))
