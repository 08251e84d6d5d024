"""Scores of REF/ALT pairs of token sequences: every prefix run once, REF and ALTs only from the first difference.

REF and ALT suffixes go through the same kernels, so that where the two agree their rounding agrees too and
cancels: in bfloat16 a difference of two sums over thousands of positions would else be mostly noise.

A score depends on its own pair alone. Batches only change which rows a matrix product holds, so in float32
the same pair scores the same within the product's rounding (about 1e-6), and bit for bit with
`batch_pairs=1`.

Axis legend: B windows, L tokens run of a window, T tokens of all suffixes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.genome.errors import GenoMoEError
from genomoe.inference.prefix import PrefixCache, SuffixAttention, Suffixes, tail_runner
from genomoe.model.transformer import GenoMoEModel

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

ROUND = 64
"""REF windows are run for a multiple of this many tokens, so that they batch together."""


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
    """One REF window, the pairs that share it, and what is known of it by now."""

    ref: np.ndarray
    members: list[int]
    start: int
    """First token that differs in any pair: where its REF suffix begins."""
    stop: int
    openings: dict[int | None, float] = field(default_factory=dict)
    """log p of the first token of each pair's ALT suffix, and of REF's (None)."""
    total: np.ndarray = field(default_factory=lambda: np.zeros(1))
    hidden: Tensor | None = None

    @property
    def opening(self) -> float:
        return self.openings.get(None, 0.0)


@dataclass(frozen=True, eq=False)
class Suffix:
    """Tokens [start, stop) of REF (index None) or of a pair's ALT, to be run on the prefix of a window."""

    window: int
    index: int | None
    ids: np.ndarray
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class PairScorer:
    """Scores pairs with a causal model, in batches of at most `batch_tokens` tokens and `batch_pairs` pairs.

    Args:
        model: in eval mode for the time of a call; its mode is put back.
        kind: a key of SCORES.
        unk_id: the token of N, which is context but never counts.
        batch_tokens: None: 16,384 on a CPU, 262,144 elsewhere.
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
        self.batch_tokens = batch_tokens or (16384 if self.device.type == "cpu" else 262144)
        self.batch_pairs = batch_pairs

    def __call__(self, pairs: Sequence[Pair]) -> np.ndarray:
        """One float64 a pair; 0 where nothing differs."""
        out = np.zeros(len(pairs))
        training = self.model.training
        self.model.eval()
        try:
            with torch.inference_mode():
                for batch in self._window_batches(pairs):
                    self._score_windows(pairs, batch, out)
        finally:
            self.model.train(training)
        return out

    # ---- batches -----------------------------------------------------------------------------------------

    def _stop(self, pair: Pair) -> int:
        """One past the last token that must be read: all but the last that counts, which is only predicted."""
        return pair.end if self.kind == "embedding" else pair.end - 1

    def _window_batches(self, pairs: Sequence[Pair]) -> Iterator[list[Window]]:
        """Batches of windows whose prefixes are run for equally many tokens."""
        by_ref: dict[object, list[int]] = defaultdict(list)
        for index, pair in enumerate(pairs):
            if pair.first < pair.end:
                by_ref[index if self.batch_pairs == 1 else pair.ref.tobytes()].append(index)
        by_length: dict[int, list[Window]] = defaultdict(list)
        for members in by_ref.values():
            window = Window(
                ref=pairs[members[0]].ref,
                members=members,
                start=min(pairs[index].first for index in members),
                stop=max(self._stop(pairs[index]) for index in members),
            )
            prefix = max(pairs[index].first for index in members)
            by_length[min(len(window.ref), max(1, -(-prefix // ROUND)) * ROUND)].append(window)
        for length, found in by_length.items():
            longest = max(length, *(window.stop - window.start for window in found))
            size = max(1, self.batch_tokens // longest)
            if self.batch_pairs is not None:
                size = min(size, self.batch_pairs)
            for start in range(0, len(found), size):
                yield found[start : start + size]

    def _suffix_batches(self, pairs: Sequence[Pair], windows: Sequence[Window]) -> Iterator[list[Suffix]]:
        """Every window's REF suffix, then its ALTs', in batches."""
        batch: list[Suffix] = []
        tokens = alts = 0
        for number, window in enumerate(windows):
            suffixes = [Suffix(number, None, window.ref, window.start, max(window.start, window.stop))]
            for index in window.members:
                pair = pairs[index]
                suffixes.append(Suffix(number, index, pair.alt, pair.first, max(pair.first, self._stop(pair))))
            for suffix in suffixes:
                full = tokens + len(suffix) > self.batch_tokens or alts == self.batch_pairs
                if batch and full and suffix.index is not None:
                    yield batch
                    batch, tokens, alts = [], 0, 0
                batch.append(suffix)
                tokens += len(suffix)
                alts += suffix.index is not None
        if batch:
            yield batch

    # ---- one batch of windows ----------------------------------------------------------------------------

    def _score_windows(self, pairs: Sequence[Pair], windows: list[Window], out: np.ndarray) -> None:
        prefix = max(max(pairs[index].first for index in window.members) for window in windows)
        shortest = min(len(window.ref) for window in windows)
        length = min(shortest, max(1, -(-prefix // ROUND)) * ROUND)
        ref_BL = self._to_device(np.stack([window.ref[:length] for window in windows]))
        cache = PrefixCache(
            backend=self.model.kernels.attention,
            tail=max(0, min(window.start for window in windows) - 1),
            last_layer=self.model.config.num_layers - 1,
        )
        usual, self.model.run_layer = self.model.run_layer, tail_runner(cache)
        try:
            hidden_BLD = self.model(ref_BL, compute_logits=False, attend=cache).hidden
        finally:
            self.model.run_layer = usual
        for batch in self._suffix_batches(pairs, windows):
            running = [suffix for suffix in batch if len(suffix)]
            hidden_TD = self._run_suffixes(running, cache) if running else hidden_BLD.new_empty(0, hidden_BLD.shape[2])
            if self.kind in ("llr", "marginal"):
                self._likelihood(pairs, windows, batch, running, hidden_BLD, hidden_TD, out)
            else:
                self._change(pairs, windows, running, hidden_TD, out)

    def _run_suffixes(self, running: Sequence[Suffix], cache: PrefixCache) -> Tensor:
        suffixes = Suffixes(
            windows=[suffix.window for suffix in running],
            prefixes=[suffix.start for suffix in running],
            lengths=[len(suffix) for suffix in running],
        )
        return self.model(
            self._to_device(np.concatenate([suffix.ids[suffix.start : suffix.stop] for suffix in running])),
            cu_seqlens=suffixes.cu_seqlens(self.device),
            max_seqlen=suffixes.longest,
            position_ids=suffixes.positions(self.device),
            compute_logits=False,
            attend=SuffixAttention(cache, suffixes),
        ).hidden

    def _likelihood(
        self,
        pairs: Sequence[Pair],
        windows: Sequence[Window],
        batch: Sequence[Suffix],
        running: Sequence[Suffix],
        hidden_BLD: Tensor,
        hidden_TD: Tensor,
        out: np.ndarray,
    ) -> None:
        """log p summed from the first difference to the end, ALT minus REF."""
        head_VD = self.model.lm_head.weight
        found: dict[int | None, np.ndarray] = {}
        if running:
            targets = [suffix.ids[suffix.start + 1 : suffix.stop + 1] for suffix in running]
            log_p_T = target_log_probs(hidden_TD, head_VD, self._to_device(np.concatenate(targets)), self.unk_id)
            ends = np.cumsum([len(suffix) for suffix in running])
            parts = np.split(log_p_T.double().cpu().numpy(), ends[:-1])
            found = {id(suffix): part for suffix, part in zip(running, parts, strict=True)}
        self._open_windows(pairs, windows, batch, running, hidden_BLD, hidden_TD)
        for suffix in batch:
            window, after = windows[suffix.window], found.get(id(suffix), np.zeros(0))
            if suffix.index is None:  # total[j]: REF's log p of its tokens start .. start+j-1
                window.total = np.cumsum([0.0, window.opening, *after])
                continue
            pair = pairs[suffix.index]
            ref = window.total[pair.end - window.start] - window.total[pair.first - window.start]
            out[suffix.index] = window.openings[suffix.index] + after.sum() - ref

    def _open_windows(
        self,
        pairs: Sequence[Pair],
        windows: Sequence[Window],
        batch: Sequence[Suffix],
        running: Sequence[Suffix],
        hidden_BLD: Tensor,
        hidden_TD: Tensor,
    ) -> None:
        """log p of the first token of each suffix, which the token before it predicts: one of the prefix or of REF."""
        offset = dict(
            zip((id(s) for s in running), np.cumsum([0, *(len(s) for s in running)][:-1] or [0]).tolist(), strict=False)
        )
        early, late, targets, places = [], [], [], []
        for suffix in batch:
            if suffix.index is not None:
                continue
            window = windows[suffix.window]
            wanted = [(None, window.start, window.ref[window.start])]
            wanted += [(index, pairs[index].first, pairs[index].alt[pairs[index].first]) for index in window.members]
            for index, first, target in wanted:
                if first == 0:
                    window.openings[index] = 0.0
                elif first - 1 < window.start:
                    early.append((suffix.window, first - 1, len(targets)))
                else:
                    late.append((offset[id(suffix)] + first - 1 - window.start, len(targets)))
                if first:
                    targets.append(target)
                    places.append((window, index))
        if targets:
            rows_TD = hidden_BLD.new_empty(len(targets), hidden_BLD.shape[2])
            if early:
                number, before, at = (list(column) for column in zip(*early, strict=True))
                rows_TD[at] = hidden_BLD[number, before]
            if late:
                row, at = (list(column) for column in zip(*late, strict=True))
                rows_TD[at] = hidden_TD[row]
            targets_T = self._to_device(np.array(targets))
            log_p = target_log_probs(rows_TD, self.model.lm_head.weight, targets_T, self.unk_id)
            for (window, index), value in zip(places, log_p.double().tolist(), strict=True):
                window.openings[index] = value

    def _change(
        self,
        pairs: Sequence[Pair],
        windows: Sequence[Window],
        running: Sequence[Suffix],
        hidden_TD: Tensor,
        out: np.ndarray,
    ) -> None:
        """Distance of the hidden states, or divergence of the predictions, that follow the allele."""
        for suffix, own_TD in zip(running, hidden_TD.split([len(suffix) for suffix in running]), strict=True):
            window = windows[suffix.window]
            if suffix.index is None:
                window.hidden = own_TD
                continue
            pair = pairs[suffix.index]
            assert window.hidden is not None
            ref_TD, alt_TD = window.hidden[pair.first - window.start :][: len(own_TD)], own_TD
            if self.kind == "embedding":
                out[suffix.index] = float((alt_TD.double().mean(0) - ref_TD.double().mean(0)).norm())
                continue
            # the last token of the allele is the first whose prediction concerns what follows it
            ref_TD = ref_TD[max(0, pair.ref_after - 1 - pair.first) :]
            alt_TD = alt_TD[max(0, pair.alt_after - 1 - pair.first) :]
            same = min(len(ref_TD), len(alt_TD))
            if same:
                out[suffix.index] = float(self._divergence(ref_TD[:same], alt_TD[:same]).double().mean())

    def _divergence(self, first_TD: Tensor, second_TD: Tensor) -> Tensor:
        p, q = (log_probabilities(x, self.model.lm_head.weight) for x in (first_TD, second_TD))
        middle = torch.logaddexp(p, q) - np.log(2)
        return 0.5 * ((p.exp() * (p - middle)).sum(-1) + (q.exp() * (q - middle)).sum(-1)) / np.log(2)

    def _to_device(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self.device, non_blocking=True).long()


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
