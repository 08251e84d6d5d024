"""Batches: what a model is fed, fixed windows or packed sequences, with a weight for every target.

Axis legend: B windows, S tokens of a window, T tokens of a packed batch, N packed sequences.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from genomoe.genome.alphabet import KmerTokenizer, Tokenizer

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


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A batch before it is widened: one or a few bytes a token, cheap to send between processes.

    The sequences lie end to end, each in its own room of `sizes` tokens, padding at the end of the room.
    """

    data: Tensor
    """One tensor, so that sending it costs one shared-memory segment, [rows, T]. uint8: tokens, whether a token has
    weight 1, and, where any base is, whether it is soft-masked. int32: tokens, and the bits of float32 weights."""
    sizes: np.ndarray
    """int64 [N] tokens of each room; their sum is T."""
    packed: bool
    soft_mask_weight: float
    pad_id: int
    index: np.ndarray
    """int64 [N]."""
    tags: tuple[str, ...]

    def expand(self) -> Batch:
        """Widen to int64 and float32 and shift the targets by one place."""
        sizes = torch.from_numpy(self.sizes)
        index = torch.from_numpy(self.index)
        ends = torch.cumsum(sizes, 0)
        narrow = self.data[0]
        tokens = narrow.to(torch.int64)
        labels = torch.empty_like(tokens)
        labels[:-1] = narrow[1:]
        labels[ends - 1] = self.pad_id
        weights = torch.empty(tokens.shape, dtype=torch.float32)
        if self.data.dtype == torch.int32:
            weights[:-1] = self.data[1].view(torch.float32)[1:]
        else:
            weights[:-1] = self.data[1, 1:]
            if len(self.data) > 2:
                weights[:-1].add_(self.data[2, 1:], alpha=self.soft_mask_weight)
        weights[ends - 1] = 0
        longest = int(self.sizes.max())
        if not self.packed:
            shape = (len(self.sizes), longest)
            tokens, labels, weights = tokens.view(shape), labels.view(shape), weights.view(shape)
            return Batch(tokens=tokens, labels=labels, weights=weights, max_seqlen=longest, index=index, tags=self.tags)
        count = torch.arange(longest)
        return Batch(
            tokens=tokens,
            labels=labels,
            weights=weights,
            cu_seqlens=torch.cat([ends[:1] * 0, ends]).to(torch.int32),
            max_seqlen=longest,
            position_ids=torch.cat([count[:size] for size in self.sizes.tolist()]),
            index=index,
            tags=self.tags,
        )


class Encoder:
    """Letters to tokens and target weights by table.

    Args:
        tokenizer: any genome.alphabet tokenizer.
        soft_mask_weight: weight of a lower-case base as a target, in [0, 1].
        soft_masked: False promises that no letter is lower-case, which saves a pass.
    """

    def __init__(self, tokenizer: Tokenizer, soft_mask_weight: float, soft_masked: bool = True) -> None:
        self.tokenizer = tokenizer
        self.soft_masked = soft_masked
        self.soft_mask_weight = soft_mask_weight
        source = tokenizer.base_table if isinstance(tokenizer, KmerTokenizer) else tokenizer.table
        assert source is not None
        table = bytearray(source)
        table[PAD_LETTER] = tokenizer.pad_id
        self._table = bytes(table)

    def __call__(
        self,
        letters: np.ndarray,
        *,
        starts: np.ndarray,
        lengths: np.ndarray,
        sizes: np.ndarray,
        packed: bool,
        index: np.ndarray,
        tags: tuple[str, ...] = (),
    ) -> RawBatch:
        """Encode sequences that lie end to end.

        Args:
            letters: uint8 [bases]; the room of each sequence is filled with PAD_LETTER after its own letters.
            starts: int64 [N] first letter of each sequence.
            lengths: int64 [N] letters of each sequence, without padding.
            sizes: int64 [N] tokens of each sequence's room.
            packed: whether the batch is THD.
            index: int64 [N] sequence numbers.
            tags: sequence labels.
        """
        raw = letters.tobytes()
        columns = [raw.translate(self._table), raw.translate(_FULL)]
        if self.soft_masked:
            columns.append(raw.translate(_SOFT))
        if isinstance(self.tokenizer, KmerTokenizer):
            data = self._kmers(columns, starts, lengths, sizes)
        else:
            data = np.empty((len(columns), len(raw)), dtype=np.uint8)
            for row, column in zip(data, columns, strict=True):
                row[:] = np.frombuffer(column, dtype=np.uint8)
        return RawBatch(
            data=torch.from_numpy(data),
            sizes=np.ascontiguousarray(sizes, dtype=np.int64),
            packed=packed,
            soft_mask_weight=self.soft_mask_weight,
            pad_id=self.tokenizer.pad_id,
            index=np.ascontiguousarray(index, dtype=np.int64),
            tags=tags,
        )

    def _kmers(self, columns: list[bytes], starts: np.ndarray, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """k-mers of each sequence, its remainder by the tokenizer's rule; a k-mer weighs the mean of its bases,
        and 0 where one of them is ambiguous. In a fixed window the last bases of a short sequence (fewer than k - 1)
        are left out where their single-base tokens would not fit."""
        assert isinstance(self.tokenizer, KmerTokenizer)
        k = self.tokenizer.bases_per_token
        ids, full, *soft = (np.frombuffer(column, dtype=np.uint8) for column in columns)
        weights = full.astype(np.float32)
        for column in soft:
            weights += column * np.float32(self.soft_mask_weight)
        data = np.full((2, int(sizes.sum())), self.tokenizer.pad_id, dtype=np.int32)
        tokens, out = data[0], data[1].view(np.float32)
        out[:] = 0
        places = np.cumsum(sizes) - sizes
        rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), sizes.tolist(), strict=True)
        for start, length, place, size in rows:
            whole = length // k
            rest = min(length % k, size - whole)  # a fixed window may lack room for the last few bases
            length = whole * k + rest
            tokens[place : place + whole + rest] = self.tokenizer.encode_bases(ids[start : start + length])
            grouped = weights[start : start + whole * k].reshape(whole, k)
            out[place : place + whole] = np.where((grouped == 0).any(axis=1), 0, grouped.mean(axis=1))
            out[place + whole : place + whole + rest] = weights[start + whole * k : start + length]
        return data


def weight_table(soft_mask_weight: float) -> np.ndarray:
    """float32 [256] weight of a letter as a target: 1 for ACGTU, soft_mask_weight for acgtu, 0 for all else."""
    table = np.zeros(256, dtype=np.float32)
    table[list(b"ACGTU")] = 1.0
    table[list(b"acgtu")] = soft_mask_weight
    return table


def _flags(letters: bytes) -> bytes:
    return bytes(int(byte in letters) for byte in range(256))


_FULL, _SOFT = _flags(b"ACGTU"), _flags(b"acgtu")
