"""Batches: what a model is fed, fixed windows or packed sequences, with a weight for every target.

A batch is made, sent between processes, pinned and moved with one narrow **code** a token, which holds the token's id
and what it weighs as a target; it is widened to what a model reads only on the device where that is read.

Axis legend: B windows, S tokens of a window, T tokens of a packed batch, N sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from genomoe.genome.alphabet import COMPLEMENT, BaseTokenizer, KmerTokenizer, Tokenizer
from genomoe.genome.errors import GenoMoEError

SOFT = 128
"""Added to the id of a soft-masked base to make its code."""
KMER_BITS = 17
"""Bits of a k-mer's code that hold its id: the ids of 8-mers are below 2^17."""
CACHEFUL = 1 << 16
"""Bases encoded or widened at a time, so that what lies between stays in a core's cache."""


class Coding(NamedTuple):
    """How a code is read: ``id = code & mask`` and ``weight = weights[code >> shift]``.

    The code of padding is its id, and weighs nothing.
    """

    mask: int
    shift: int
    weights: tuple[tuple[int, float], ...]
    """Pairs (code >> shift, weight as a target); what isn't named weighs 0."""
    pad_id: int


class Widened(NamedTuple):
    """What a model reads; see Batch."""

    tokens: Tensor
    labels: Tensor
    weights: Tensor
    position_ids: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, next-token targets and the weight of each target.

    ``labels[i]`` is the token after ``tokens[i]`` in the same sequence. A sequence's last position has label
    ``pad_id`` and weight 0, so the first base of a sequence is never a target.

    `tokens`, `labels`, `weights` and `position_ids` are made from the codes when one of them is first asked for, and
    then kept: so move a batch to its device first (`to`), and a byte a base is all that is moved.
    """

    codes: Tensor
    """uint8, or int32 for k-mers, [B, S], or [T] packed."""
    coding: Coding
    cu_seqlens: Tensor | None = None
    """int32 [N + 1] starts of the packed sequences and the end; None for fixed windows."""
    max_seqlen: int
    """Tokens of the longest sequence."""
    index: Tensor
    """int64 [B] or [N]: number of each sequence within its epoch; -1 for a filler row."""
    tags: tuple[str, ...] = ()
    """Name of each sequence's source."""

    @property
    def tokens(self) -> Tensor:
        """int32 [B, S], or [T] packed."""
        return self._widened.tokens

    @property
    def labels(self) -> Tensor:
        """int32, same shape; PyTorch's own losses want them ``.long()``."""
        return self._widened.labels

    @property
    def weights(self) -> Tensor:
        """float32, same shape: 1, the soft-mask weight for lower-case targets, 0 for ambiguous, padding, boundary."""
        return self._widened.weights

    @property
    def position_ids(self) -> Tensor | None:
        """int32 [T], restarting at 0 in every packed sequence; None for fixed windows."""
        return self._widened.position_ids

    @property
    def num_tokens(self) -> int:
        """Tokens, padding included."""
        return self.codes.numel()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    @cached_property
    def _widened(self) -> Widened:
        widen = widen_on_cpu if self.codes.is_cpu else widen_anywhere
        return widen(self.codes, self.cu_seqlens, self.coding)

    def _map(self, function) -> Batch:
        changed = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **changed)

    def __getstate__(self) -> dict[str, Any]:
        """Between processes a tensor is a file in shared memory, which costs more than sending a byte a base does; so
        all go as arrays. What was widened stays here."""
        state = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {key: value.cpu().numpy() if isinstance(value, Tensor) else value for key, value in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        arrays = {name: torch.from_numpy(value) for name, value in state.items() if isinstance(value, np.ndarray)}
        self.__dict__.update(state | arrays)


def widen_anywhere(codes: Tensor, cu_seqlens: Tensor | None, coding: Coding) -> Widened:
    """Tokens, labels, weights and positions of codes [B, S] or [T], on whatever device they are."""
    following = codes.roll(-1, dims=-1)
    positions = None
    if cu_seqlens is None:
        following[:, -1] = coding.pad_id
    else:
        following.index_fill_(0, cu_seqlens[1:].long() - 1, coding.pad_id)
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=len(codes))
        positions = torch.arange(len(codes), dtype=torch.int32, device=codes.device) - starts
    return Widened(
        tokens=(codes & coding.mask).int(),
        labels=(following & coding.mask).int(),
        weights=_weight_table(coding, codes.device)[(following >> coding.shift).long()],
        position_ids=positions,
    )


