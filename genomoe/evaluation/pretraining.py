"""The report of a pretraining run: bits per base on its held-out contigs, beside the baselines."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from genomoe.data.collate import weight_table
from genomoe.data.corpus import Corpus, locate
from genomoe.evaluation.baselines import UNIFORM_BITS, MarkovModel, encode
from genomoe.evaluation.likelihood import base_bits
from genomoe.evaluation.metrics import BitsPerBase, bits_per_base, scored
from genomoe.genome.errors import GenoMoEError
from genomoe.model.pretrained import from_pretrained
from genomoe.training.run import load_data
from genomoe.training.run_directory import RunDirectory, environment

LOW_ORDER = 5
"""Order of the classical Markov model that is reported beside the best one."""
SOFT_MASK_WEIGHT = 0.1
"""Weight of a soft-masked base in the weighted figure, whatever the run was trained with, so that runs compare."""
MOST_BASELINE_BASES = 20_000_000
"""The Markov models count at most so many training bases, spread evenly over the corpus."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was scored and how well; every model on the same bases."""

    contigs: Mapping[str, int]
    """Held-out contigs and their lengths."""
    context: int
    """Tokens of a window."""
    stride: int
    """Tokens between windows: every token but the first few sees at least context - stride before it."""
    scores: Mapping[str, BitsPerBase]
    """Rows of the table: "model", "markov", "markov_low", "composition", "uniform"."""
    per_contig: Mapping[str, float]
    """Bits per base of the model on each contig."""
    markov_order: int
    """k of the best Markov model."""
    markov_selection: tuple[float, ...]
    """Bits per base of orders 0, 1, ... on the held-out part of the training data."""
    markov_bases: int
    """Training bases the Markov models counted (one strand; both are counted)."""
    environment: Mapping[str, Any]
    """Date, command, versions and hardware, taken once, so that every copy of the report says the same."""

    def table(self) -> pd.DataFrame:
        """One row a model, best first; columns `model`, `bits_per_base`, `bits_per_base_weighted`, `bases`."""
        names = {
            "model": "this model",
            "markov": f"Markov, best order ({self.markov_order})",
            "markov_low": f"Markov, order {LOW_ORDER}",
            "composition": "base composition (order 0)",
            "uniform": "uniform",
        }
        rows = [{"model": names[key], **score._asdict()} for key, score in self.scores.items()]
        return pd.DataFrame(rows).sort_values("bits_per_base", ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        scores = {key: score._asdict() for key, score in self.scores.items()}
        return {
            "contigs": dict(self.contigs),
            "context": self.context,
            "stride": self.stride,
            "model": {**scores.pop("model"), "per_contig": dict(self.per_contig)},
            "baselines": {
                "markov": {
                    "order": self.markov_order,
                    **scores.pop("markov"),
                    "training_bases": self.markov_bases,
                    "selection_bits_by_order": list(self.markov_selection),
                },
                "markov_low": {"order": LOW_ORDER, **scores.pop("markov_low")},
                **scores,
            },
            "environment": dict(self.environment),
        }


def evaluate_run(
    path: str | Path,
    *,
    stride: int | None = None,
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Score the held-out contigs of the run at `path` with its model and with Markov baselines.

    The baselines are fitted on the run's training data, their order and smoothing chosen on a part of it.
    Counted are the bases that every model scores: unambiguous ones, except the first of each contig.

    Raises:
        FileNotFoundError: no run directory, or the run has not written its model.
        GenoMoEError: the run holds nothing out, or its data changed.
    """
    run = RunDirectory(Path(path))
    config = run.load_config()
    if not run.finished:
        raise FileNotFoundError(
            f"{run.path} holds no finished model; start the same `genomoe pretrain` command again to finish it."
        )
    data = load_data(config)
    data.setup()
    if data.val_corpus is None:
        raise GenoMoEError(f"the run {run.path} holds no contig out (data.val is empty): nothing to evaluate on.")
    model, _ = from_pretrained(run.model, device=device)
    context = int(config.data.context_length)
    stride = context // 2 if stride is None else stride
    names, letters, weights = _held_out(data)
    report = progress or (lambda part, done: None)

    ambiguous_free = [encode(text.tobytes()) for text in letters]
    training = _training_codes(data.train_corpus)
    report("Markov baselines", 0.0)
    markov = MarkovModel.fit(training)
    low = markov.truncated(min(LOW_ORDER, markov.order))
    predicted: dict[str, list[NDArray[np.float64]]] = {"model": []}
    for number, text in enumerate(letters):
        bits = base_bits(
            model,
            data.tokenizer,
            text,
            context=context,
            stride=stride,
            progress=lambda done, number=number: report("model", (number + done) / len(letters)),
        )
        predicted["model"].append(bits)
    predicted["markov"] = markov.bits(ambiguous_free)
    predicted["markov_low"] = low.bits(ambiguous_free)
    predicted["composition"] = markov.truncated(0).bits(ambiguous_free)
    predicted["uniform"] = [np.where(codes >= 0, UNIFORM_BITS, np.nan) for codes in ambiguous_free]

    masks = scored(predicted["model"], weights)
    return Report(
        contigs={name: len(text) for name, text in zip(names, letters, strict=True)},
        context=context,
        stride=stride,
        scores={key: bits_per_base(bits, weights, masks) for key, bits in predicted.items()},
        per_contig={
            name: bits_per_base([bits], [weight], [mask]).bits_per_base
            for name, bits, weight, mask in zip(names, predicted["model"], weights, masks, strict=True)
            if mask.any()
        },
        markov_order=markov.order,
        markov_selection=markov.selection_bits,
        markov_bases=sum(len(codes) for codes in training),
        environment=environment(),
    )


def _held_out(data: Any) -> tuple[list[str], list[NDArray[np.uint8]], list[NDArray[np.float64]]]:
    """Names, letters and weights of the held-out stretches of a data module."""
    names, letters, weights = [], [], []
    for name, text, source in _stretches(data.val_corpus):
        masked = data.val_corpus.sources[source].soft_masked
        names.append(name)
        letters.append(text)
        weights.append(weight_table(SOFT_MASK_WEIGHT if masked else 1.0)[text].astype(np.float64))
    return names, letters, weights


def _training_codes(corpus: Corpus) -> list[NDArray[np.int8]]:
    codes = [encode(text.tobytes()) for _, text, _ in _stretches(corpus)]
    share = min(1.0, MOST_BASELINE_BASES / max(1, sum(map(len, codes))))
    return [code[: max(1, int(len(code) * share))] for code in codes]


def _stretches(corpus: Corpus) -> Iterator[tuple[str, NDArray[np.uint8], int]]:
    """(name, letters, source row) of every segment; a name is CONTIG, or CONTIG:FROM-TO for a part of one."""
    contigs = corpus.contigs
    for start, end, source in zip(*corpus.segments, strict=True):
        row = int(locate(contigs, np.asarray(start)))
        offset, length = int(contigs.offsets[row]), int(contigs.lengths[row])
        whole = start == offset and end == offset + length
        name = contigs.names[row] if whole else f"{contigs.names[row]}:{start - offset + 1}-{end - offset}"
        yield name, corpus.read(int(start), int(end)), int(source)
