"""Read the sequence of a store straight from its shard files: the bytes Zarr gives, without its event loop.

Zarr hands every read to a thread of its own, which costs more than decoding a chunk of DNA does. The layout is the
published one (Zarr v3 core, and the sharding_indexed, zstd and crc32c codecs): a shard file is chunks in any order,
then an index of (offset, bytes) for each chunk, 2^64 - 1 where a chunk is all fill value, then the index's CRC-32C.
`open_shards` returns None for any other layout, which Zarr itself then reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from genomoe.genome.errors import IntegrityError
from genomoe.genome.random_access import FileHandle

_ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)


class ShardReader:
    """A one-dimensional uint8 array in shards; picklable, and safe after fork."""

    def __init__(self, folder: Path, *, length: int, shard: int, chunk: int) -> None:
        self._folder, self._length, self._shard, self._chunk = folder, length, shard, chunk
        self._files: dict[int, tuple[FileHandle, np.ndarray] | None] = {}

    def read(self, start: int, end: int) -> np.ndarray:
        """Elements [start, end) as uint8; raises IntegrityError for a chunk whose checksum fails."""
        out = np.zeros(max(end - start, 0), dtype=np.uint8)
        for number in range(start // self._chunk, -(-end // self._chunk)):
            low = number * self._chunk
            first, last = max(start, low), min(end, low + self._chunk)
            data = self._chunk_bytes(number)
            if data is not None:
                out[first - start : last - start] = np.frombuffer(data, dtype=np.uint8)[first - low : last - low]
        return out

    def _chunk_bytes(self, number: int) -> bytes | None:
        import google_crc32c
        from numcodecs.zstd import decompress

        per_shard = self._shard // self._chunk
        shard, place = divmod(number, per_shard)
        if shard not in self._files:
            self._files[shard] = self._open(shard, per_shard)
        opened = self._files[shard]
        if opened is None:
            return None
        handle, index = opened
        offset, size = index[place]
        if offset == _ABSENT:
            return None
        raw = handle.pread(int(size), int(offset))
        body, stored = raw[:-4], int.from_bytes(raw[-4:], "little")
        if len(raw) != size or google_crc32c.value(body) != stored:
            raise IntegrityError(f"{handle.path}: a chunk fails its checksum; build the store again.")
        data = bytes(decompress(body))
        if len(data) != self._chunk:
            raise IntegrityError(f"{handle.path}: a chunk has {len(data)} bytes instead of {self._chunk}.")
        return data

    def _open(self, shard: int, per_shard: int) -> tuple[FileHandle, np.ndarray] | None:
        import google_crc32c

        path = self._folder / "c" / str(shard)
        if not path.is_file():
            return None
        handle = FileHandle(str(path))
        size = 16 * per_shard
        tail = handle.pread(size + 4, handle.signature[0] - size - 4) if handle.signature[0] >= size + 4 else b""
        if len(tail) != size + 4 or google_crc32c.value(tail[:size]) != int.from_bytes(tail[size:], "little"):
            raise IntegrityError(f"{path}: the shard's index fails its checksum; build the store again.")
        return handle, np.frombuffer(tail[:size], dtype="<u8").reshape(per_shard, 2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}


def open_shards(folder: Path) -> ShardReader | None:
    """A reader for the array in `folder`, or None where its metadata isn't exactly what genomoe.data.build writes."""
    try:
        import google_crc32c  # noqa: F401 - Zarr brings it; without it Zarr reads

        metadata = json.loads((folder / "zarr.json").read_text())
        (length,), (shard,) = metadata["shape"], metadata["chunk_grid"]["configuration"]["chunk_shape"]
        (sharding,) = metadata["codecs"]
        inner = sharding["configuration"]
        (chunk,) = inner["chunk_shape"]
        expected = {
            "data_type": metadata["data_type"] == "uint8",
            "fill_value": metadata["fill_value"] == 0,
            "keys": metadata["chunk_key_encoding"] == {"name": "default", "configuration": {"separator": "/"}},
            "sharding": sharding["name"] == "sharding_indexed" and inner.get("index_location", "end") == "end",
            "codecs": [codec["name"] for codec in inner["codecs"]] == ["bytes", "zstd", "crc32c"],
            "index": [codec["name"] for codec in inner["index_codecs"]] == ["bytes", "crc32c"],
            "endian": inner["index_codecs"][0]["configuration"]["endian"] == "little",
            "transformers": not metadata.get("storage_transformers"),
            "whole": shard % chunk == 0,
        }
    except (ImportError, OSError, KeyError, ValueError, TypeError):
        return None
    return ShardReader(folder, length=length, shard=shard, chunk=chunk) if all(expected.values()) else None
