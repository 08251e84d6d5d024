"""Scores of REF/ALT pairs of token sequences: every prefix run once, REF and ALTs only from the first difference.

REF and ALT suffixes go through the same kernels, so that where the two agree their rounding agrees too and
cancels: in bfloat16 a difference of two sums over thousands of positions would else be mostly noise.

A suffix begins at the first difference, which the end of the prefix predicts, or a few tokens earlier (`start_step`):
then the pairs of a window begin at few places and share a launch, and lengths suit the GPU's tiles. What is run
before the first difference is the same in REF and ALT and never counted.

A score depends on its own pair alone. Batches only change which rows a matrix product holds, so in float32
the same pair scores the same within the product's rounding (about 1e-6), and bit for bit with
`batch_pairs=1`.

Axis legend: B windows, P tokens of their prefix, T tokens of all suffixes, D hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.genome.errors import GenoMoEError
from genomoe.inference.prefix import PrefixCache, SuffixAttention, SuffixBlock, run_prefix
from genomoe.model.transformer import GenoMoEModel
from genomoe.ops.attention_kernels import LARGEST
from genomoe.ops.grouped_mlp.prepared import weights_prepared_once

__all__ = ["SCORES", "Pair", "PairScorer", "log_probabilities", "target_log_probs"]

SCORES = {
    "llr": "sum over the window of log p(ALT base) - log p(REF base), nats; below 0: ALT is less likely than REF",
    "marginal": "log p(ALT allele | left context) - log p(REF allele | left context), nats, "
    "the allele standing at the right end of its window; below 0: ALT is less likely than REF",
    "embedding": "Euclidean distance of the mean last hidden states of ALT and REF from the first "
    "difference on; at least 0, larger: a larger change",
    "jsd": "mean Jensen-Shannon divergence, bits, of the next-base distributions of ALT and REF "
    "at the positions after the allele; 0 to 1, larger: a larger change",
}
"""Every score by name, with its formula and sign."""


def start_step(length: int) -> int:
    """Suffixes start at multiples of so many tokens of a window of `length`: a power of two, a 64th of it at most.

    So what is run in vain stays about a hundredth, and is nothing in the middle of a window. 128 suffices: the tile of
    attention on a GPU, which is up to a tenth slower where the keys do not fill their last one.
    """
    return min(128, 1 << max(0, (length // 64).bit_length() - 1))


@dataclass(frozen=True, kw_only=True)
class Pair:
    """REF and ALT token ids of one window on one strand, equally long, and the tokens that count."""

    ref: np.ndarray
    alt: np.ndarray
    first: int
    """First token that differs; `end` if none does."""
    end: int
    """One past the last token that counts."""
    ref_after: int
    """First token after the REF allele: where the following positions start."""
    alt_after: int


@dataclass(kw_only=True)
class Window:
    """One REF window, what is to run after its prefix, and what its REF suffix gave."""

    ref: np.ndarray
    suffixes: list[Suffix]
    """REF's, then the ALT's of every pair that has this REF."""
    first_log_p_V: np.ndarray | None = None
    """log p of every token in the place after the prefix."""
    log_p_L: np.ndarray | None = None
    hidden_LD: Tensor | None = None

    @property
    def start(self) -> int:
        """Where the REF suffix begins: no later than any ALT's."""
        return self.suffixes[0].start

    @property
    def prefix(self) -> int:
        """Tokens that some suffix has before it."""
        return max(suffix.start for suffix in self.suffixes)


@dataclass(frozen=True, eq=False)
class Suffix:
    """Tokens [start, stop) of REF (index None) or of a pair's ALT, which continue the window's prefix."""

    index: int | None
    ids: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def targets(self, unk_id: int) -> np.ndarray:
        """What each token should predict; nothing that counts past the window's end."""
        found = self.ids[self.start + 1 : self.stop + 1]
        return found if len(found) == len(self) else np.append(found, self.ids.dtype.type(unk_id))


Unit = tuple[int, list[Suffix]]
"""Number of a window, and suffixes of it that start and stop together."""


