"""The corpus store: one Zarr v3 group that any number of processes may read at once.

Layout (format version 1; all arrays one-dimensional unless said):

```
NAME.zarr/                      attributes["genomoe"]: format, sources and their files, hashes, statistics
  sequence      uint8 [bytes]   all contigs end to end, four bases a byte: A 0, C 1, G 2, T 3, the first base in the
                                lowest bits; a letter that is no base is written 0. zstd chunks with a CRC-32C,
                                32 to a shard, so a corpus of any size is a handful of files
  letters       int64 [r, 3]    start, end and ASCII letter of every run of N or of another ambiguity code
  mask_runs     int64 [runs, 2] soft-masked stretches on the global axis
  contig_names  uint8 [bytes]   the names, UTF-8, each ended by a zero byte
  contigs       int64 [n, 6]    length, source, letters N, letters G or C, other ambiguity codes, content hash
  segments      int64 [s, 3]    start, end, source: where windows may be cut
```

A store is written under a temporary name and renamed when it is whole, so an incomplete one is never opened.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import zarr

from genomoe.data.corpus import Segments, SourceInfo, apply_letters, apply_mask, contig_table, file_sha256
from genomoe.data.shards import open_shards
from genomoe.genome.compression import require_file
from genomoe.genome.errors import GenoMoEError, IntegrityError
from genomoe.wording import counted

FORMAT = 1
CHUNK = 1 << 17
"""Bytes of a chunk: 524,288 bases."""
PIECE = 1 << 14
"""Bytes unpacked at a time."""
SHARD = 1 << 22
"""Bytes of a shard: 16,777,216 bases."""
BASES_PER_BYTE = 4
ALPHABET = "ACGT, two bits each, and runs of IUPAC letters; U written as T; soft-masking in mask_runs"
TABLES = ("letters", "mask_runs", "contig_names", "contigs", "segments")

_CODES = bytes({ord("C"): 1, ord("G"): 2, ord("T"): 3}.get(byte, 0) for byte in range(256))
_UNPACK = np.array(
    [[b"ACGT"[(byte >> shift) & 3] for shift in (0, 2, 4, 6)] for byte in range(256)], dtype=np.uint8
).view("<u4")[:, 0]


def pack(letters: bytes) -> np.ndarray:
    """Upper-case letters to uint8 [ceil(n / 4)], two bits each; letters that are no base become 0."""
    codes = letters.translate(_CODES) + b"\0" * (-len(letters) % 4)
    quads = np.frombuffer(codes, dtype="<u4")
    return ((quads | quads >> 6 | quads >> 12 | quads >> 18) & 0xFF).astype(np.uint8)


def unpack(packed: np.ndarray) -> np.ndarray:
    """uint8 [n] to upper-case letters, uint8 [4 n]."""
    letters = np.empty(len(packed), dtype="<u4")
    for start in range(0, len(packed), PIECE):  # take widens its indices, so these stay in a core's cache
        here = slice(start, start + PIECE)
        _UNPACK.take(packed[here], out=letters[here], mode="clip")
    return letters.view(np.uint8)


OnChange = Literal["error", "warn", "ignore"]


class ZarrCorpus:
    """A store opened for reading; picklable, and safe to use after fork and in spawned workers.

    Args:
        path: the store's folder.
        on_changed_source: what to do when a source file that is still there is no longer what was built from.

    Raises IntegrityError for another format version, a damaged table or a changed source, and GenoMoEError for a
    folder that is no store.
    """

    def __init__(self, path: str | os.PathLike[str], *, on_changed_source: OnChange = "error") -> None:
        self.path = Path(path)
        group = self._open()
        self.attributes: dict[str, Any] = dict(group.attrs["genomoe"])  # type: ignore[arg-type]
        if self.attributes.get("format") != FORMAT:
            raise IntegrityError(
                f"{self.path} has format {self.attributes.get('format')!r}; this GenoMoE reads {FORMAT}. "
                "Build the store again with `genomoe corpus build`."
            )
        tables = {name: np.asarray(group[name][:]) for name in TABLES}  # type: ignore[index]
        self._check_tables(tables)
        self.mask_runs = tables["mask_runs"]
        self.letters = tables["letters"]
        names = tables["contig_names"].tobytes().decode("utf-8").split("\0")[:-1]
        self.composition = tables["contigs"]
        self.contigs = contig_table(names, self.composition[:, 0], self.composition[:, 1])
        starts, ends, sources = tables["segments"].T
        self.segments = Segments(starts, ends, sources.astype(np.int32))
        self.sources = tuple(
            SourceInfo(row["name"], row["weight"], row["soft_masked"], row["tags"], row["split"])
            for row in self.attributes["sources"]
        )
        size = -(-int(self.contigs.lengths.sum()) // BASES_PER_BYTE)
        if group["sequence"].shape != (size,):  # type: ignore[union-attr]
            raise IntegrityError(f"{self.path}: the sequence's length doesn't agree with the contig table.")
        check_sources(self.path, self.attributes, on_changed_source)
        self._shards = open_shards(self.path / "sequence")
        self._local: tuple[int, Any] = (os.getpid(), group["sequence"])

    def read(self, start: int, end: int) -> np.ndarray:
        """Letters [start, end) of the global axis as uint8; lower case is soft-masked."""
        first = start // BASES_PER_BYTE
        letters = unpack(self._packed(first, -(-end // BASES_PER_BYTE)))
        letters = letters[start - first * BASES_PER_BYTE :][: end - start]
        apply_letters(letters, start, self.letters)
        apply_mask(letters, start, self.mask_runs)
        return letters

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of each source file as it was when the store was built, by its path."""
        return {file["path"]: file["sha256"] for source in self.attributes["sources"] for file in source["files"]}

    def verify(self) -> None:
        """Read everything and compare it with the recorded hash; raises IntegrityError for the first difference."""
        digest = hashlib.sha256()
        total = -(-int(self.contigs.lengths.sum()) // BASES_PER_BYTE)
        for start in range(0, total, SHARD):
            try:
                digest.update(np.ascontiguousarray(self._packed(start, min(start + SHARD, total))).data)
            except Exception as error:  # every codec has its own exception for damaged bytes
                raise IntegrityError(
                    f"{self.path}: a chunk near base {start * BASES_PER_BYTE:,} is damaged ({error})."
                ) from None
        if digest.hexdigest() != self.attributes["sequence_sha256"]:
            raise IntegrityError(f"{self.path}: the sequence isn't the one that was built; build the store again.")

    def _open(self) -> zarr.Group:
        if not self.path.is_dir():
            require_file(self.path)
            raise GenoMoEError(f"{self.path} is a file, not a corpus store; build one with `genomoe corpus build`.")
        try:
            group = zarr.open_group(str(self.path), mode="r", zarr_format=3)
            group.attrs["genomoe"]
        except (FileNotFoundError, KeyError, ValueError) as error:
            raise GenoMoEError(
                f"{self.path} is not a corpus store ({type(error).__name__}); build one with `genomoe corpus build`."
            ) from None
        return group

    def _packed(self, start: int, end: int) -> np.ndarray:
        if self._shards is not None:
            return self._shards.read(start, end)
        return np.asarray(self._sequence()[start:end])

    def _sequence(self) -> Any:
        process, array = self._local
        if process != os.getpid():
            array = self._open()["sequence"]
            self._local = (os.getpid(), array)
        return array

    def _check_tables(self, tables: dict[str, np.ndarray]) -> None:
        for name, values in tables.items():
            if array_sha256(values) != self.attributes["table_sha256"][name]:
                raise IntegrityError(f"{self.path}: the table {name} is damaged; build the store again.")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_local": (-1, None)}

    def __repr__(self) -> str:
        return f"ZarrCorpus({str(self.path)!r}, {counted(len(self.contigs.names), 'contig')})"


def array_sha256(values: np.ndarray) -> str:
    """SHA-256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()


def check_sources(path: Path, attributes: dict[str, Any], on_change: OnChange) -> None:
    """Compare the source files that still exist with what was built from.

    Size and modification time are looked at first; the content is hashed only where they differ.
    """
    if on_change == "ignore":
        return
    for source in attributes["sources"]:
        for file in source["files"]:
            place = Path(file["path"])
            if not place.is_file():
                continue
            info = place.stat()
            if info.st_size == file["size"] and info.st_mtime_ns == file["mtime_ns"]:
                continue
            if info.st_size == file["size"] and file_sha256(place) == file["sha256"]:
                continue
            message = (
                f"{place} changed since {path} was built from it; build the store again, or open it with "
                "on_changed_source='ignore' to use the old content."
            )
            if on_change == "error":
                raise IntegrityError(message)
            warnings.warn(message, stacklevel=3)
