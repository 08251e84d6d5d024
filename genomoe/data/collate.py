"""Batches: what a model is fed, fixed windows or packed sequences, with a weight for every target.

Axis legend: B windows, S tokens of a window, T tokens of a packed batch, N packed sequences.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from genomoe.genome.alphabet import COMPLEMENT, KmerTokenizer, Tokenizer

PAD_LETTER = 0
"""The byte that stands for padding among letters."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, next-token targets and the weight of each target.

    ``labels[i]`` is the token after ``tokens[i]`` in the same sequence. A sequence's last position has label
    ``pad_id`` and weight 0, so the first base of a sequence is never a target.
    """

    tokens: Tensor
    """int64 [B, S], or [T] packed."""
    labels: Tensor
    """int64, same shape."""
    weights: Tensor
    """float32, same shape: 1, the soft-mask weight for lower-case targets, 0 for ambiguous, padding, boundary."""
    cu_seqlens: Tensor | None = None
    """int32 [N + 1] starts of the packed sequences and the end; None for fixed windows."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    position_ids: Tensor | None = None
    """int64 [T], restarting at 0 in every packed sequence; None for fixed windows."""
    index: Tensor
    """int64 [B] or [N]: number of each sequence within its epoch; -1 for a filler row."""
    tags: tuple[str, ...] = ()
    """Name of each sequence's source."""

    def _map(self, function) -> Batch:
        changed = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **changed)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.tokens.numel()


def reverse_complement_rows(letters: np.ndarray, lengths: np.ndarray, rows: np.ndarray) -> None:
    """Reverse-complement some rows of [B, W] letters in place; each row's padding stays at its end."""
    for row in np.flatnonzero(rows):
        length = lengths[row]
        letters[row, :length] = COMPLEMENT[letters[row, :length][::-1]]


class Encoder:
    """Letters to tokens and target weights by table.

    Args:
        tokenizer: any genome.alphabet tokenizer.
        soft_mask_weight: weight of a lower-case base as a target, in [0, 1].
    """

    def __init__(self, tokenizer: Tokenizer, soft_mask_weight: float) -> None:
        self.tokenizer = tokenizer
        self.soft_mask_weight = soft_mask_weight
        source = tokenizer._base.table if isinstance(tokenizer, KmerTokenizer) else tokenizer.table
        assert source is not None
        table = bytearray(source)
        table[PAD_LETTER] = tokenizer.pad_id
        self._table = bytes(table)
        self._weights = {
            masked: weight_table(soft_mask_weight if masked else 1.0) for masked in (False, True)
        }

    def __call__(self, letters: np.ndarray, soft_masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and weights *of the tokens themselves* (not yet shifted to the place that predicts them).

        Args:
            letters: uint8 [B, W], padded at the end of a row with PAD_LETTER.
            soft_masked: bool [B], whether lower case is masking in that row.

        Returns:
            tokens [B, S] (uint8 or int32) and weights float32 [B, S]; S = ceil(W / bases per token).
        """
        ids = np.frombuffer(letters.tobytes().translate(self._table), dtype=np.uint8).reshape(letters.shape)
        if soft_masked.all() or not soft_masked.any():
            weights = self._weights[bool(soft_masked.all())][letters]
        else:
            weights = np.stack(
                [self._weights[bool(m)][row] for m, row in zip(soft_masked, letters, strict=True)]
            )
        if isinstance(self.tokenizer, KmerTokenizer):
            return self._kmers(ids, weights)
        return ids, weights

    def _kmers(self, ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whole k-mers; a padded tail of a row that isn't a whole k-mer follows the tokenizer's remainder rule."""
        assert isinstance(self.tokenizer, KmerTokenizer)
        k = self.tokenizer.bases_per_token
        rows, width = ids.shape
        slots = -(-width // k)
        tokens = np.full((rows, slots + k - 1), self.tokenizer.pad_id, dtype=np.int32)
        token_weights = np.zeros((rows, slots + k - 1), dtype=np.float32)
        lengths = (ids != self.tokenizer.pad_id).sum(axis=1)
        for row, length in enumerate(lengths):
            encoded = self.tokenizer.encode_bases(ids[row, :length])
            whole = length // k
            tokens[row, : len(encoded)] = encoded
            grouped = weights[row, : whole * k].reshape(whole, k)
            token_weights[row, :whole] = np.where((grouped == 0).any(axis=1), 0, grouped.mean(axis=1))
            token_weights[row, whole : len(encoded)] = weights[row, whole * k : length]
        used = int(max(slots, (lengths // k + lengths % k).max(initial=0)))
        return tokens[:, :used], token_weights[:, :used]


def weight_table(soft_mask_weight: float) -> np.ndarray:
    """[256] float32 weight of a letter as a target: 1 for ACGTU, soft_mask_weight for acgtu, 0 for all else."""
    table = np.zeros(256, dtype=np.float32)
    table[list(b"ACGTU")] = 1.0
    table[list(b"acgtu")] = soft_mask_weight
    return table


def collate_windows(
    tokens: np.ndarray, weights: np.ndarray, *, pad_id: int, index: np.ndarray, tags: tuple[str, ...]
) -> Batch:
    """Fixed windows [B, S] to a Batch: labels are the tokens one place to the left."""
    rows, width = tokens.shape
    shifted = torch.full((rows, width + 1), pad_id, dtype=torch.int64)
    shifted.numpy()[:, :width] = tokens
    target_weights = torch.zeros((rows, width), dtype=torch.float32)
    target_weights.numpy()[:, :-1] = weights[:, 1:]
    return Batch(
        tokens=shifted[:, :-1].contiguous(),
        labels=shifted[:, 1:].contiguous(),
        weights=target_weights,
        max_seqlen=width,
        index=torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)),
        tags=tags,
    )


def collate_packed(
    sequences: list[tuple[np.ndarray, np.ndarray]],
    *,
    pad_id: int,
    index: np.ndarray,
    tags: tuple[str, ...],
    pad_to_multiple: int = 1,
) -> Batch:
    """Sequences of (tokens, weights) one after another, with cu_seqlens (THD).

    Each sequence's length is rounded up to a multiple of `pad_to_multiple` with padding of weight 0 (context
    parallelism over c ranks with a balanced causal split wants 2 c).
    """
    lengths = np.array([len(tokens) for tokens, _ in sequences], dtype=np.int64)
    padded = -(-lengths // pad_to_multiple) * pad_to_multiple
    starts = np.concatenate([[0], np.cumsum(padded)])
    total = int(starts[-1])
    tokens = torch.full((total,), pad_id, dtype=torch.int64)
    labels = torch.full((total,), pad_id, dtype=torch.int64)
    weights = torch.zeros(total, dtype=torch.float32)
    positions = torch.empty(total, dtype=torch.int64)
    for (ids, target), start, length, size in zip(sequences, starts, lengths, padded, strict=False):
        tokens.numpy()[start : start + length] = ids
        labels.numpy()[start : start + length - 1] = ids[1:]
        weights.numpy()[start : start + length - 1] = target[1:]
        positions[start : start + size] = torch.arange(size)
    return Batch(
        tokens=tokens,
        labels=labels,
        weights=weights,
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        max_seqlen=int(padded.max(initial=0)),
        position_ids=positions,
        index=torch.from_numpy(np.ascontiguousarray(index, dtype=np.int64)),
        tags=tags,
    )
