"""`genomoe.from_pretrained`: a model folder and what one does with it, in one object."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from genomoe.genome.alphabet import Tokenizer, make_tokenizer
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.genome.foreign_tokenizer import tokenizer_from_folder
from genomoe.genome.variant_files import COLUMN_NAMES, InputRow, open_variants
from genomoe.genome.variants import SequenceSource
from genomoe.inference import embedding, generation, mutagenesis, routing
from genomoe.inference.scoring import ScoringOptions, VariantScorer
from genomoe.model.kernels import KernelOptions
from genomoe.model.pretrained import from_pretrained as load_model
from genomoe.model.transformer import GenoMoEModel

__all__ = ["Predictor", "from_pretrained"]

CHUNK = 4096


def from_pretrained(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    kernels: KernelOptions | None = None,
    tokenizer: str | dict[str, Any] | Tokenizer | None = None,
) -> Predictor:
    """Opens a model folder (a run's `model/`, the run itself, or a Hugging Face Mixtral folder) for
    inference.

    Args:
        device: "auto" takes CUDA where there is one.
        dtype: "float32" or "bfloat16"; None: float32 on a CPU, the saved dtype elsewhere.
        kernels: backends; None: the fastest that runs here.
        tokenizer: needed only for a foreign folder that does not say which id each base has.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(dtype, str):
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(dtype)
        if dtype is None:
            raise GenoMoEError("dtype is float32 or bfloat16.")
    if dtype is None and torch.device(device).type == "cpu":
        dtype = torch.float32
    model, saved = load_model(folder, device, dtype, kernels=kernels)
    spec = tokenizer if tokenizer is not None else saved
    chosen = make_tokenizer(spec) if spec is not None else tokenizer_from_folder(folder)
    return Predictor(model, chosen, name=str(folder))


class Predictor:
    """A model with its tokenizer. Coordinates in tables are 1-based as in files, in objects 0-based."""

    def __init__(self, model: GenoMoEModel, tokenizer: Tokenizer, *, name: str = "model"):
        self.model, self.tokenizer, self.name = model.eval(), tokenizer, name

    def __repr__(self) -> str:
        weight = self.model.embed.weight
        return f"Predictor({self.name}, {self.model.config.num_parameters():,} parameters, {weight.device})"

    def scorer(self, reference: str | os.PathLike[str] | SequenceSource, **options: Any) -> VariantScorer:
        """What scores variants against a reference; `options` are fields of ScoringOptions.

        The window is at most the model's context unless given.
        """
        source = Reference(reference) if isinstance(reference, (str, os.PathLike)) else reference
        context = self.model.config.max_context * self.tokenizer.bases_per_token
        options.setdefault("window", min(ScoringOptions().window, context))
        return VariantScorer(self.model, self.tokenizer, source, ScoringOptions(**options))

    def score_variants(
        self,
        variants: str | os.PathLike[str] | pd.DataFrame | Sequence[Variant | str],
        reference: str | os.PathLike[str] | SequenceSource,
        **options: Any,
    ) -> pd.DataFrame:
        """One row for each input ALT, in order: the keys, `score` (NaN if none) and `status`.

        Args:
            variants: a VCF, BCF, TSV, CSV or Parquet file, a table with the columns contig, position
            (1-based), ref
                and alt (or their usual other names), or Variants or texts such as "chrI:1000:A>G".
            reference: FASTA or anything with `contigs` and `fetch`.
            options: see `genomoe.inference.scoring.ScoringOptions`; `score < 0` means ALT is less likely
            than REF.

        A table keeps its columns and index. For large files use `genomoe score`, which streams.
        """
        scorer = self.scorer(reference, **options)
        if isinstance(variants, pd.DataFrame):
            return self._score_table(scorer, variants)
        if isinstance(variants, (str, os.PathLike)):
            rows = list(open_variants(variants).rows())
            where = str(variants)
        else:
            rows = [_as_row(number, variant) for number, variant in enumerate(variants, start=1)]
            where = "variants"
        records = []
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            for row, results in zip(part, scorer.score_rows(part, where), strict=True):
                for alt, (score, status) in zip(row.alts, results, strict=True):
                    records.append((row.contig, row.position + 1, row.id, row.ref, alt, score, status.value))
        names = ["contig", "position", "id", "ref", "alt", "score", "status"]
        return pd.DataFrame.from_records(records, columns=names)

    @staticmethod
    def _score_table(scorer: VariantScorer, table: pd.DataFrame) -> pd.DataFrame:
        lower = {str(name).lower(): name for name in table.columns}
        columns = {}
        for role in ("contig", "position", "ref", "alt"):
            found = next((lower[name] for name in COLUMN_NAMES[role] if name in lower), None)
            if found is None:
                raise GenoMoEError(f"The table has no column for {role}; it has {', '.join(map(str, table.columns))}.")
            columns[role] = table[found].tolist()
        rows = [
            InputRow(
                number=number,
                contig=str(c),
                position=int(p) - 1,
                id=".",
                ref=str(r),
                alts=(str(a),),
                fields=(),
            )
            for number, (c, p, r, a) in enumerate(zip(*columns.values(), strict=True), start=1)
        ]
        results = [
            result
            for start in range(0, len(rows), CHUNK)
            for (result,) in scorer.score_rows(rows[start : start + CHUNK], "table")
        ]
        return table.assign(score=[score for score, _ in results], status=[status.value for _, status in results])

    def embed(self, sequences: str | Sequence[str | bytes], **options: Any) -> np.ndarray | list[np.ndarray]:
        """[N, D] float32, one vector for each sequence; see `genomoe.inference.embedding.embed`."""
        return embedding.embed(self.model, self.tokenizer, _several(sequences), **options)

    def mutagenesis(
        self,
        interval: Interval | str,
        reference: str | os.PathLike[str] | SequenceSource,
        *,
        window_mode: str = "block",
        **options: Any,
    ) -> pd.DataFrame:
        """Every single-base change of an interval; see `genomoe.inference.mutagenesis.mutate_interval`."""
        scorer = self.scorer(reference, window_mode=window_mode, **options)
        return mutagenesis.mutate_interval(scorer, Interval.parse(interval) if isinstance(interval, str) else interval)

    def generate(self, prompt: str, n: int, **options: Any) -> list[str]:
        """Continuations of a prompt; see `genomoe.inference.generation.generate`."""
        return generation.generate(self.model, self.tokenizer, prompt, n=n, **options)

    def routing(self, sequences: str | Sequence[str | bytes], **options: Any) -> pd.DataFrame:
        """Which experts each base went to; see `genomoe.inference.routing.route_sequences`."""
        return routing.route_sequences(self.model, self.tokenizer, _several(sequences), **options)


def _several(sequences: str | bytes | Sequence[str | bytes]) -> Sequence[str | bytes]:
    return [sequences] if isinstance(sequences, (str, bytes)) else sequences


def _as_row(number: int, variant: Variant | str) -> InputRow:
    found = Variant.parse(variant) if isinstance(variant, str) else variant
    return InputRow(
        number=number,
        contig=found.contig,
        position=found.position,
        id=".",
        ref=found.ref,
        alts=(found.alt,),
        fields=(),
    )
