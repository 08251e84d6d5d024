"""In-silico saturation mutagenesis: the score of every single-base change of an interval."""

from __future__ import annotations

import numpy as np
import pandas as pd

from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.inference.scoring import VariantScorer

__all__ = ["as_matrix", "mutate_interval"]

BASES = "ACGT"


def mutate_interval(scorer: VariantScorer, interval: Interval) -> pd.DataFrame:
    """Columns contig, position (1-based), ref, alt, score: three rows for each base, in genome order.

    Positions whose reference base is not A, C, G or T have no rows. On the minus strand the same changes are
    listed, as a score with both strands does not depend on it; alleles are always those of the plus strand.

    Raises GenoMoEError for a contig or an interval that the reference does not have.
    """
    contig = scorer.names.resolve(interval.contig)
    length = scorer.reference.contigs[contig]
    if not 0 <= interval.start < interval.end <= length:
        raise GenoMoEError(f"{interval} does not lie within {contig}, which has {length} bases.")
    letters = scorer.reference.fetch(Interval(contig, interval.start, interval.end)).decode("ascii").upper()
    variants = [
        Variant(contig, interval.start + offset, ref, alt)
        for offset, ref in enumerate(letters)
        if ref in BASES
        for alt in BASES
        if alt != ref
    ]
    return pd.DataFrame(
        {
            "contig": interval.contig,
            "position": [variant.position + 1 for variant in variants],
            "ref": [variant.ref for variant in variants],
            "alt": [variant.alt for variant in variants],
            "score": scorer.score_variants(variants),
        }
    )


def as_matrix(table: pd.DataFrame) -> pd.DataFrame:
    """The table of `mutate_interval` as bases (rows A, C, G, T) by positions; 0 at the reference base."""
    matrix = table.pivot(index="alt", columns="position", values="score").reindex(list(BASES))
    reference = table.drop_duplicates("position").set_index("position")["ref"]
    for position, base in reference.items():
        matrix.loc[base, position] = 0.0
    return matrix.astype(np.float64)
