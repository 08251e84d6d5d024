"""`genomoe embed`: FASTA records to vectors."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console

from genomoe.commands.device import resolve_device
from genomoe.commands.outputs import check_ending, write_table
from genomoe.files import replacing
from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.inference.predictor import Predictor, from_pretrained
from genomoe.wording import counted


def run(
    sequences: Path,
    *,
    model: Path,
    out: Path,
    layer: int,
    pool: str,
    strands: str,
    device: str,
    dtype: str | None,
) -> None:
    """Write `out`: .npz holds names and vectors (or, unpooled, an array for each record); a table a row
    each.
    """
    check_ending(out, ".npz", ".parquet", ".tsv")
    if pool == "none" and not out.name.endswith(".npz"):
        raise GenoMoEError("Vectors of single tokens (--pool none) go to a .npz file.")
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    names, records = read_records(sequences, predictor)
    with Console(stderr=True).status(f"embedding {counted(len(records), 'sequence')}"):
        vectors = predictor.embed(records, layer=layer, pool=pool, strands=strands)
    if out.name.endswith(".npz"):
        arrays = dict(zip(names, vectors, strict=True)) if pool == "none" else {"names": names, "vectors": vectors}
        with replacing(out) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    else:
        table = pd.DataFrame(np.asarray(vectors), columns=[f"e{i}" for i in range(np.shape(vectors)[1])])
        write_table(pd.concat([pd.Series(names, name="name"), table], axis=1), out)
    print(f"{counted(len(records), 'vector')} written: {out}", file=sys.stderr)


def read_records(path: Path, predictor: Predictor) -> tuple[list[str], list[bytes]]:
    """Names and letters of all records of a FASTA file; GenoMoEError for one that is empty or does not fit."""
    reference = Reference(path)
    longest = predictor.model.config.max_context * predictor.tokenizer.bases_per_token
    for name, length in reference.contigs.items():
        if not 1 <= length <= longest:
            raise GenoMoEError(
                f"{path}: record {name!r} has {length:,} bases, but the model reads 1 to {longest:,}: "
                f"{'cut it into windows' if length else 'leave it out'}."
            )
    names = list(reference.contigs)
    return names, [reference.fetch(Interval(name, 0, reference.contigs[name])) for name in names]
