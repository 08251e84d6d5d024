"""Bytes by position from a plain or a bgzip file, with nothing written beside it.

Handles are opened per process and only when first read, so both classes survive fork, spawn and pickling. The block
table of a bgzip file is read from its block headers (about 20 bytes a block), so no .gzi is needed or trusted.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from typing import Protocol

import numpy as np

from genomoe.genome.errors import InputError, IntegrityError


class ByteReader(Protocol):
    """The uncompressed bytes [start, end) of a file."""

    def read(self, start: int, end: int) -> bytes: ...

    @property
    def size(self) -> int: ...


MOST_OPEN = 128
"""Descriptors a process keeps open at a time: a corpus may have thousands of files."""

_open: OrderedDict[int, tuple[FileHandle, int]] = OrderedDict()
_lock = threading.Lock()


def _forget_after_fork() -> None:
    """A forked process opens its files anew (and its lock may have been held by another thread)."""
    global _lock
    _lock = threading.Lock()
    _open.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


class FileHandle:
    """A file descriptor opened in the process that uses it, on the file as it was first seen.

    Raises IntegrityError when the file's size or modification time is no longer what it was at construction.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.signature = file_signature(path)

    def pread(self, size: int, offset: int) -> bytes:
        """`size` bytes at `offset`; fewer only at the end of the file."""
        with _lock:  # so that no other thread closes the descriptor meanwhile
            descriptor = self._descriptor()
            data = os.pread(descriptor, size, offset)
            while len(data) < size:  # one call returns at most 2 GiB
                more = os.pread(descriptor, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        return data

    def _descriptor(self) -> int:
        found = _open.get(id(self))
        if found is not None:
            _open.move_to_end(id(self))
            return found[1]
        check_signature(self.path, self.signature)
        descriptor = os.open(self.path, os.O_RDONLY)
        _open[id(self)] = (self, descriptor)  # holds self, so that no other handle can take its id
        if len(_open) > MOST_OPEN:
            _, (_, oldest) = _open.popitem(last=False)
            os.close(oldest)
        return descriptor


def file_signature(path: str) -> tuple[int, int]:
    """(size, modification time in ns): what must not change while a file is in use."""
    info = os.stat(path)
    return info.st_size, info.st_mtime_ns


def check_signature(path: str, signature: tuple[int, int]) -> None:
    """Raises IntegrityError when the file isn't the one first seen."""
    if file_signature(path) != tuple(signature):
        raise IntegrityError(f"{path} changed while it was in use; open it again to read the new content.")


class PlainFile:
    """An uncompressed file."""

    def __init__(self, path: str) -> None:
        self._handle = FileHandle(path)

    @property
    def size(self) -> int:
        return self._handle.signature[0]

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end), fewer past the end of the file."""
        return self._handle.pread(end - start, start)


class BgzfFile:
    """A bgzip file (SAM specification, section 4.1): gzip members of at most 64 KiB, each with its own size."""

    def __init__(self, path: str) -> None:
        self._handle = FileHandle(path)
        self._compressed, self._uncompressed = self._scan()
        self._cached: tuple[int, bytes] = (-1, b"")

    @property
    def size(self) -> int:
        return int(self._uncompressed[-1])

    def read(self, start: int, end: int) -> bytes:
        """The uncompressed bytes [start, end), fewer past the end of the file."""
        end = min(end, self.size)
        if end <= start:
            return b""
        first = int(np.searchsorted(self._uncompressed, start, side="right")) - 1
        last = int(np.searchsorted(self._uncompressed, end, side="left")) - 1
        kept, piece = self._cached  # one attribute read: threads may share the reader
        pieces = [piece] if kept == first else []
        following = first + len(pieces)
        if following <= last:
            edges = self._compressed[following : last + 2].tolist()
            raw = memoryview(self._handle.pread(edges[-1] - edges[0], edges[0]))
            for block, (low, high) in enumerate(itertools.pairwise(edges), following):
                pieces.append(self._inflate(raw[low - edges[0] : high - edges[0]], block))
            self._cached = (last, pieces[-1])
        pieces[-1] = pieces[-1][: end - int(self._uncompressed[last])]
        pieces[0] = pieces[0][start - int(self._uncompressed[first]) :]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_cached": (-1, b"")}

    def _inflate(self, member: memoryview, block: int) -> bytes:
        from isal import isal_zlib  # inflates twice as fast as zlib, and checks six times as fast

        extra = int.from_bytes(member[10:12], "little")
        expected = int(self._uncompressed[block + 1] - self._uncompressed[block])
        try:
            data = isal_zlib.decompress(member[12 + extra : -8], -15, expected or 1)
        except isal_zlib.error as error:  # type: ignore[misc]  # the stub calls it an instance
            raise InputError(f"{self._handle.path}: a bgzip block is damaged ({error}); fetch it again.") from None
        if len(data) != expected or isal_zlib.crc32(data) != int.from_bytes(member[-8:-4], "little"):
            raise InputError(f"{self._handle.path}: a bgzip block fails its checksum; fetch the file again.")
        return data

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        total = self._handle.signature[0]
        compressed, sizes = [0], [0]
        place = 0
        window, window_start = b"", 0
        while place < total:
            if place + 18 > window_start + len(window):
                window, window_start = self._handle.pread(1 << 20, place), place
            head = window[place - window_start : place - window_start + 18]
            if len(head) < 18 or head[:4] != b"\x1f\x8b\x08\x04" or head[12:14] != b"BC":
                raise InputError(
                    f"{self._handle.path}: byte {place} is not the start of a bgzip block; the file is truncated "
                    "or was appended to by another tool."
                )
            following = place + int.from_bytes(head[16:18], "little") + 1
            if following > total:
                raise InputError(f"{self._handle.path}: the last bgzip block is cut off; fetch the file again.")
            tail = following - 4 - window_start
            if tail + 4 > len(window):
                window, window_start = self._handle.pread(1 << 20, place), place
                tail = following - 4 - window_start
            sizes.append(int.from_bytes(window[tail : tail + 4], "little"))
            compressed.append(following)
            place = following
        if sizes[-1] != 0:
            raise InputError(f"{self._handle.path}: the bgzip end marker is missing, so the file is truncated.")
        return np.array(compressed, dtype=np.int64), np.cumsum(np.array(sizes, dtype=np.int64))
