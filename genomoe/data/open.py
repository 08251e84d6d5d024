"""Open whatever a user names as a corpus: a store, a YAML description, or sequence files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from genomoe.data.corpus import Corpus
from genomoe.data.description import CorpusDescription, describe_paths, read_description
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.store import ZarrCorpus
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.sequence_files import resolve_path

Spec = str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any]


def open_corpus(spec: Spec, weights: Mapping[str, float] | None = None) -> Corpus:
    """A ZarrCorpus for a store, otherwise a FastaCorpus.

    Args:
        spec: the folder of a store (``*.zarr``), a YAML description (``*.yaml``), or what describe_paths takes:
            files, folders, globs, or a mapping of source name to such.
        weights: source name to sampling weight; overrides what a store or description says.
    """
    single = _single(spec)
    if single is not None and is_store(single):
        store = ZarrCorpus(resolve_path(single))
        store.sources = _reweighted(store.sources, weights)
        return store
    corpus = FastaCorpus(as_description(spec))
    corpus.sources = _reweighted(corpus.sources, weights)
    return corpus


def as_description(spec: Spec) -> CorpusDescription:
    """The description a YAML file holds, or one made of paths."""
    single = _single(spec)
    if single is not None and str(single).endswith((".yaml", ".yml")):
        return read_description(single)
    return describe_paths(spec)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether the folder is, or says it is, a corpus store."""
    place = resolve_path(path)
    return str(path).rstrip("/").endswith(".zarr") or (place / "zarr.json").is_file()


def _single(spec: Spec) -> str | os.PathLike[str] | None:
    if isinstance(spec, str | os.PathLike):
        return spec
    if isinstance(spec, Sequence) and len(spec) == 1 and isinstance(spec[0], str | os.PathLike):
        return spec[0]
    return None


def _reweighted(sources: tuple[Any, ...], weights: Mapping[str, float] | None) -> tuple[Any, ...]:
    names = [source.name for source in sources]
    for name, weight in (weights or {}).items():
        if name not in names:
            raise GenoMoEError(f"weights names the source {name!r}; the sources are {', '.join(names)}.")
        if not float(weight) >= 0:
            raise GenoMoEError(f"The weight of source {name!r} must be zero or more, got {weight}.")
    return tuple(source._replace(weight=float((weights or {}).get(source.name, source.weight))) for source in sources)
