"""Batches: what a model is fed, fixed windows or packed sequences, with a weight for every target.

Axis legend: B windows, S tokens of a window, T tokens of a packed batch, N packed sequences.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from genomoe.genome.alphabet import COMPLEMENT, BaseTokenizer, KmerTokenizer, Tokenizer
from genomoe.genome.errors import GenoMoEError

SOFT = 128
"""Added to the id of a soft-masked base in a RawBatch."""


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


class TensorPool:
    """Memory for tensors that is used again once nobody holds them, because fresh memory costs more than filling it.

    A buffer is free when its reference count says that no tensor, view or array made from it is left, so a batch may
    be kept for as long as one likes.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = [np.empty(0, dtype=np.uint8)]
        self._count = np.empty(0, dtype=np.int64)
        self._idle = self._references(0)  # how the count of a free buffer looks to this interpreter

    def empty(self, count: int, dtype: type[np.generic]) -> Tensor:
        """An uninitialised tensor [count]."""
        size = count * np.dtype(dtype).itemsize
        for place in range(len(self._buffers)):
            if self._references(place) == self._idle and size <= self._buffers[place].nbytes <= 2 * size + 4096:
                return torch.from_numpy(self._buffers[place][:size].view(dtype))
        buffer = np.empty(size, dtype=np.uint8)
        if len(self._buffers) == self._most:
            self._buffers.pop(0)
        self._buffers.append(buffer)
        return torch.from_numpy(buffer.view(dtype))

    def count(self, length: int) -> np.ndarray:
        """int64 0, 1, ..., length - 1, kept; don't write to it."""
        if len(self._count) < length:
            self._count = np.arange(length)
        return self._count[:length]

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._buffers[place])


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """A batch before it is widened: a byte a base, cheap to send between processes.

    The sequences lie end to end, each in its own room of `sizes` tokens, padding at the end of the room.
    """

    codes: Tensor
    """[T]: uint8 ids, plus SOFT where the base is soft-masked; or int32 [2, T]: ids, and the bits of the weights."""
    sizes: np.ndarray
    """int64 [N] tokens of each room; their sum is T."""
    packed: bool
    soft_mask_weight: float
    soft_masked: bool
    """Whether any code may hold SOFT."""
    base_ids: tuple[int, int, int, int]
    pad_id: int
    index: np.ndarray
    """int64 [N]."""
    tags: tuple[str, ...]

    def expand(self, pool: TensorPool | None = None) -> Batch:
        """Widen to int64 and float32 and shift the targets by one place."""
        pool = pool or TensorPool()
        ends = np.cumsum(self.sizes)
        total, longest = int(ends[-1]), int(self.sizes.max())
        tokens, labels = pool.empty(total, np.int64), pool.empty(total, np.int64)
        weights = pool.empty(total, np.float32)
        ids = self._weigh(weights.numpy())
        tokens.numpy()[:] = ids
        labels.numpy()[:-1] = ids[1:]
        last = torch.from_numpy(ends - 1)
        labels[last] = self.pad_id
        weights[last] = 0
        common = {"max_seqlen": longest, "index": torch.from_numpy(self.index), "tags": self.tags}
        if not self.packed:
            shape = (len(self.sizes), longest)
            return Batch(tokens=tokens.view(shape), labels=labels.view(shape), weights=weights.view(shape), **common)
        positions = pool.empty(total, np.int64)
        count, place = pool.count(longest), positions.numpy()
        for start, size in zip((ends - self.sizes).tolist(), self.sizes.tolist(), strict=True):
            place[start : start + size] = count[:size]
        return Batch(
            tokens=tokens,
            labels=labels,
            weights=weights,
            cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)),
            position_ids=positions,
            **common,
        )

    def _weigh(self, weights: np.ndarray) -> np.ndarray:
        """Write each place's target weight (that of the token after it); returns the narrow ids."""
        codes = self.codes.numpy()
        if codes.dtype == np.int32:
            weights[:-1] = codes[1].view(np.float32)[1:]
            return codes[0]
        ids = codes & (SOFT - 1) if self.soft_masked else codes
        first, *others = self.base_ids
        if self.base_ids == tuple(range(first, first + 4)):
            known = (ids - np.uint8(first)) < 4  # unsigned: ids below the first wrap round
        else:
            known = np.logical_or.reduce([ids == base for base in (first, *others)])
        plain = known.view(np.uint8)
        soft = codes >> 7 if self.soft_masked else None
        if soft is None or not soft.any():
            weights[:-1] = plain[1:]
        else:
            weights[:-1] = (plain ^ soft)[1:]
            weights[:-1] += soft[1:] * np.float32(self.soft_mask_weight)
        return ids


