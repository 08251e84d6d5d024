"""A journal of finished chunks beside the output: what makes a killed run go on, and several processes share
one.

Each process appends to a file of its own: a record holds a chunk's number, its scores and statuses, and a
checksum. A record cut off by a kill fails its checksum and is run again; finished ones are never. The folder
also holds what the job was, and a run with another input, model or options refuses to go on with it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from genomoe.files import write_text
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variants import Status

__all__ = ["Journal", "JournalError"]

HEADER = struct.Struct("<4sQQI")
MAGIC = b"GMJ1"
STATUSES = tuple(Status)
Chunk = list[tuple[float, Status]]


class JournalError(GenoMoEError):
    """The unfinished run beside an output is not this one."""


class Journal:
    """Chunks of results by number, on disk; flat in memory but for one place (32 bytes) a chunk."""

    def __init__(self, output: Path, job: dict[str, Any], *, restart: bool = False, process: int = 0):
        self.folder, self._process = output.with_name(f".{output.name}.scoring"), process
        if restart:
            self._remove()
        self.folder.mkdir(exist_ok=True)
        self._places: dict[int, tuple[Path, int, int, int]] = {}
        self._read_to: dict[Path, int] = {}
        self.refresh()
        self._check(job)
        name = f"{process}-{uuid.uuid4().hex}.part"  # never that of an earlier run, whose records it would lose
        self._file = open(self.folder / name, "xb")  # noqa: SIM115 - closed in close

    def _check(self, job: dict[str, Any]) -> None:
        path, text = self.folder / "job.json", json.dumps(job, indent=1, sort_keys=True)
        if not self._places or not path.exists():
            write_text(path, text)
            return
        before = json.loads(path.read_text())
        # what stopped the run may be skipped now: it is in no finished chunk
        changed = sorted(
            key for key in job.keys() | before.keys() if job.get(key) != before.get(key) and before.get(key) != "error"
        )
        if changed:
            raise JournalError(
                f"An unfinished run in {self.folder} had another {', '.join(changed)}: "
                "finish it with the same settings, or start anew with --restart."
            )

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def append(self, number: int, results: Chunk) -> None:
        """Adds a finished chunk and brings it to the disk."""
        scores = np.array([score for score, _ in results], dtype="<f8")
        codes = np.array([STATUSES.index(status) for _, status in results], dtype="u1")
        body = scores.tobytes() + codes.tobytes()
        self._file.write(HEADER.pack(MAGIC, number, len(results), zlib.crc32(body)) + body)
        self._file.flush()
        os.fsync(self._file.fileno())

    def refresh(self) -> None:
        """Finds the chunks that any process has finished since."""
        for path in sorted(self.folder.glob("*.part")):
            with open(path, "rb") as file:
                for number, offset, size, checksum, end in _records(file, self._read_to.get(path, 0)):
                    self._places[number] = (path, offset, size, checksum)
                    self._read_to[path] = end

    def read(self, number: int) -> Chunk:
        path, offset, size, checksum = self._places[number]
        with open(path, "rb") as file:
            file.seek(offset)
            body = file.read(9 * size)
        if zlib.crc32(body) != checksum:
            raise JournalError(f"{path} is damaged at byte {offset}: start anew with --restart.")
        scores, codes = np.frombuffer(body[: 8 * size], "<f8"), np.frombuffer(body[8 * size :], "u1")
        return [(score, STATUSES[code]) for score, code in zip(scores.tolist(), codes.tolist(), strict=True)]

    def close(self, *, remove: bool) -> None:
        """Ends this process's file.

        The first process also removes the folder if the job is done, or if there is nothing in it to go on from; the
        others leave it alone, since they do not know who still needs it.
        """
        self._file.close()
        if self._process == 0:
            self.refresh()
            if remove or not self._places:
                self._remove()

    def _remove(self) -> None:
        """Under another name first: a kill in the middle must not leave chunks without the job they belong to."""
        old = self.folder.with_name(f"{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
            shutil.rmtree(old, ignore_errors=True)


def _records(file: Any, start: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Number, offset, size, checksum and end of every whole record from `start` on."""
    file.seek(start)
    while True:
        head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            return
        magic, number, size, checksum = HEADER.unpack(head)
        offset = file.tell()
        body = file.read(9 * size) if magic == MAGIC and size < 1 << 32 else b""
        if len(body) != 9 * size or zlib.crc32(body) != checksum:
            return
        yield number, offset, size, checksum, file.tell()
