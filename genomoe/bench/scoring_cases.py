"""What `genomoe bench scoring` scores: single-base changes of random sequence, scattered or neighbouring."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.variants import Strand
from genomoe.inference.engine import Pair
from genomoe.inference.scoring import ScoringOptions, VariantScorer
from genomoe.model.config import ModelConfig
from genomoe.model.transformer import GenoMoEModel

__all__ = ["ScoringCase", "case_pairs", "scoring_cases"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringCase:
    """What is scored with what."""

    name: str
    model: ModelConfig
    window: int
    window_mode: str
    scattered: int | None = None
    """So many SNVs at random places; None: every SNV of `saturated` neighbouring bases."""
    saturated: int = 0
    strands: str = "fwd"
    batch_tokens: int = 16384

    def variants(self, sequence: str) -> list[Variant]:
        random = np.random.default_rng(1)
        if self.scattered is not None:
            places = np.sort(random.integers(self.window, len(sequence) - self.window, self.scattered))
            return [Variant("bench", int(at), sequence[at], _other(sequence[at])) for at in places]
        block = self.window // 4  # the middle of a block, whose suffixes are as long as those of the whole on average
        start = len(sequence) // 2 // block * block + (block - self.saturated) // 2
        return [
            Variant("bench", at, sequence[at], alt)
            for at in range(start, start + self.saturated)
            for alt in "ACGT"
            if alt != sequence[at]
        ]


def scoring_cases(device: str) -> list[ScoringCase]:
    """Scattered and saturated SNVs at a size fit for the device."""
    if device == "cpu":
        model = ModelConfig(
            hidden_size=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            head_size=32,
            expert_size=256,
            num_experts=8,
            top_k=2,
            max_context=1024,
        )
        common: dict[str, Any] = {"model": model, "window": 512}
        return [
            ScoringCase(name="scattered-centred", window_mode="centred", scattered=24, **common),
            ScoringCase(
                name="scattered-centred-both-strands",
                window_mode="centred",
                scattered=8,
                strands="both",
                **common,
            ),
            ScoringCase(name="saturation-block", window_mode="block", saturated=20, **common),
        ]
    model = ModelConfig.preset("genos-1.2b")
    common = {"model": dataclasses.replace(model, vocab_size=16), "window": 8192, "batch_tokens": 262144}
    return [
        ScoringCase(name="scattered-centred", window_mode="centred", scattered=64, **common),
        ScoringCase(name="saturation-block", window_mode="block", saturated=24, **common),
    ]


def case_pairs(case: ScoringCase, model: GenoMoEModel) -> list[Pair]:
    """What both sides score, tokenised."""
    reference = _Random(max(64 * case.window, 65536))
    options = ScoringOptions(window=case.window, window_mode=case.window_mode, strands=case.strands)  # type: ignore[arg-type]
    scorer = VariantScorer(model, NucleotideTokenizer(), reference, options)
    variants = case.variants(reference.sequence)
    strands: tuple[Strand, ...] = ("+", "-") if case.strands == "both" else ("+",)
    return [scorer.pair(variant, strand) for strand in strands for variant in variants]


class _Random:
    """A contig of random bases."""

    def __init__(self, length: int):
        self.sequence = "".join(np.random.default_rng(0).choice(list("ACGT"), length))
        self.contigs = {"bench": length}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        return self.sequence[interval.start : interval.end].encode()


def _other(base: str) -> str:
    return "ACGT"["ACGT".index(base) - 1]
