"""The report of a labelled variant set: what the labels depend on must be what the report says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from genomoe.cli import main
from genomoe.evaluation.benchmarks import LabelledSet
from genomoe.evaluation.variant_effects import evaluate_variants, probability
from genomoe.evaluation.variant_html import html_report
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.genome.coordinates import Interval
from genomoe.inference.predictor import Predictor
from genomoe.model.pretrained import save_pretrained

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from tiny_models import tiny_model


class InMemory:
    def __init__(self, sequence: str):
        self.sequence, self.contigs = sequence, {"chr1": len(sequence)}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        return self.sequence[interval.start : interval.end].encode()


@pytest.fixture(scope="module")
def predictor():
    return Predictor(tiny_model(), NucleotideTokenizer())


@pytest.fixture(scope="module")
def genome():
    return InMemory("".join(np.random.default_rng(2).choice(list("ACGT"), 3000)))


@pytest.fixture(scope="module")
def table(genome):
    """240 SNVs in two classes and twelve groups, not yet labelled."""
    random = np.random.default_rng(3)
    places = np.sort(random.choice(np.arange(100, 2900), 240, replace=False))
    return pd.DataFrame(
        {
            "contig": "1",
            "position": places + 1,
            "ref": [genome.sequence[p] for p in places],
            "alt": ["ACGT"["ACGT".index(genome.sequence[p]) - 1] for p in places],
            "class": np.where(places < 1500, "tRNA", "CDS"),
            "group": [f"g{p // 250}" for p in places],
        }
    )


def report_on(predictor, genome, table, labels, **options):
    labelled = LabelledSet(name="toy", table=table.assign(label=labels), dropped={"why": 2})
    return evaluate_variants(predictor, labelled, genome, window=64, repeats=50, **options)


def value(report, score, metric="auroc"):
    return report.overall.set_index(["score", "metric"]).loc[(score, metric), "value"]


def test_a_model_that_knows_is_told_from_one_at_chance(predictor, genome, table):
    scores = predictor.score_variants(table, genome, window=64)["score"]
    knows = report_on(predictor, genome, table, (scores < scores.median()).astype(int))
    assert value(knows, "model") == 1.0
    assert not any("chance" in text for text in knows.warnings)
    labels = np.random.default_rng(5).permutation((scores < scores.median()).astype(int))
    chance = report_on(predictor, genome, table, labels)
    assert any("at chance" in text for text in chance.warnings)
    assert chance.left_out == {"why": 2}
    assert len(chance.rows) == 240


def test_a_grouping_that_explains_everything_is_warned_of(predictor, genome, table):
    labels = (table["class"] == "tRNA").astype(int).to_numpy().copy()
    labels[::10] = 1 - labels[::10]
    report = report_on(predictor, genome, table, labels)
    assert report.groupings["class"] > 0.8
    assert any(text.startswith("The class of a variant alone") for text in report.warnings)
    within = report.within[(report.within["grouping"] == "class") & (report.within["score"] == "model")]
    assert within["rows"].sum() == 240


def test_baselines_learn_what_they_can_from_other_rows(predictor, genome, table):
    by_allele = report_on(predictor, genome, table, table["ref"].isin(["A", "C"]).astype(int))
    assert value(by_allele, "allele change") > 0.99
    noise = report_on(predictor, genome, table, np.random.default_rng(0).integers(0, 2, 240))
    for name in ("allele change", "trinucleotide change", "k-mer regression"):
        assert abs(value(noise, name) - 0.5) < 0.15, name


def test_user_columns_and_continuous_labels(predictor, genome, table):
    random = np.random.default_rng(0)
    effect = random.normal(size=240)
    report = report_on(predictor, genome, table.assign(phyloP100=effect + 0.1 * random.normal(size=240)), effect)
    assert not report.binary
    assert value(report, "phyloP100", "spearman") > 0.9
    assert any("phyloP100" in text for text in report.warnings)


def test_rows_without_a_score_are_counted_and_too_few_is_an_error(predictor, genome, table):
    bad = table.copy()
    bad.loc[0, "ref"] = "ACGT"["ACGT".index(bad.loc[0, "ref"]) - 2]
    bad.loc[1, "contig"] = "chr7"
    labels = np.arange(240) % 2
    report = report_on(predictor, genome, bad, labels)
    assert report.left_out == {"why": 2, "ref_mismatch": 1, "unknown_contig": 1}
    with pytest.raises(ValueError, match="ten are needed"):
        report_on(predictor, genome, table.head(5), labels[:5])


def test_html_is_whole_and_calibration_is_between_0_and_1(predictor, genome, table):
    report = report_on(predictor, genome, table.assign(group="<b>"), np.arange(240) % 2)
    text = html_report(report)
    assert text.count("<table>") == 2
    assert "<b>" not in text.replace("<body>", "")
    assert "data:image/png;base64," in text
    assert ((probability(report.rows) > 0) & (probability(report.rows) < 1)).all()


def test_command(predictor, genome, table, tmp_path, capsys):
    save_pretrained(predictor.model, predictor.tokenizer.to_dict(), tmp_path / "run" / "model")
    (tmp_path / "ref.fa").write_text(f">chr1\n{genome.sequence}\n")
    table.assign(label=np.arange(240) % 2).rename(columns={"contig": "chrom"}).to_csv(tmp_path / "t.tsv", sep="\t")
    rows = "\n".join(f"chr1\tx\tCDS\t{s}\t{s + 298}\t.\t+\t0\tID=c{s}" for s in range(101, 2500, 600))
    (tmp_path / "a.gff3").write_text(rows + "\n")
    arguments = [
        "evaluate", tmp_path / "run", "--task", "table", "--table", tmp_path / "t.tsv", "--reference",
        tmp_path / "ref.fa", "--annotation", tmp_path / "a.gff3", "--window", "64", "--json", "--device", "cpu",
    ]  # fmt: skip
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    assert not done.value.code
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == 240
    assert {"missense_variant", "intergenic_variant"} <= {row["group"] for row in report["within"]}
    folder = tmp_path / "run" / "report" / "task-table"
    assert {path.name for path in folder.iterdir()} == {"report.html", "report.json", "rows.tsv"}
    with pytest.raises(SystemExit) as done:
        main(["evaluate", str(tmp_path / "run"), "--task", "clinvar"])
    assert done.value.code == 1
    assert "--table" in capsys.readouterr().err
