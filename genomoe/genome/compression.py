"""Open a sequence file whatever its compression, told from its first bytes, not from its name.

gzip, bgzip (BGZF), xz and zstd are read as streams; anything else is read as it is. A stream that ends before its
format says so, or carries a failed checksum, raises InputError: a truncated file is never taken for a short one.
"""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

from genomoe.genome.errors import GenoMoEError, InputError

Compression = Literal["plain", "gzip", "bgzip", "xz", "zstd"]

BGZF_END = bytes.fromhex("1f8b08040000000000ff0600424302001b0003000000000000000000")
"""The empty block with which every complete BGZF file ends (SAM specification, section 4.1.2)."""


def require_file(path: str | os.PathLike[str]) -> Path:
    """`path` as a Path to an existing regular file; otherwise an error that says what is there instead."""
    path = Path(path)
    if path.is_dir():
        raise GenoMoEError(f"{path} is a folder, a file was expected; name the file inside it.")
    if str(path) == "-" or (path.exists() and not path.is_file()):
        raise GenoMoEError(
            f"{path} is standard input, a pipe or a device, which can be read only once, and inputs are read more "
            "than once: write it to a file first."
        )
    if not path.exists():
        near = _neighbours(path)
        raise GenoMoEError(f"{path} does not exist{near}.")
    return path


def _neighbours(path: Path) -> str:
    import difflib

    if not path.parent.is_dir():
        return f" (nor does the folder {path.parent})"
    close = difflib.get_close_matches(path.name, os.listdir(path.parent), n=3)
    return f"; near it are {', '.join(close)}" if close else ""


def detect_compression(path: Path) -> Compression:
    """What the first bytes say; 'bgzip' is gzip with BGZF's extra field, which allows random access."""
    with open(path, "rb") as handle:
        head = handle.read(18)
    if head[:2] == b"\x1f\x8b":
        is_bgzf = len(head) >= 18 and head[3] & 4 and head[12:14] == b"BC"
        return "bgzip" if is_bgzf else "gzip"
    if head[:6] == b"\xfd7zXZ\x00":
        return "xz"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return "zstd"
    return "plain"


@contextmanager
def open_stream(path: Path) -> Iterator[BinaryIO]:
    """The decompressed bytes of `path` as a readable stream; broken compression raises InputError."""
    kind = detect_compression(path)
    if kind == "bgzip":
        _require_bgzf_end(path)
    try:
        if kind == "plain":
            with open(path, "rb", buffering=0) as handle:
                yield cast(BinaryIO, handle)
        elif kind in ("gzip", "bgzip"):
            with gzip.open(path, "rb") as stream:
                yield cast(BinaryIO, stream)
        elif kind == "xz":
            with lzma.open(path, "rb") as stream:
                yield cast(BinaryIO, stream)
        else:
            yield cast(BinaryIO, _ZstdStream(path))
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise InputError(
            f"{path}: the {kind} stream is truncated or damaged ({error}); fetch or compress the file again."
        ) from None


def _require_bgzf_end(path: Path) -> None:
    size = path.stat().st_size
    with open(path, "rb") as handle:
        handle.seek(max(0, size - len(BGZF_END)))
        if handle.read() != BGZF_END:
            raise InputError(
                f"{path}: the bgzip end marker is missing, so the file is truncated; fetch it again, "
                "or run `gunzip -c FILE | bgzip > NEW` if the tool that wrote it leaves the marker out."
            )


class _ZstdStream:
    """Reads zstd frames through pyarrow, which GenoMoE needs anyway, and checks that the last frame is whole."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        self._path = path
        self._stream = pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd")

    def read(self, size: int = -1) -> bytes:
        try:
            return self._stream.read(size if size >= 0 else None)
        except OSError as error:
            raise InputError(
                f"{self._path}: the zstd stream is truncated or damaged ({error}); fetch or compress it again."
            ) from None