class Encoder:
    """Letters to codes by table.

    Args:
        tokenizer: any genome.alphabet tokenizer.
        soft_mask_weight: weight of a lower-case base as a target, in [0, 1].
        soft_masked: False promises that no letter is lower-case, which saves a pass.
    """

    def __init__(self, tokenizer: Tokenizer, soft_mask_weight: float, soft_masked: bool = True) -> None:
        self.tokenizer = tokenizer
        self.soft_masked = soft_masked
        self.soft_mask_weight = soft_mask_weight
        self._bases: BaseTokenizer = tokenizer.bases if isinstance(tokenizer, KmerTokenizer) else tokenizer  # type: ignore[assignment]
        table = bytearray(self._bases.table or b"")
        if max(self._bases.base_ids) >= SOFT or self._bases.pad_id >= SOFT:
            raise GenoMoEError(f"The loader needs base and padding ids below {SOFT}, got {tokenizer!r}.")
        for letter in b"acgtu":
            table[letter] |= SOFT
        self._plus = bytes(table)
        self._minus = bytes(table[complement] for complement in COMPLEMENT)
        self.pad_id = self._bases.pad_id

    def codes(self, letters: np.ndarray, minus: bool) -> np.ndarray:
        """uint8 codes of a window's letters, of its reverse complement where `minus`."""
        if minus:
            return np.frombuffer(letters[::-1].tobytes().translate(self._minus), dtype=np.uint8)
        return np.frombuffer(letters.tobytes().translate(self._plus), dtype=np.uint8)

    def batch(
        self,
        codes: np.ndarray,
        *,
        starts: np.ndarray,
        lengths: np.ndarray,
        sizes: np.ndarray,
        packed: bool,
        index: np.ndarray,
        tags: tuple[str, ...] = (),
    ) -> RawBatch:
        """A batch of sequences that lie end to end.

        Args:
            codes: uint8 [bases]; the room of each sequence is filled with `pad_id` after its own codes.
            starts: int64 [N] first code of each sequence.
            lengths: int64 [N] bases of each sequence, without padding.
            sizes: int64 [N] tokens of each sequence's room.
            packed: whether the batch is THD.
            index: int64 [N] sequence numbers.
            tags: sequence labels.
        """
        if isinstance(self.tokenizer, KmerTokenizer):
            codes = self._kmers(codes, starts, lengths, sizes)
        return RawBatch(
            codes=torch.from_numpy(codes),
            sizes=np.ascontiguousarray(sizes, dtype=np.int64),
            packed=packed,
            soft_mask_weight=self.soft_mask_weight,
            soft_masked=self.soft_masked,
            base_ids=self.tokenizer.base_ids,
            pad_id=self.tokenizer.pad_id,
            index=np.ascontiguousarray(index, dtype=np.int64),
            tags=tags,
        )

    def _kmers(self, codes: np.ndarray, starts: np.ndarray, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """k-mers of each sequence, its remainder by the tokenizer's rule; a k-mer weighs the mean of its bases,
        and 0 where one of them is ambiguous. In a fixed window the last bases of a short sequence (fewer than k - 1)
        are left out where their single-base tokens would not fit."""
        assert isinstance(self.tokenizer, KmerTokenizer)
        k = self.tokenizer.bases_per_token
        ids = codes & (SOFT - 1)
        weights = np.isin(ids, self._bases.base_ids).astype(np.float32)
        weights[codes >= SOFT] = self.soft_mask_weight
        data = np.full((2, int(sizes.sum())), self.tokenizer.pad_id, dtype=np.int32)
        tokens, out = data[0], data[1].view(np.float32)
        out[:] = 0
        places = np.cumsum(sizes) - sizes
        rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), sizes.tolist(), strict=True)
        for start, length, place, size in rows:
            whole = length // k
            rest = min(length % k, size - whole)
            end = start + whole * k + rest
            tokens[place : place + whole + rest] = self.tokenizer.encode_bases(ids[start:end])
            grouped = weights[start : start + whole * k].reshape(whole, k)
            out[place : place + whole] = np.where((grouped == 0).any(axis=1), 0, grouped.mean(axis=1))
            out[place + whole : place + whole + rest] = weights[start + whole * k : end]
        return data


def weight_table(soft_mask_weight: float) -> np.ndarray:
    """float32 [256] weight of a letter as a target: 1 for ACGTU, soft_mask_weight for acgtu, 0 for all else."""
    table = np.zeros(256, dtype=np.float32)
    table[list(b"ACGTU")] = 1.0
    table[list(b"acgtu")] = soft_mask_weight
    return table
