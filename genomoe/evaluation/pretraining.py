"""Bits per base of a run on its held-out contigs, or of any model on sequence files, beside the baselines."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from genomoe.data.collate import weight_table
from genomoe.data.corpus import Corpus, locate
from genomoe.data.open import open_corpus
from genomoe.evaluation.baselines import UNIFORM_BITS, Codes, MarkovModel, composition_bits, encode
from genomoe.evaluation.likelihood import base_bits
from genomoe.evaluation.metrics import BitsPerBase, bits_per_base, scored
from genomoe.genome.errors import GenoMoEError
from genomoe.inference.predictor import Predictor, from_pretrained
from genomoe.training.run import load_data
from genomoe.training.run_directory import RunDirectory, environment

LOW_ORDER = 5
"""Order of the classical Markov model that is reported beside the best one."""
SOFT_MASK_WEIGHT = 0.1
"""Weight of a soft-masked base in the weighted figure, whatever the run was trained with, so that runs compare."""
USUAL_CONTEXT = 8192
"""Tokens of a window of a model that reads longer ones, unless told: a million at once is slow, and seldom wanted."""
MOST_BASELINE_BASES = 20_000_000
"""The Markov models count at most so many training bases, spread evenly over the corpus."""


class MarkovFacts(NamedTuple):
    """How the Markov baselines were fitted."""

    order: int
    """k of the best one."""
    training_bases: int
    """Training bases they counted (one strand; both are counted)."""
    selection_bits_by_order: tuple[float, ...]
    """Bits per base of orders 0, 1, ... on the held-out part of the training data."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What was scored and how well; every model on the same bases."""

    contigs: Mapping[str, int]
    """Contigs and their lengths."""
    context: int
    """Tokens of a window."""
    stride: int
    """Tokens between windows: every token but the first few sees at least context - stride before it."""
    scores: Mapping[str, BitsPerBase]
    """Rows of the table: "model", "composition", "uniform", and with training data "markov" and "markov_low"."""
    per_contig: Mapping[str, float]
    """Bits per base of the model on each contig."""
    markov: MarkovFacts | None
    """None without training data; the composition is then that of the scored sequences themselves."""
    environment: Mapping[str, Any]
    """Date, command, versions and hardware, taken once, so that every copy of the report says the same."""

    def table(self) -> pd.DataFrame:
        """One row a model, best first; columns `model`, `bits_per_base`, `bits_per_base_weighted`, `bases`."""
        names = {
            "model": "this model",
            "markov": f"Markov, best order ({self.markov.order if self.markov else ''})",
            "markov_low": f"Markov, order {LOW_ORDER}",
            "composition": "base composition (order 0)" if self.markov else "composition of these bases",
            "uniform": "uniform",
        }
        rows = [{"model": names[key], **score._asdict()} for key, score in self.scores.items()]
        return pd.DataFrame(rows).sort_values("bits_per_base", ignore_index=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready values."""
        scores = {key: score._asdict() for key, score in self.scores.items()}
        model = {**scores.pop("model"), "per_contig": dict(self.per_contig)}
        if self.markov:
            facts = self.markov._asdict() | {"selection_bits_by_order": list(self.markov.selection_bits_by_order)}
            scores["markov"].update(facts)
            scores["markov_low"]["order"] = LOW_ORDER
        scores["composition"]["counted_on"] = "training data" if self.markov else "these sequences"
        return {
            "contigs": dict(self.contigs),
            "context": self.context,
            "stride": self.stride,
            "model": model,
            "baselines": scores,
            "environment": dict(self.environment),
        }


class _Sequences(NamedTuple):
    """What is scored, stretch by stretch."""

    names: list[str]
    letters: list[NDArray[np.uint8]]
    weights: list[NDArray[np.float64]]

    def codes(self) -> list[Codes]:
        return [encode(text.tobytes()) for text in self.letters]


def evaluate_run(
    path: str | Path,
    *,
    data: Sequence[str | Path] = (),
    context: int | None = None,
    stride: int | None = None,
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Score the held-out contigs of the run at `path` with its model and with Markov baselines.

    The baselines are fitted on the run's training data, their order and smoothing chosen on a part of it.
    Counted are the bases that every model scores: unambiguous ones, except the first of each contig.

    Args:
        data: sequence files (or a corpus) to score instead of the held-out contigs.
        context: tokens of a window; None: what the run was trained with.
        stride: tokens between windows; None: half the context.

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
    trained_on = load_data(config)
    trained_on.setup()
    corpus = open_corpus(list(data)) if data else trained_on.val_corpus
    if corpus is None:
        raise GenoMoEError(
            f"the run {run.path} holds no contig out (data.val is empty): name sequences to evaluate it on with --data."
        )
    predictor = from_pretrained(run.model, device=device)
    usual = int(config.data.context_length)
    context, stride = _windows(predictor, usual if context is None else context, stride)
    report = progress or (lambda part, done: None)
    sequences = _read(corpus)
    codes = sequences.codes()
    training = _training_codes(trained_on.train_corpus)
    report("Markov baselines", 0.0)
    markov = MarkovModel.fit(training)
    baselines = {
        "markov": markov.bits(codes),
        "markov_low": markov.truncated(min(LOW_ORDER, markov.order)).bits(codes),
        "composition": markov.truncated(0).bits(codes),
    }
    facts = MarkovFacts(markov.order, sum(map(len, training)), markov.selection_bits)
    return _report(predictor, sequences, baselines, context, stride, report, markov=facts)


def evaluate_model(
    path: str | Path,
    data: Sequence[str | Path],
    *,
    context: int | None = None,
    stride: int | None = None,
    device: str = "cpu",
    progress: Callable[[str, float], None] | None = None,
) -> Report:
    """Score sequence files with the model folder at `path`, ours or a Hugging Face Mixtral folder.

    Beside it stand a uniform guess and the composition of the scored sequences themselves, which no model
    that ignores its context can beat; Markov baselines need training data, see `evaluate_run`.

    Args:
        data: sequence files, or a corpus.
        context: tokens of a window; None: the model's, but at most 8,192.
        stride: tokens between windows; None: half the context.

    Raises:
        GenoMoEError, ValueError: no model folder, no such file, no base to score, or windows that do not fit.
    """
    corpus = open_corpus(list(data))
    predictor = from_pretrained(path, device=device)
    usual = min(predictor.model.config.max_context, USUAL_CONTEXT)
    context, stride = _windows(predictor, usual if context is None else context, stride)
    sequences = _read(corpus)
    baselines = {"composition": composition_bits(sequences.codes())}
    return _report(predictor, sequences, baselines, context, stride, progress or (lambda part, done: None), markov=None)


def _windows(predictor: Predictor, context: int, stride: int | None) -> tuple[int, int]:
    """The context, checked before anything is computed, and the stride, by default half of it."""
    longest = predictor.model.config.max_context
    if not 2 <= context <= longest:
        raise GenoMoEError(f"A window of {context:,} tokens is not possible: {predictor.name} reads 2 to {longest:,}.")
    return context, context // 2 if stride is None else stride


def _report(
    predictor: Predictor,
    sequences: _Sequences,
    baselines: Mapping[str, list[NDArray[np.float64]]],
    context: int,
    stride: int,
    report: Callable[[str, float], None],
    *,
    markov: MarkovFacts | None,
) -> Report:
    """Score `sequences` with the model, and count the same bases for it and for the baselines."""
    names, letters, weights = sequences
    bits = []
    for number, text in enumerate(letters):
        bits.append(
            base_bits(
                predictor.model,
                predictor.tokenizer,
                text,
                context=context,
                stride=stride,
                progress=lambda done, number=number: report("model", (number + done) / len(letters)),
            )
        )
    masks = scored(bits, weights)
    uniform = [np.full(len(text), UNIFORM_BITS) for text in letters]
    predicted = {"model": bits, **baselines, "uniform": uniform}
    return Report(
        contigs={name: len(text) for name, text in zip(names, letters, strict=True)},
        context=context,
        stride=stride,
        scores={key: bits_per_base(values, weights, masks) for key, values in predicted.items()},
        per_contig={
            name: bits_per_base([values], [weight], [mask]).bits_per_base
            for name, values, weight, mask in zip(names, bits, weights, masks, strict=True)
            if mask.any()
        },
        markov=markov,
        environment=environment(),
    )


def _read(corpus: Corpus) -> _Sequences:
    """Every stretch of a corpus; a name that two sources share is told apart by the source's."""
    stretches = list(_stretches(corpus))
    times = Counter(name for name, _, _ in stretches)
    names, letters, weights = [], [], []
    for name, text, source in stretches:
        info = corpus.sources[source]
        names.append(name if times[name] == 1 else f"{info.name}/{name}")
        letters.append(text)
        weights.append(weight_table(SOFT_MASK_WEIGHT if info.soft_masked else 1.0)[text].astype(np.float64))
    return _Sequences(names, letters, weights)


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
