"""Variant rows to scores: every rule for input, windows on one or both strands, and the pairs a model
compares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from genomoe.genome.alphabet import Tokenizer
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variant_files import InputRow
from genomoe.genome.variants import (
    ContigNames,
    Haplotypes,
    RightEndWindow,
    SequenceSource,
    Status,
    Strand,
    WindowRule,
    check_alleles,
    haplotypes,
    make_window,
    normalise,
)
from genomoe.inference.engine import SCORES, Pair, PairScorer
from genomoe.model.transformer import GenoMoEModel

__all__ = ["RefMismatchError", "ScoringOptions", "VariantScorer"]


class RefMismatchError(GenoMoEError):
    """A variant's REF is not what the reference has, and `ref_mismatch` is "error"."""


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """What a score is. Every field but the last three changes its value; docs/variants.md says how."""

    score: str = "llr"
    """A key of `genomoe.inference.engine.SCORES`."""
    window: int = 512
    """Bases a model reads around a variant."""
    window_mode: Literal["centred", "block"] = "centred"
    """centred: a window for each variant; block: neighbours share one, which is faster."""
    strands: Literal["fwd", "both"] = "both"
    """both: the mean of the score on each strand."""
    downstream: int | None = None
    """Only so many bases from the first difference on count; None: to the window's end."""
    ref_mismatch: Literal["error", "skip", "substitute"] = "error"
    """substitute: the window takes the file's REF in place of the reference's bases."""
    unknown_contig: Literal["error", "skip"] = "error"
    contig_alias: Mapping[str, str] = field(default_factory=dict)
    """The file's contig names to the reference's, beyond chr1 = 1 and MT = chrM."""
    batch_tokens: int | None = None
    """Tokens of a batch; None: by the device. No score depends on it beyond rounding."""
    batch_variants: int | None = None
    """Variants of a batch; 1 makes each score bitwise independent of the others."""

    def __post_init__(self) -> None:
        choices = {
            "score": tuple(SCORES),
            "window_mode": ("centred", "block"),
            "strands": ("fwd", "both"),
            "ref_mismatch": ("error", "skip", "substitute"),
            "unknown_contig": ("error", "skip"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                value = getattr(self, name)
                raise GenoMoEError(f"{name} is {value!r}; it is one of {', '.join(allowed)}.")
        for name in ("downstream", "batch_tokens", "batch_variants"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise GenoMoEError(f"{name} is {value}; it must be at least 1.")
        if self.score == "marginal" and self.window_mode == "block":
            raise GenoMoEError("The marginal score has a window of its own, so window_mode must be centred.")
        make_window(self.window_mode, self.window)

    @property
    def description(self) -> str:
        """One line for a header: the formula, its sign and the settings that change it."""
        reach = "to the window's end" if self.downstream is None else f"over {self.downstream} bases"
        return (
            f"GenoMoE {self.score}: {SCORES[self.score]}; window {self.window} {self.window_mode}, "
            f"strands {self.strands}, {reach}, ref-mismatch {self.ref_mismatch}"
        )


class VariantScorer:
    """Scores rows of a variant file against a reference with a model.

    Args:
        model: a causal model; run in float32 for scores that agree to 1e-5.
        tokenizer: the model's own.
        reference: contigs and bases; see `genomoe.genome.fasta.Reference`.
        options: what a score is.

    Raises GenoMoEError if the window is longer than the model's context.
    """

    def __init__(
        self,
        model: GenoMoEModel,
        tokenizer: Tokenizer,
        reference: SequenceSource,
        options: ScoringOptions | None = None,
    ):
        self.options = options or ScoringOptions()
        self.tokenizer, self.reference = tokenizer, reference
        self.names = ContigNames(reference.contigs, self.options.contig_alias)
        limit = model.config.max_context * tokenizer.bases_per_token
        if self.options.window > limit:
            raise GenoMoEError(
                f"A window of {self.options.window} bases is longer than the model's context of {limit}: "
                "give a shorter --window."
            )
        self.rule: WindowRule = (
            RightEndWindow(length=self.options.window)
            if self.options.score == "marginal"
            else make_window(self.options.window_mode, self.options.window)
        )
        self._score_pairs = PairScorer(
            model,
            self.options.score,
            unk_id=tokenizer.unk_id,
            batch_tokens=self.options.batch_tokens,
            batch_pairs=self.options.batch_variants,
        )

    @property
    def numerics(self) -> dict[str, str]:
        """What the scores' rounding comes from: dtype of the weights, precision of the experts' products."""
        model = self._score_pairs.model
        dtype = str(model.embed.weight.dtype).removeprefix("torch.")
        return {"dtype": dtype, "precision": model.kernels.precision}

    def score_rows(self, rows: Sequence[InputRow], where: str = "input") -> list[list[tuple[float, Status]]]:
        """Score (NaN if none) and status of every ALT of every row, in order.

        Raises RefMismatchError or UnknownContigError, with the line, where the options say so.
        """
        checked = [[self.check(row, alt, where) for alt in row.alts] for row in rows]
        scores = self.score_variants(
            [variant for found in checked for variant, status in found if variant is not None and status.has_score]
        )
        remaining = iter(scores.tolist())
        return [
            [(next(remaining) if status.has_score else math.nan, status) for _, status in found] for found in checked
        ]

    def score_variants(self, variants: Sequence[Variant]) -> np.ndarray:
        """Scores of variants that `check` let through, one float64 each; equal variants are scored once."""
        place: dict[Variant, int] = {}
        for variant in variants:
            place.setdefault(variant, len(place))
        strands: tuple[Strand, ...] = ("+",) if self.options.strands == "fwd" else ("+", "-")
        pairs = [self.pair(variant, strand) for strand in strands for variant in place]
        scores = self._score_pairs(pairs).reshape(len(strands), -1).mean(axis=0)
        return scores[[place[variant] for variant in variants]] if variants else np.zeros(0)

    def check(self, row: InputRow, alt: str, where: str) -> tuple[Variant | None, Status]:
        """The variant in its one normal form, and what is to become of it."""
        contig = self.names.find(row.contig)
        if contig is None:
            if self.options.unknown_contig == "skip":
                return None, Status.UNKNOWN_CONTIG
            try:
                self.names.resolve(row.contig)
            except GenoMoEError as error:
                hint = f"Give --contig-alias {row.contig}=NAME, or --unknown-contig skip."
                raise type(error)(f"{where}, line {row.number}: {error} {hint}") from None
        assert contig is not None
        status = check_alleles(row.ref, alt)
        if not 0 <= row.position <= self.reference.contigs[contig] - max(1, len(row.ref)):
            return None, Status.POSITION_OUT_OF_RANGE
        if status is not Status.OK:
            return None, status
        variant = Variant(contig, row.position, row.ref.upper(), alt.upper())
        end = variant.position + len(variant.ref)
        found = self.reference.fetch(Interval(contig, variant.position, end)).decode("ascii").upper()
        if found != variant.ref:
            if self.options.ref_mismatch == "error":
                place = f"{row.contig}:{row.position + 1}"
                raise RefMismatchError(
                    f"{where}, line {row.number}: REF of {place} is {row.ref}, the reference has {found}; "
                    "is it another assembly? --ref-mismatch skip or substitute goes on."
                )
            if self.options.ref_mismatch == "skip":
                return None, Status.REF_MISMATCH
            status = Status.REF_SUBSTITUTED
        else:
            variant = normalise(variant, self.reference)
        if max(len(variant.ref), len(variant.alt)) > self.rule.longest_allele:
            return None, Status.ALLELE_TOO_LONG
        return variant, status

    def pair(self, variant: Variant, strand: Strand) -> Pair:
        """The windows of a variant on a strand as tokens, and which of them count."""
        window = self.rule.interval(variant, self.reference.contigs[variant.contig], strand)
        return self._tokens(haplotypes(variant, window, self.reference, strand=strand))

    def _tokens(self, found: Haplotypes) -> Pair:
        per = self.tokenizer.bases_per_token
        ref, alt = self.tokenizer.encode(found.ref), self.tokenizer.encode(found.alt)
        end = len(ref)
        differs = np.flatnonzero(ref != alt)
        first = int(differs[0]) if len(differs) else end
        ref_after, alt_after = first + 1, first + 1
        if per == 1:
            ref_after, alt_after = found.first + found.ref_allele, found.first + found.alt_allele
        if self.options.score == "marginal":
            end = min(end, -(-(found.first + max(found.ref_allele, found.alt_allele)) // per))
        if self.options.downstream is not None:
            end = min(end, first + math.ceil(self.options.downstream / per))
        return Pair(ref=ref, alt=alt, first=min(first, end), end=end, ref_after=ref_after, alt_after=alt_after)
