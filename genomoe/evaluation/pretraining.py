"""Bits per base of a run on its held-out contigs, or of any model on sequence files, beside the baselines."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from genomoe.data.collate import weight_table
from genomoe.data.corpus import Corpus, SourceInfo, locate
from genomoe.data.open import open_corpus
from genomoe.evaluation.baselines import MAX_ORDER, UNIFORM_BITS, Codes, MarkovModel, Values, composition, encode
from genomoe.evaluation.likelihood import base_bits
from genomoe.evaluation.metrics import BitsPerBase, BitsSum, scored
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


class _Stretch(NamedTuple):
    """A segment of a corpus; the letters of one at a time are in memory."""

    name: str
    """CONTIG, or CONTIG:FROM-TO for a part of one."""
    start: int
    end: int
    source: SourceInfo


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
    training = _training_codes(trained_on.train_corpus)
    report("Markov baselines", 0.0)
    markov = MarkovModel.fit(training)
    low = min(LOW_ORDER, markov.order)

    def baselines(codes: Codes) -> dict[str, Values]:
        by_order = markov.bits(codes)
        return {"markov": by_order[-1], "markov_low": by_order[low], "composition": by_order[0]}

    facts = MarkovFacts(markov.order, sum(map(len, training)), markov.selection_bits)
    del training
    return _report(predictor, corpus, baselines, context, stride, report, markov=facts)


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
    bits_of = composition(_codes(corpus, start, end) for _, start, end, _ in _stretches(corpus))
    report = progress or (lambda part, done: None)
    return _report(
        predictor, corpus, lambda codes: {"composition": bits_of(codes)}, context, stride, report, markov=None
    )


def _windows(predictor: Predictor, context: int, stride: int | None) -> tuple[int, int]:
    """The context, checked before anything is computed, and the stride, by default half of it."""
    longest = predictor.model.config.max_context
    if not 2 <= context <= longest:
        raise GenoMoEError(f"A window of {context:,} tokens is not possible: {predictor.name} reads 2 to {longest:,}.")
    return context, context // 2 if stride is None else stride


def _report(
    predictor: Predictor,
    corpus: Corpus,
    baselines: Callable[[Codes], dict[str, Values]],
    context: int,
    stride: int,
    report: Callable[[str, float], None],
    *,
    markov: MarkovFacts | None,
) -> Report:
    """Score `corpus` with the model, and count the same bases for it and for the baselines, piece by piece."""
    sums = defaultdict(BitsSum, model=BitsSum())
    per_contig = {}
    stretches = _stretches(corpus)
    for number, stretch in enumerate(stretches):
        text = corpus.read(stretch.start, stretch.end)
        weight_of = weight_table(SOFT_MASK_WEIGHT if stretch.source.soft_masked else 1.0).astype(np.float64)
        contig, end = BitsSum(), 0
        for bits in base_bits(
            predictor.model,
            predictor.tokenizer,
            text,
            context=context,
            stride=stride,
            progress=lambda done, number=number: report("model", (number + done) / len(stretches)),
        ):
            start, end = end, end + len(bits)
            weights = weight_of[text[start:end]]
            mask = scored(bits, weights)
            contig.add(bits, weights, mask)
            before = max(0, start - MAX_ORDER)  # all that a baseline looks at
            codes = encode(text[before:end].tobytes())
            others = {key: values[start - before :] for key, values in baselines(codes).items()}
            for key, values in {"model": bits, **others, "uniform": np.full(len(bits), UNIFORM_BITS)}.items():
                sums[key].add(values, weights, mask)
        if contig.bases:
            per_contig[stretch.name] = contig.mean().bits_per_base
    return Report(
        contigs={stretch.name: stretch.end - stretch.start for stretch in stretches},
        context=context,
        stride=stride,
        scores={key: total.mean() for key, total in sums.items()},
        per_contig=per_contig,
        markov=markov,
        environment=environment(),
    )


def _training_codes(corpus: Corpus) -> list[Codes]:
    """The first part of every segment, the same share of each."""
    share = min(1.0, MOST_BASELINE_BASES / max(1, corpus.segments.bases))
    return [
        _codes(corpus, start, min(end, start + max(1, int((end - start) * share))))
        for _, start, end, _ in _stretches(corpus)
    ]


def _codes(corpus: Corpus, start: int, end: int) -> Codes:
    return encode(corpus.read(start, end).tobytes())


def _stretches(corpus: Corpus) -> list[_Stretch]:
    """Every segment of a corpus; a name that two sources share is told apart by the source's."""
    contigs = corpus.contigs
    found = []
    for start, end, source in zip(*(column.tolist() for column in corpus.segments), strict=True):
        row = int(locate(contigs, np.asarray(start)))
        offset, length = int(contigs.offsets[row]), int(contigs.lengths[row])
        whole = start == offset and end == offset + length
        name = contigs.names[row] if whole else f"{contigs.names[row]}:{start - offset + 1}-{end - offset}"
        found.append(_Stretch(name, start, end, corpus.sources[source]))
    times = Counter(stretch.name for stretch in found)
    return [part if times[part.name] == 1 else part._replace(name=f"{part.source.name}/{part.name}") for part in found]