class PairScorer:
    """Scores pairs with a causal model, in batches of about `batch_tokens` tokens and at most `batch_pairs` pairs.

    Args:
        model: in eval mode for the time of a call; its mode is put back.
        kind: a key of SCORES.
        unk_id: the token of N, which is context but never counts.
        batch_tokens: None: 16,384 on a CPU, 262,144 elsewhere, or as many as attention takes in one launch.
        batch_pairs: None: no limit; 1 makes every score bitwise independent of the rest of the file.
    """

    def __init__(
        self,
        model: GenoMoEModel,
        kind: str,
        *,
        unk_id: int,
        batch_tokens: int | None = None,
        batch_pairs: int | None = None,
    ):
        if kind not in SCORES:
            raise GenoMoEError(f"Unknown score '{kind}': it is one of {', '.join(SCORES)}.")
        self.model, self.kind, self.unk_id = model, kind, unk_id
        self.device = model.embed.weight.device
        one_launch = LARGEST // ((model.config.num_heads + 2 * model.config.num_kv_heads) * model.config.head_size)
        self.batch_tokens = batch_tokens or (16384 if self.device.type == "cpu" else min(262144, one_launch))
        self.batch_pairs = batch_pairs

    def __call__(self, pairs: Sequence[Pair]) -> np.ndarray:
        """One float64 a pair; 0 where nothing differs."""
        out = np.zeros(len(pairs))
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode(), weights_prepared_once():
                for batch in self._window_batches(pairs):
                    self._score_windows(pairs, batch, out)
        finally:
            self.model.train(training)
        return out

    # ---- batches -----------------------------------------------------------------------------------------

    def _window(self, pairs: Sequence[Pair], members: list[int]) -> Window:
        """A window with the suffixes its pairs need: from the first difference, or before, to the last token read."""
        ref = pairs[members[0]].ref
        step = start_step(len(ref))
        begins = [pairs[index].first // step * step for index in members]
        suffixes = []
        for index, begin in zip(members, begins, strict=True):
            pair = pairs[index]
            if 0 < begin == pair.first < max(begins):
                begin -= step  # its first token is not predicted by the end of the prefix, so must be by the suffix
            # the last token that counts is only predicted, so that its own state is of no use to a likelihood
            end = pair.end if self.kind == "embedding" else max(begin + 1, pair.end - 1)
            suffixes.append(Suffix(index, pair.alt, begin, min(len(ref), begin + -(-(end - begin) // step) * step)))
        of_ref = Suffix(None, ref, min(one.start for one in suffixes), max(one.stop for one in suffixes))
        return Window(ref=ref, suffixes=[of_ref, *suffixes])

    def _window_batches(self, pairs: Sequence[Pair]) -> Iterator[list[Window]]:
        """Batches of windows whose prefixes are equally long."""
        by_ref: dict[object, list[int]] = defaultdict(list)
        for index, pair in enumerate(pairs):
            if pair.first < pair.end:
                by_ref[index if self.batch_pairs == 1 else pair.ref.tobytes()].append(index)
        by_prefix: dict[int, list[Window]] = defaultdict(list)
        for members in by_ref.values():
            window = self._window(pairs, members)
            by_prefix[window.prefix].append(window)
        for prefix, found in by_prefix.items():
            # suffixes are batched on their own; only what is kept of REF's until the ALTs have run bounds them here
            longest = max(len(suffix) for window in found for suffix in window.suffixes)
            size = max(1, self.batch_tokens // max(prefix, -(-longest // 2)))
            if self.batch_pairs is not None:
                size = min(size, self.batch_pairs)
            parts = -(-len(found) // size)
            for part in range(parts):
                yield found[part * len(found) // parts : (part + 1) * len(found) // parts]

    def _suffix_batches(self, windows: Sequence[Window]) -> Iterator[list[Unit]]:
        """All suffixes in batches of about equally many tokens, a window's REF first, equal shapes side by side."""
        alike: dict[tuple[int, int, int], list[Suffix]] = defaultdict(list)
        for number, window in enumerate(windows):
            for suffix in window.suffixes:
                alike[number, suffix.start, len(suffix)].append(suffix)

        def order(item: tuple[tuple[int, int, int], list[Suffix]]) -> tuple[int, ...]:
            (number, start, length), found = item
            return start, -length, len(found), number

        total = sum(length * len(found) for (_, _, length), found in alike.items())
        share = total / -(-total // self.batch_tokens)
        batch: list[Unit] = []
        done, alts, edge = 0, 0, share
        for (number, _, length), found in sorted(alike.items(), key=order):
            at = 0
            while at < len(found):
                size = max(1, int(share / length))
                if self.batch_pairs is not None:
                    size = min(size, self.batch_pairs + (found[at].index is None))
                piece, at = found[at : at + size], at + size
                new = sum(suffix.index is not None for suffix in piece)
                too_many = self.batch_pairs is not None and alts + new > self.batch_pairs
                past_edge = done + length * len(piece) / 2 > edge
                if batch and (too_many or past_edge):
                    yield batch
                    batch, alts = [], 0
                    edge += share * past_edge
                batch.append((number, piece))
                done, alts = done + length * len(piece), alts + new
        if batch:
            yield batch

    # ---- one batch of windows ----------------------------------------------------------------------------

    def _score_windows(self, pairs: Sequence[Pair], windows: list[Window], out: np.ndarray) -> None:
        prefix = windows[0].prefix
        cache, last_BD = PrefixCache(last_layer=0), None
        if prefix:
            ids = np.stack([window.ref[:prefix] for window in windows])
            cache, last_BD = run_prefix(self.model, self._to_device(ids))
        log_p: list[tuple[list[tuple[Window, Suffix]], Tensor]] = []
        for batch in self._suffix_batches(windows):
            hidden_TD = self._run_suffixes(batch, cache)
            running = [(windows[number], suffix) for number, found in batch for suffix in found]
            if self.kind in ("llr", "marginal"):
                log_p.append((running, self._log_p(running, hidden_TD)))
            else:
                self._change(pairs, running, hidden_TD, out)
        # read when all is under way, so that the device need not wait for us
        if log_p and last_BD is not None:
            first_BV = log_probabilities(last_BD, self.model.lm_head.weight).cpu().numpy()
            for window, first_V in zip(windows, first_BV, strict=True):
                window.first_log_p_V = first_V
        for running, log_p_T in log_p:
            self._likelihood(pairs, running, log_p_T.cpu().numpy(), out)

    def _run_suffixes(self, batch: Sequence[Unit], cache: PrefixCache) -> Tensor:
        def shape(unit: Unit) -> tuple[int, int, int]:
            found = unit[1]
            return found[0].start, len(found[0]), len(found)

        blocks = [
            SuffixBlock(windows=[number for number, _ in units], start=start, length=length, count=count)
            for (start, length, count), units in itertools.groupby(batch, key=shape)
        ]
        suffixes = [suffix for _, found in batch for suffix in found]
        ids = np.concatenate([suffix.ids[suffix.start : suffix.stop] for suffix in suffixes])
        return self.model(
            self._to_device(ids),
            cu_seqlens=torch.arange(0, len(ids) + 1, len(ids), dtype=torch.int32, device=self.device),
            max_seqlen=max(suffix.stop for suffix in suffixes),
            position_ids=torch.cat([block.positions(self.device) for block in blocks]),
            compute_logits=False,
            attend=SuffixAttention(cache, blocks),
        ).hidden

    def _log_p(self, running: Sequence[tuple[Window, Suffix]], hidden_TD: Tensor) -> Tensor:
        """log p of what each token should predict."""
        targets = self._to_device(np.concatenate([suffix.targets(self.unk_id) for _, suffix in running]))
        return target_log_probs(hidden_TD, self.model.lm_head.weight, targets, self.unk_id)

    def _likelihood(
        self, pairs: Sequence[Pair], running: Sequence[tuple[Window, Suffix]], log_p_T: np.ndarray, out: np.ndarray
    ) -> None:
        """log p, ALT minus REF, summed in float64 from the first difference to the end."""
        parts = np.split(log_p_T, np.cumsum([len(suffix) for _, suffix in running])[:-1])
        for (window, suffix), own_L in zip(running, parts, strict=True):
            if suffix.index is None:
                window.log_p_L = own_L
                continue
            pair = pairs[suffix.index]
            assert window.log_p_L is not None, "REF runs before its ALTs"
            first, end = max(1, pair.first) - 1, pair.end - 1  # tokens that predict those that count
            change = 0.0
            if first < suffix.start:  # the end of the prefix
                alt, ref = pair.alt[pair.first], pair.ref[pair.first]
                change = self._first_log_p(window, alt) - self._first_log_p(window, ref)
                first += 1
            ref_L = window.log_p_L[first - window.start : end - window.start]
            alt_L = own_L[first - suffix.start : end - suffix.start]
            out[suffix.index] = change + np.subtract(alt_L, ref_L, dtype=np.float64).sum()

    def _first_log_p(self, window: Window, token: int) -> float:
        assert window.first_log_p_V is not None, "a prefix predicts what follows it"
        return 0.0 if token == self.unk_id else float(window.first_log_p_V[token])

    def _change(
        self, pairs: Sequence[Pair], running: Sequence[tuple[Window, Suffix]], hidden_TD: Tensor, out: np.ndarray
    ) -> None:
        """Distance of the hidden states, or divergence of the predictions, that follow the allele."""
        parts = hidden_TD.split([len(suffix) for _, suffix in running])
        for (window, suffix), own_LD in zip(running, parts, strict=True):
            if suffix.index is None:
                window.hidden_LD = own_LD
                continue
            pair = pairs[suffix.index]
            assert window.hidden_LD is not None, "REF runs before its ALTs"
            if self.kind == "embedding":
                ref_LD = window.hidden_LD[pair.first - window.start : pair.end - window.start]
                alt_LD = own_LD[pair.first - suffix.start : pair.end - suffix.start]
                out[suffix.index] = float((alt_LD.double().mean(0) - ref_LD.double().mean(0)).norm())
                continue
            # the last token of the allele is the first whose prediction concerns what follows it
            ref_from, alt_from = (max(pair.first, after - 1) for after in (pair.ref_after, pair.alt_after))
            same = pair.end - 1 - max(ref_from, alt_from)
            if same > 0:
                ref_LD = window.hidden_LD[ref_from - window.start :][:same]
                alt_LD = own_LD[alt_from - suffix.start :][:same]
                out[suffix.index] = float(self._divergence(ref_LD, alt_LD).double().mean())

    def _divergence(self, first_TD: Tensor, second_TD: Tensor) -> Tensor:
        p, q = (log_probabilities(x, self.model.lm_head.weight) for x in (first_TD, second_TD))
        middle = torch.logaddexp(p, q) - np.log(2)
        return 0.5 * ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / np.log(2)

    def _to_device(self, ids: np.ndarray) -> Tensor:
        found = torch.from_numpy(ids)
        if self.device.type == "cuda":
            found = found.pin_memory()  # else the copy would wait for all that runs
        return found.to(self.device, non_blocking=True).long()


def log_probabilities(hidden_TD: Tensor, head_VD: Tensor) -> Tensor:
    """log softmax of the head's logits, [..., V], both in float32 whatever the model's dtype."""
    return F.linear(hidden_TD.float(), head_VD.float()).log_softmax(-1)


def target_log_probs(hidden_TD: Tensor, head_VD: Tensor, target_T: Tensor, unk_id: int, chunk: int = 2**26) -> Tensor:
    """log p of each target, float32; 0 for targets that are `unk_id`. Logits are formed `chunk` values at a
    time.
    """
    rows, targets = hidden_TD.reshape(-1, hidden_TD.shape[-1]), target_T.reshape(-1)
    step = max(1, chunk // head_VD.shape[0])
    parts = [
        log_probabilities(rows[at : at + step], head_VD).gather(-1, targets[at : at + step, None])[:, 0]
        for at in range(0, len(rows), step)
    ]
    found = torch.cat(parts) if parts else rows.new_empty(0, dtype=torch.float32)
    return found.masked_fill(targets == unk_id, 0.0).view(target_T.shape)