def widen_on_cpu(codes: Tensor, cu_seqlens: Tensor | None, coding: Coding) -> Widened:
    """The same with NumPy, a cacheful at a time, into memory that was used before.

    PyTorch would spend more processor time on waking other threads and on fresh pages than on the work.
    """
    flat, size = codes.numpy().reshape(-1), codes.numel()
    room = size + size % 2  # weights are looked up for two places at a time
    if room > size:
        flat = np.append(flat, flat[:1])
    pairs = _weight_pairs(coding)
    tokens, targets = POOL.empty(room, np.int32), POOL.empty(room + 1, np.int32)
    target_weights = POOL.empty(room + 2, np.float32)
    for start in range(0, room, CACHEFUL):
        here = slice(start, min(start + CACHEFUL, room))
        tokens[here] = targets[here] = flat[here] & coding.mask
        kinds = (flat[here] >> coding.shift).astype(np.uint8, copy=False)
        pairs.take(kinds.view(np.uint16), out=target_weights[here].view(np.uint64), mode="clip")
    labels, weights = targets[1 : size + 1], target_weights[1 : size + 1]
    positions = None
    if cu_seqlens is None:
        window = codes.shape[1]
        labels[window - 1 :: window] = coding.pad_id
        weights[window - 1 :: window] = 0
    else:
        positions, count = POOL.empty(size, np.int32), np.arange(CACHEFUL, dtype=np.int32)
        for start, end in itertools.pairwise(cu_seqlens.tolist()):
            for low in range(start, end, CACHEFUL):
                high = min(low + CACHEFUL, end)
                np.add(count[: high - low], low - start, out=positions[low:high])
            labels[end - 1] = coding.pad_id
            weights[end - 1] = 0
    return Widened(
        tokens=torch.from_numpy(tokens[:size]).view_as(codes),
        labels=torch.from_numpy(labels).view_as(codes),
        weights=torch.from_numpy(weights).view_as(codes),
        position_ids=None if positions is None else torch.from_numpy(positions),
    )


class ArrayPool(threading.local):
    """Memory for arrays that is used again once nobody holds them, because fresh memory costs more than filling it.

    A buffer is free when its reference count says that no array, view or tensor made from it is left, so a batch may
    be kept for as long as one likes. Each thread has buffers of its own.
    """

    def __init__(self, most: int = 32) -> None:
        self._most = most
        self._buffers: list[np.ndarray] = [np.empty(0, dtype=np.uint8)]
        self._idle = self._references(0)  # how the count of a free buffer looks to this interpreter

    def empty(self, count: int, dtype: type[np.generic]) -> np.ndarray:
        """An uninitialised array [count]."""
        size = count * np.dtype(dtype).itemsize
        for place in range(len(self._buffers)):
            if self._references(place) == self._idle and size <= self._buffers[place].nbytes <= 2 * size + 4096:
                return self._buffers[place][:size].view(dtype)
        buffer = np.empty(size, dtype=np.uint8)
        if len(self._buffers) == self._most:
            self._buffers.pop(0)
        self._buffers.append(buffer)
        return buffer.view(dtype)

    def _references(self, place: int) -> int:
        return sys.getrefcount(self._buffers[place])


POOL = ArrayPool()


@lru_cache
def _weight_table(coding: Coding, device: torch.device) -> Tensor:
    """float32 [256] weight by code >> shift."""
    weights = dict(coding.weights)
    return torch.tensor([weights.get(kind, 0.0) for kind in range(256)], device=device)


@lru_cache(maxsize=8)
def _weight_pairs(coding: Coding) -> np.ndarray:
    """uint64 [65536] the weights of two neighbours by two times code >> shift: half as many look-ups."""
    kinds = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    return _weight_table(coding, torch.device("cpu")).numpy()[kinds].view(np.uint64)


