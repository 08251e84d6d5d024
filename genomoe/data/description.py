"""What a corpus is made of: sources, filters, regions, weights and tags, as read from a YAML file.

```yaml
format: 1
sources:
  - name: ecoli                  # required, unique
    path: refs/ecoli/*.fasta.gz  # a file, folder or glob, or a list of them; relative to this file
    weight: 1.0                  # 2 means: windows come twice as often as the source's size would give
    include: ["NC_*"]            # contig name patterns; default all
    exclude: ["*_random"]
    keep: regions.bed            # windows are cut from these regions only
    mask: repeats.bed            # these regions count as soft-masked
    min_length: 1000             # shorter contigs are left out
    max_n_fraction: 0.5          # contigs with more N than this are left out
    soft_mask: auto              # auto | true | false: does lower case mean masking?
    tags: {species: Escherichia coli}
    split: train                 # optional; train, valid or test (see genomoe.data.splits)
```
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from genomoe.genome.compression import open_stream, require_file
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.sequence_files import expand_paths, resolve_path

FORMAT = 1
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, kw_only=True)
class SourceDescription:
    """One named set of sequence files and what of it is used."""

    name: str
    """Unique name."""
    files: tuple[Path, ...]
    """The sequence files, patterns already expanded."""
    weight: float = 1.0
    """How often windows come, relative to the source's size."""
    include: tuple[str, ...] = ("*",)
    """Contig name patterns that are used..."""
    exclude: tuple[str, ...] = ()
    """...except these."""
    keep: Path | None = None
    """BED file: windows are cut from these regions only."""
    mask: Path | None = None
    """BED file: these regions count as soft-masked."""
    min_length: int = 1
    """Contigs shorter than this are left out."""
    max_n_fraction: float = 1.0
    """Contigs with a larger part of N are left out."""
    soft_mask: bool | None = None
    """Whether lower case is masking; None decides by how much of the source is lower-case."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Free labels."""
    split: str | None = None
    """train, valid or test."""

    def __post_init__(self) -> None:
        where = f"Source {self.name!r}"
        if not self.weight >= 0:
            raise GenoMoEError(f"{where}: weight must be zero or more, got {self.weight}.")
        if not 0 <= self.max_n_fraction <= 1:
            raise GenoMoEError(f"{where}: max_n_fraction must lie in [0, 1], got {self.max_n_fraction}.")
        if self.min_length < 1:
            raise GenoMoEError(f"{where}: min_length must be at least 1, got {self.min_length}.")
        if self.split is not None and self.split not in SPLITS:
            raise GenoMoEError(f"{where}: split must be one of {', '.join(SPLITS)}, got {self.split!r}.")

    def takes(self, contig: str) -> bool:
        """Whether include and exclude let this contig in."""
        return any(fnmatch.fnmatchcase(contig, pattern) for pattern in self.include) and not any(
            fnmatch.fnmatchcase(contig, pattern) for pattern in self.exclude
        )


@dataclass(frozen=True, kw_only=True)
class CorpusDescription:
    """All sources of a corpus, in order."""

    sources: tuple[SourceDescription, ...]

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        if not names:
            raise GenoMoEError("The corpus has no source; name at least one sequence file.")
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise GenoMoEError(f"Two sources are called {repeated[0]!r}; names must be unique.")


def read_description(path: str | os.PathLike[str]) -> CorpusDescription:
    """Parse a YAML corpus description; a misspelt key is an error that names the nearest one."""
    checked = require_file(resolve_path(path))
    try:
        content = yaml.safe_load(checked.read_text())
    except yaml.YAMLError as error:
        raise InputError(f"{checked} is not valid YAML ({error}).") from None
    if not isinstance(content, dict) or not isinstance(content.get("sources"), list):
        raise InputError(f"{checked} must hold a list called 'sources' (and 'format: {FORMAT}').")
    _require_keys(content, {"format", "sources"}, str(checked))
    if content.get("format", FORMAT) != FORMAT:
        raise InputError(f"{checked} has format {content['format']!r}; this GenoMoE reads format {FORMAT}.")
    return CorpusDescription(
        sources=tuple(_source(row, number, checked) for number, row in enumerate(content["sources"], 1))
    )


