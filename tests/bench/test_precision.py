"""The comparison of precisions: same batches, rows of every kind, failures recorded, the command end to end."""

from __future__ import annotations

import dataclasses
import json

import pandas as pd
import pytest
import torch

from genomoe.bench import precision
from genomoe.bench.precision import HELD_OUT, TRAIN, Curve, PrecisionOptions, Training, Windows
from genomoe.cli import main
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.genome.coordinates import Interval
from genomoe.genome.fasta import Reference

SMALL = dataclasses.replace(PrecisionOptions.small(3, seeds=2), every=2, evaluations=2)
CPU = torch.device("cpu")


def test_windows_are_bases_of_both_strands_within_one_contig() -> None:
    windows = Windows(TRAIN, 64, CPU)
    lengths = [length for path in TRAIN for length in Reference(path).contigs.values()]
    assert len(windows.starts) == 2 * sum(length - 64 for length in lengths)
    tokens, labels, weights = windows.batch(windows.starts[[0, -1]])
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert weights.min() >= 0
    assert weights.max() == 1.0
    bases = Reference(TRAIN[0])
    (contig,) = bases.contigs
    first = bases.fetch(Interval(contig, 0, 64))
    assert tokens[0].tolist() == NucleotideTokenizer().encode(first).tolist()


def test_absent_windows_have_no_targets() -> None:
    windows = Windows(HELD_OUT, 64, CPU, strands=1)
    _, _, weights = windows.batch(torch.tensor([0, -1]))
    assert weights[0].sum() > 0
    assert weights[1].sum() == 0


def test_a_training_is_repeatable_and_seeds_differ() -> None:
    first, again, other = (precision.train(one, SMALL, "cpu") for one in (SMALL.trainings[i] for i in (0, 0, 1)))
    assert first == again
    assert first.losses != other.losses
    assert first.backend == "reference"
    assert len(first.losses) == 3
    assert set(first.held_out) == {2, 3}


def test_a_batch_of_windows_that_is_not_full_changes_nothing() -> None:
    odd = dataclasses.replace(SMALL, steps=1, evaluations=1, evaluation_windows=7)
    assert odd.windows == 4
    model = precision.GenoMoEModel(odd.model)
    held_out = Windows(HELD_OUT, odd.context, CPU, strands=1)
    in_batches = precision._evaluate(model, precision.PrecisionConfig(), held_out, odd)
    at_once = precision._evaluate(model, precision.PrecisionConfig(), held_out, dataclasses.replace(odd, windows=7))
    assert in_batches == pytest.approx(at_once, rel=1e-6)


def test_rows_and_verdicts_by_hand() -> None:
    options = dataclasses.replace(SMALL, steps=4, last=2, every=2)
    finals = {"bf16": (2.0, 2.2), "fp8": (2.1, 2.3), "mxfp8": (2.7, 2.7)}
    curves = {
        one: Curve("fused", [3.0, 2.5, value, value], {4: value + 0.5})
        for one in options.trainings
        for value in (finals[one.precision][one.seed - 1],)
    }
    rows = list(precision._curve_rows(options, curves, {}))
    steps = [row for row in rows if row["kind"] == "step" and row["precision"] == "fp8" and row["seed"] == 1]
    assert [(row["step"], row["loss_bits_per_base"]) for row in steps] == [(2, 2.75), (4, 2.1)]
    assert [row["difference_to_bf16"] for row in steps] == [0.0, 0.0]  # the mean of bf16 is 2.1
    fp8, mxfp8 = precision._verdicts(options, curves)
    assert fp8["difference_bits_per_base"] == pytest.approx(0.1)
    assert fp8["standard_error_bits_per_base"] == pytest.approx((0.02 / 2 + 0.02 / 2) ** 0.5, abs=1e-6)
    assert fp8["bf16_range_bits_per_base"] == pytest.approx(0.2)
    assert fp8["within_two_standard_errors"]
    assert mxfp8["held_out_difference_bits_per_base"] == pytest.approx(0.6)
    assert mxfp8["held_out_standard_error_bits_per_base"] == pytest.approx(0.1)
    assert not mxfp8["held_out_within_two_standard_errors"]


def test_a_training_that_failed_is_a_row() -> None:
    first, *others = SMALL.trainings
    curves = {first: Curve("fused", [3.0, 2.5, 2.0], {3: 2.0})}
    rows = list(precision._curve_rows(SMALL, curves, dict.fromkeys(others, "RuntimeError: no memory")))
    assert [row["error"] for row in rows if "error" in row] == ["RuntimeError: no memory"] * 5
    assert list(precision._verdicts(SMALL, curves)) == []


def test_every_precision_starts_from_every_seed() -> None:
    trainings = PrecisionOptions().trainings
    assert len(set(trainings)) == 9
    assert Training("fp8", "mxfp8", 3) in trainings


@pytest.mark.slow
def test_the_command_writes_rows_and_a_plot(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    out, plot = tmp_path / "precision.json", tmp_path / "precision.png"
    arguments = ["bench", "precision", "--small", "--steps", "3", "--seeds", "1", "--device", "cpu"]
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--out", str(out), "--plot", str(plot)])
    result = json.loads(out.read_text())
    assert {"hardware", "versions", "commit", "date"} <= set(result)
    rows = pd.DataFrame(result["rows"])
    assert rows["kind"].value_counts()["summary"] == 3
    assert "verdict" not in set(rows["kind"])  # one seed says nothing
    assert set(rows["implementation"]) == {"genomoe-reference"}
    assert "error" not in rows
    assert plot.stat().st_size > 10_000