class Encoder:
    """Letters to codes by table, and codes to batches.

    Args:
        tokenizer: any genomoe.genome.alphabet tokenizer.
        soft_mask_weight: weight of a lower-case base as a target, in [0, 1].
    """

    def __init__(self, tokenizer: Tokenizer, soft_mask_weight: float) -> None:
        self.tokenizer = tokenizer
        self._bases: BaseTokenizer = tokenizer.bases if isinstance(tokenizer, KmerTokenizer) else tokenizer  # type: ignore[assignment]
        table = bytearray(self._bases.table or b"")
        if max(self._bases.base_ids) >= SOFT or self._bases.pad_id >= SOFT:
            raise GenoMoEError(f"The loader needs base and padding ids below {SOFT}, got {tokenizer!r}.")
        for letter in b"acgtu":
            table[letter] |= SOFT
        self._plus = bytes(table)
        self._minus = bytes(table[complement] for complement in COMPLEMENT)
        self.pad_id = self._bases.pad_id
        if isinstance(tokenizer, KmerTokenizer):  # a k-mer's class is 1 + how many of its bases are soft-masked
            k = tokenizer.bases_per_token
            weights = tuple((1 + soft, (k - soft + soft * soft_mask_weight) / k) for soft in range(k + 1))
            self.coding = Coding((1 << KMER_BITS) - 1, KMER_BITS, weights, tokenizer.pad_id)
        else:
            plain = tuple((base, 1.0) for base in tokenizer.base_ids)
            soft = tuple((base | SOFT, soft_mask_weight) for base in tokenizer.base_ids)
            self.coding = Coding(SOFT - 1, 0, plain + soft, tokenizer.pad_id)

    def encode(self, letters: np.ndarray, out: np.ndarray, *, minus: bool = False) -> None:
        """Write the code of each letter to `out`; those of the reverse complement where `minus`.

        Args:
            letters: uint8 [n].
            out: uint8 [n].
        """
        table = self._minus if minus else self._plus
        target = out[::-1] if minus else out
        for start in range(0, len(letters), CACHEFUL):
            codes = letters[start : start + CACHEFUL].tobytes().translate(table)
            target[start : start + CACHEFUL] = np.frombuffer(codes, dtype=np.uint8)

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
    ) -> Batch:
        """A batch of sequences that lie end to end.

        Args:
            codes: uint8 [bases]; the room of each sequence is filled with `pad_id` after its own codes.
            starts: int64 [N] first code of each sequence.
            lengths: int64 [N] bases of each sequence, without padding.
            sizes: int64 [N] tokens of each sequence's room; all the same unless packed.
            packed: whether the batch is THD.
            index: int64 [N] sequence numbers.
            tags: sequence labels.
        """
        if isinstance(self.tokenizer, KmerTokenizer):
            codes = self._kmers(codes, starts, lengths, sizes)
        narrow = torch.from_numpy(codes)
        return Batch(
            codes=narrow if packed else narrow.view(len(sizes), -1),
            coding=self.coding,
            cu_seqlens=torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int32)) if packed else None,
            max_seqlen=int(sizes.max()),
            index=torch.from_numpy(np.array(index, dtype=np.int64)),
            tags=tags,
        )

    def _kmers(self, codes: np.ndarray, starts: np.ndarray, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Codes of each sequence's k-mers, its remainder by the tokenizer's rule; a k-mer weighs the mean of its bases,
        and 0 where one of them is ambiguous. In a fixed window the last bases of a short sequence (fewer than k - 1)
        are left out where their single-base tokens would not fit."""
        assert isinstance(self.tokenizer, KmerTokenizer)
        k = self.tokenizer.bases_per_token
        ids, soft = codes & (SOFT - 1), codes >> 7
        known = np.isin(ids, self._bases.base_ids)
        out = np.full(int(sizes.sum()), self.tokenizer.pad_id, dtype=np.int32)
        places = np.cumsum(sizes) - sizes
        rows = zip(starts.tolist(), lengths.tolist(), places.tolist(), sizes.tolist(), strict=True)
        for start, length, place, size in rows:
            whole = length // k
            rest = min(length % k, size - whole)
            middle, end = start + whole * k, start + whole * k + rest
            kinds = np.empty(whole + rest, dtype=np.int32)
            kinds[:whole] = 1 + soft[start:middle].reshape(whole, k).sum(axis=1)
            kinds[:whole] *= known[start:middle].reshape(whole, k).all(axis=1)
            kinds[whole:] = (1 + k * soft[middle:end].astype(np.int32)) * known[middle:end]
            tokens = self.tokenizer.encode_bases(ids[start:end])
            out[place : place + whole + rest] = tokens | kinds << KMER_BITS
        return out


def weight_table(soft_mask_weight: float) -> np.ndarray:
    """float32 [256] weight of a letter as a target: 1 for ACGTU, soft_mask_weight for acgtu, 0 for all else."""
    table = np.zeros(256, dtype=np.float32)
    table[list(b"ACGTU")] = 1.0
    table[list(b"acgtu")] = soft_mask_weight
    return table
