"""Scores of REF/ALT pairs of token sequences: every REF window run once, every ALT only from its first
difference.

A score depends on its own pair alone. Batches only change which rows a matrix product holds, so in float32
the same pair scores the same within the product's rounding (about 1e-6), and bit for bit with
`batch_pairs=1`.

Axis legend: B windows, L tokens run of a window, T tokens of all suffixes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

    def _tokens_to_run(self, pair: Pair) -> int:
        """Tokens of REF that must be read: all but the last that counts, which is only predicted."""
        return pair.end if self.kind == "embedding" else pair.end - 1

    def _window_batches(self, pairs: Sequence[Pair]) -> Iterator[list[list[int]]]:
        """Batches of windows to run for equally many tokens; a window is the list of its pairs' indices."""
        windows: dict[object, list[int]] = defaultdict(list)
        for index, pair in enumerate(pairs):
            if pair.first < pair.end and self._tokens_to_run(pair) > 0:
                windows[index if self.batch_pairs == 1 else pair.ref.tobytes()].append(index)
        by_length: dict[int, list[list[int]]] = defaultdict(list)
        for members in windows.values():
            by_length[self._run_length(pairs, members)].append(members)
        for length, found in by_length.items():
            size = max(1, self.batch_tokens // length)
            if self.batch_pairs is not None:
                size = min(size, self.batch_pairs)
            for start in range(0, len(found), size):
                yield found[start : start + size]

    def _run_length(self, pairs: Sequence[Pair], members: Sequence[int]) -> int:
        needed = max(self._tokens_to_run(pairs[index]) for index in members)
        longest = max(len(pairs[index].ref) for index in members)
        return min(-(-needed // ROUND) * ROUND, longest if self.kind == "embedding" else longest - 1)

    def _suffix_batches(self, pairs: Sequence[Pair], members: list[tuple[int, int]]) -> Iterator[list]:
        batch: list[tuple[int, int]] = []
        tokens = 0
        for window, index in members:
            size = self._tokens_to_run(pairs[index]) - pairs[index].first
            full = tokens + size > self.batch_tokens or len(batch) == self.batch_pairs
            if batch and full:
                yield batch
                batch, tokens = [], 0
            batch.append((window, index))
            tokens += size
        if batch:
            yield batch

    # ---- one batch of windows ----------------------------------------------------------------------------

    def _score_windows(self, pairs: Sequence[Pair], windows: list[list[int]], out: np.ndarray) -> None:
        length = self._run_length(pairs, [index for members in windows for index in members])
        ref_BL = self._to_device(np.stack([pairs[members[0]].ref[:length] for members in windows]))
        members = [(window, index) for window, found in enumerate(windows) for index in found]
        cache = PrefixCache(
            backend=self.model.kernels.attention,
            tail=max(0, min(pairs[index].first for _, index in members) - 1),
            last_layer=self.model.config.num_layers - 1,
        )
        usual, self.model.run_layer = self.model.run_layer, tail_runner(cache)
        try:
            hidden_BLD = self.model(ref_BL, compute_logits=False, attend=cache).hidden
        finally:
            self.model.run_layer = usual
        score = self._likelihood if self.kind in ("llr", "marginal") else self._change
        finish = score(pairs, windows, members, hidden_BLD)
        for batch in self._suffix_batches(pairs, members):
            running = [(w, i) for w, i in batch if self._tokens_to_run(pairs[i]) > pairs[i].first]
            suffix_hidden_TD = self._run_suffixes(pairs, running, cache) if running else hidden_BLD.new_empty(0, 1)
            finish(batch, running, suffix_hidden_TD, out)

    def _run_suffixes(self, pairs: Sequence[Pair], running: list[tuple[int, int]], cache: PrefixCache) -> Tensor:
        suffixes = Suffixes(
            windows=[window for window, _ in running],
            prefixes=[pairs[index].first for _, index in running],
            lengths=[self._tokens_to_run(pairs[index]) - pairs[index].first for _, index in running],
        )
        tokens_T = self._to_device(
            np.concatenate([pairs[i].alt[pairs[i].first : self._tokens_to_run(pairs[i])] for _, i in running])
        )
        return self.model(
            tokens_T,
            cu_seqlens=suffixes.cu_seqlens(self.device),
            max_seqlen=suffixes.longest,
            position_ids=suffixes.positions(self.device),
            compute_logits=False,
            attend=SuffixAttention(cache, suffixes),
        ).hidden

    def _likelihood(self, pairs, windows, members, hidden_BLD):
        """log p summed from the first difference to the end, ALT minus REF."""
        length = hidden_BLD.shape[1]
        target_BL = self._to_device(np.stack([_shifted(pairs[found[0]].ref, length, self.unk_id) for found in windows]))
        head_VD = self.model.lm_head.weight
        from_token = min(max(pairs[index].first - 1, 0) for _, index in members)
        counted_BL = target_log_probs(hidden_BLD[:, from_token:], head_VD, target_BL[:, from_token:], self.unk_id)
        # total_BL[b, j]: REF's log p of tokens from_token+1 .. from_token+j
        total_BL = F.pad(counted_BL.double().cumsum(1), (1, 0)).cpu().numpy()
        opening = {index: (w, pairs[index].first - 1) for w, index in members if pairs[index].first > 0}
        opened: dict[int, float] = {}
        if opening:
            row, column = (list(numbers) for numbers in zip(*opening.values(), strict=True))
            target = self._to_device(np.array([pairs[index].alt[pairs[index].first] for index in opening]))
            found = target_log_probs(hidden_BLD[row, column], head_VD, target, self.unk_id)
            opened = dict(zip(opening, found.double().tolist(), strict=True))

        def finish(batch, running, suffix_hidden_TD, out) -> None:
            rest = dict.fromkeys((index for _, index in batch), 0.0)
            if running:
                targets = [pairs[i].alt[pairs[i].first + 1 : pairs[i].end] for _, i in running]
                log_p_T = target_log_probs(
                    suffix_hidden_TD, head_VD, self._to_device(np.concatenate(targets)), self.unk_id
                )
                sums = np.add.reduceat(log_p_T.double().cpu().numpy(), np.cumsum([0, *(len(t) for t in targets[:-1])]))
                rest |= dict(zip((index for _, index in running), sums.tolist(), strict=True))
            for window, index in batch:
                pair = pairs[index]
                start = max(pair.first, 1) - 1 - from_token
                ref = total_BL[window, pair.end - 1 - from_token] - total_BL[window, start]
                out[index] = opened.get(index, 0.0) + rest[index] - ref

        return finish

    def _change(self, pairs, windows, members, hidden_BLD):
        """Distance of the hidden states, or divergence of the predictions, that follow the allele."""

        def finish(batch, running, suffix_hidden_TD, out) -> None:
            start = 0
            for window, index in running:
                pair = pairs[index]
                size = self._tokens_to_run(pair) - pair.first
                alt_TD = suffix_hidden_TD[start : start + size]
                start += size
                ref_TD = hidden_BLD[window, pair.first : pair.first + size]
                if self.kind == "embedding":
                    out[index] = float((alt_TD.double().mean(0) - ref_TD.double().mean(0)).norm())
                    continue
                # the last token of the allele is the first whose prediction concerns what follows it
                ref_TD = ref_TD[max(0, pair.ref_after - 1 - pair.first) :]
                alt_TD = alt_TD[max(0, pair.alt_after - 1 - pair.first) :]
                same = min(len(ref_TD), len(alt_TD))
                if same:
                    out[index] = float(self._divergence(ref_TD[:same], alt_TD[:same]).double().mean())

        return finish

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


def _shifted(ids: np.ndarray, length: int, fill: int) -> np.ndarray:
    """The token that follows each of the first `length`; `fill` after the last of all."""
    following = ids[1 : length + 1]
    return np.append(following, np.full(length - len(following), fill, dtype=ids.dtype))