def describe_paths(
    paths: str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any],
    weights: Mapping[str, float] | None = None,
) -> CorpusDescription:
    """A description with default filters: each listed file a source of its own, or a mapping of name to file(s)."""
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    named: dict[str, list[Path]] = {}
    if isinstance(paths, Mapping):
        for name, value in paths.items():
            items = [value] if isinstance(value, str | os.PathLike) else value
            named[str(name)] = [file for item in items for file in expand_paths(item)]
    else:
        for item in paths:
            for file in expand_paths(item):
                key = file.name if file.name not in named else str(file)
                if key in named:
                    raise GenoMoEError(f"{file} is listed twice.")
                named[key] = [file]
    unknown = sorted(set(weights or {}) - set(named))
    if unknown:
        raise GenoMoEError(f"weights names the source {unknown[0]!r}; the sources are {', '.join(named)}.")
    return CorpusDescription(
        sources=tuple(
            SourceDescription(name=name, files=tuple(files), weight=float((weights or {}).get(name, 1.0)))
            for name, files in named.items()
        )
    )


_KEYS = {f.name for f in dataclasses.fields(SourceDescription)} - {"files"} | {"path"}


def _source(row: Any, number: int, origin: Path) -> SourceDescription:
    where = f"{origin}: source {number}"
    if not isinstance(row, dict):
        raise InputError(f"{where} must be a mapping with 'name' and 'path', got {row!r}.")
    _require_keys(row, _KEYS, where)
    missing = [key for key in ("name", "path") if not row.get(key)]
    if missing:
        raise InputError(f"{where} lacks {' and '.join(missing)}.")
    patterns = row["path"] if isinstance(row["path"], list) else [row["path"]]
    options: dict[str, Any] = {}
    for key, kind in (("weight", float), ("max_n_fraction", float), ("min_length", int)):
        if key in row:
            try:
                options[key] = kind(row[key])
            except (TypeError, ValueError):
                raise InputError(f"{where}: {key} must be a number, got {row[key]!r}.") from None
    for key in ("include", "exclude"):
        if key in row:
            value = [row[key]] if isinstance(row[key], str) else row[key]
            options[key] = tuple(str(item) for item in value)
    for key in ("keep", "mask"):
        if row.get(key):
            options[key] = require_file(_beside(origin, row[key]))
    if row.get("soft_mask", "auto") not in ("auto", True, False):
        raise InputError(f"{where}: soft_mask must be auto, true or false, got {row['soft_mask']!r}.")
    if isinstance(row.get("soft_mask"), bool):
        options["soft_mask"] = row["soft_mask"]
    if row.get("split") is not None:
        options["split"] = row["split"]
    options["tags"] = {str(key): str(value) for key, value in (row.get("tags") or {}).items()}
    files = [file for pattern in patterns for file in expand_paths(_beside(origin, pattern))]
    if len(set(files)) != len(files):
        twice = next(file for file in files if files.count(file) > 1)
        raise InputError(f"{where}: {twice} matches two of the paths.")
    return SourceDescription(name=str(row["name"]), files=tuple(files), **options)


def _beside(origin: Path, path: str) -> Path:
    resolved = resolve_path(path)
    return resolved if resolved.is_absolute() else origin.parent / resolved


def _require_keys(row: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in row:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}."
            raise InputError(f"{where}: no setting is called {key!r}; {hint}")


class Regions(NamedTuple):
    """Regions of a BED file, by contig, sorted and merged."""

    starts: dict[str, np.ndarray]
    ends: dict[str, np.ndarray]


def read_regions(path: Path, lengths: Mapping[str, int]) -> Regions:
    """The regions of a BED file (0-based, half-open), merged where they touch.

    Raises InputError, with the line, for a contig that isn't in `lengths` or a region beyond its end.
    """
    rows: dict[str, list[tuple[int, int]]] = {}
    with open_stream(require_file(path)) as stream:
        data = stream.read()
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip() or line.startswith(("#", "track", "browser")):
            continue
        fields = line.split("\t") if "\t" in line else line.split()
        try:
            contig, start, end = fields[0], int(fields[1]), int(fields[2])
        except (IndexError, ValueError):
            raise InputError(f"{path}:{number}: a BED line holds contig, start and end, found {line[:60]!r}.") from None
        if contig not in lengths:
            close = difflib.get_close_matches(contig, lengths, n=3)
            raise InputError(
                f"{path}:{number}: no contig is called {contig!r}"
                + (f"; the nearest are {', '.join(close)}." if close else ".")
            )
        if not 0 <= start < end <= lengths[contig]:
            raise InputError(
                f"{path}:{number}: [{start}, {end}) is no region of {contig!r}, which has {lengths[contig]} bases "
                "(BED is 0-based and half-open)."
            )
        rows.setdefault(contig, []).append((start, end))
    merged = {contig: _merge(np.array(sorted(spans), dtype=np.int64)) for contig, spans in rows.items()}
    return Regions({c: m[:, 0] for c, m in merged.items()}, {c: m[:, 1] for c, m in merged.items()})


def _merge(spans: np.ndarray) -> np.ndarray:
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([spans[first, 0], reach[last]], axis=1)
