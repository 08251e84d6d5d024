"""The shell commands of inference, run as a user would, on a tiny model."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pysam
import pytest
from tiny_models import tiny_model

from genomoe.cli import main
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.model.pretrained import save_pretrained


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "model"
    save_pretrained(tiny_model(), NucleotideTokenizer().to_dict(), folder)
    return folder


def genomoe(*arguments) -> int:
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return int(done.value.code or 0)


def variant_files(folder, sequence):
    """The same variants as every kind of file."""
    header = "##fileformat=VCFv4.2\n##contig=<ID=1,length=900>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    rows = [(at + 1, sequence[at], "ACGT"["ACGT".index(sequence[at]) - 1]) for at in (60, 90, 200)]
    text = header + "".join(f"1\t{p}\t.\t{r}\t{a}\t.\t.\t.\n" for p, r, a in rows)
    (folder / "a.vcf").write_text(text)
    (folder / "b.vcf.gz").write_bytes(gzip.compress(text.encode()))
    with pysam.BGZFile(str(folder / "c.vcf.gz"), "wb") as file:
        file.write(text.encode())
    with (
        pysam.VariantFile(str(folder / "a.vcf")) as source,
        pysam.VariantFile(str(folder / "d.bcf"), "wb", header=source.header) as out,
    ):
        for record in source:
            out.write(record)
    frame = pd.DataFrame(rows, columns=["pos", "ref", "alt"]).assign(chrom="1")[["alt", "chrom", "ref", "pos"]]
    frame.to_csv(folder / "e.tsv", sep="\t", index=False)
    frame.to_csv(folder / "f.csv", index=False)
    frame.to_parquet(folder / "g.parquet")
    return sorted(folder.glob("?.*"))


def test_score_reads_every_kind_the_same(model, fasta, sequences, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    found = []
    for number, path in enumerate(variant_files(tmp_path / "in", sequences["chr1"])):
        out = tmp_path / f"{number}.tsv"
        assert genomoe("score", path, "--reference", fasta, "--model", model, "--out", out, "--window", 64) == 0
        found.append(pd.read_csv(out, sep="\t")["genomoe"].tolist())
    assert len(found) == 7
    assert all(scores == found[0] for scores in found)
    assert all(np.isfinite(found[0]))
    assert "3 ALTs in 3 rows" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".vcf.gz", ".vcf", ".tsv.gz", ".parquet"])
def test_score_writes_every_kind(model, fasta, sequences, tmp_path, ending):
    (tmp_path / "in").mkdir()
    path, *_ = variant_files(tmp_path / "in", sequences["chr1"])
    out = tmp_path / f"out{ending}"
    assert genomoe("score", path, "-r", fasta, "-m", model, "-o", out, "--window", 64, "--score", "jsd") == 0
    assert out.stat().st_size > 0
    assert (tmp_path / "out.vcf.gz.tbi").exists() == (ending == ".vcf.gz")


def test_score_in_another_precision_and_one_by_one(model, fasta, sequences, tmp_path):
    variant_files(tmp_path, sequences["chr1"])
    lines = (tmp_path / "a.vcf").read_text().splitlines(keepends=True)
    (tmp_path / "last.vcf").write_text("".join([*lines[:-3], lines[-1]]))

    def score(name: str, *options: object) -> list[float]:
        out = tmp_path / "out.parquet"
        path = tmp_path / name
        assert genomoe("score", path, "-r", fasta, "-m", model, "-o", out, "--window", 64, *options) == 0
        return pd.read_parquet(out)["genomoe"].tolist()

    usual, coarse = score("a.vcf"), score("a.vcf", "--precision", "fp8")
    assert usual != coarse, "of a model so small, by up to a few tenths"
    one_by_one = score("a.vcf", "--batch-variants", 1)
    np.testing.assert_allclose(one_by_one, usual, atol=1e-5)
    assert score("last.vcf", "--batch-variants", 1) == one_by_one[-1:], "bit for bit, whatever else is in the file"


def test_mistakes_are_one_sentence(model, fasta, sequences, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    path, *_ = variant_files(tmp_path / "in", sequences["chr1"])
    (tmp_path / "gap.fa").write_text(">whole\nACGT\n>gap\n")
    good = ["--reference", fasta, "--model", model, "--out", tmp_path / "o.tsv"]
    for arguments, message in [
        (["score", path, *good, "--window", 5000], "longer than the model's context"),
        (["score", tmp_path / "none.vcf", *good], "none.vcf does not exist"),
        (["score", path, *good[:4], "--out", tmp_path / "o.txt"], "must end in .vcf.gz"),
        (["score", path, *good[:4], "--out", path], "is the input itself"),
        (["score", path, "--reference", fasta, "--model", tmp_path, "--out", "o.tsv"], "not a model folder"),
        (["generate", "hello", "--model", model], "neither a sequence of bases nor a FASTA file"),
        (["mutagenesis", "chr1:1-9999", *good], "does not lie within chr1"),
        (["embed", fasta, "--model", model, "--out", tmp_path / "o.npz"], "record 'chr1' has 900 bases"),
        (["routing", tmp_path / "gap.fa", *good[2:]], "record 'gap' has 0 bases"),
        (["generate", "ACGT", "--model", model, "--top-p", 2], "top_p is 2.0; it must be above 0 and at most 1"),
        (["mutagenesis", "chr7:1-9", *good], "nearest are chr"),
    ]:
        assert genomoe(*arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert "Traceback" not in error
    assert not list(tmp_path.glob("o.*"))


def test_other_commands(model, fasta, tmp_path, capsys):
    short = tmp_path / "short.fa"
    short.write_text(">a\nACGTACGT\n>b\nGGGTT\n")
    assert genomoe("embed", short, "--model", model, "--out", tmp_path / "e.npz") == 0
    assert np.load(tmp_path / "e.npz")["vectors"].shape == (2, 32)
    assert genomoe("embed", short, "--model", model, "--out", tmp_path / "e.tsv", "--strands", "both") == 0
    assert pd.read_csv(tmp_path / "e.tsv", sep="\t").shape == (2, 33)
    assert genomoe("routing", short, "--model", model, "--out", tmp_path / "r.parquet") == 0
    assert len(pd.read_parquet(tmp_path / "r.parquet")) == 26
    capsys.readouterr()
    assert genomoe("generate", "ACGT", "--model", model, "-n", 90, "--samples", 2) == 0
    assert [len(line) for line in capsys.readouterr().out.splitlines()] == [9, 80, 10, 9, 80, 10]
    options = ["--reference", fasta, "--model", model, "--window", 64]
    assert genomoe("mutagenesis", "chr1:101-110", *options, "--out", tmp_path / "m.png") == 0
    assert f"{tmp_path / 'm.png'}, {tmp_path / 'm.tsv'}" in capsys.readouterr().err
    assert len(pd.read_csv(tmp_path / "m.tsv", sep="\t")) == 30
    assert (tmp_path / "m.png").stat().st_size > 1000


def test_contig_alias_file(model, tmp_path, sequences):
    (tmp_path / "r.fa").write_text(f">NC_1\n{sequences['chr1']}\n")
    (tmp_path / "alias.tsv").write_text("# ours\ttheirs\nchr1\tNC_1\n")
    (tmp_path / "v.tsv").write_text(f"chrom\tpos\tref\talt\nchr1\t61\t{sequences['chr1'][60]}\tG\n")
    arguments = ["score", tmp_path / "v.tsv", "-r", tmp_path / "r.fa", "-m", model, "-o", tmp_path / "o.tsv"]
    assert genomoe(*arguments, "--window", 64) == 1
    assert genomoe(*arguments, "--window", 64, "--contig-alias", tmp_path / "alias.tsv") == 0
    assert genomoe(*arguments, "--window", 64, "--contig-alias", "chr1=NC_1") == 0


YEAST = "bundled:yeast/ScerR64_I_GCF_000146045.2_R64_genomic.fna.gz"
VCFS = sorted((Path(__file__).parents[1] / "data").glob("*.vcf"))
SCORED = {"edges": 3, "indels": 8, "mnv": 4, "multiallelic": 12, "snv": 10, "unsorted": 5, "without_score": 0}


@pytest.mark.parametrize("path", VCFS, ids=lambda path: path.stem)
def test_every_vcf_of_the_test_data_is_scored(model, tmp_path, path, capsys):
    out = tmp_path / "out.vcf.gz"
    arguments = ["score", path, "-r", YEAST, "-m", model, "-o", out, "--window", 64]
    if path.stem == "ref_mismatch":
        assert genomoe(*arguments) == 1
        assert "ref_mismatch.vcf, line 6: REF of NC_001133.9:30000" in capsys.readouterr().err
        arguments += ["--ref-mismatch", "skip"]
    if path.stem == "other_contig_name":
        assert genomoe(*arguments) == 1
        assert "Contig 'chrI' is not in the reference" in capsys.readouterr().err
        arguments += ["--contig-alias", "chrI=NC_001133.9"]
    if path.stem == "unsorted":
        with pytest.warns(UserWarning, match="not sorted"):
            assert genomoe(*arguments) == 0
    else:
        assert genomoe(*arguments) == 0
    before = [line.split("\t") for line in path.read_text().splitlines() if line[0] != "#"]
    after = [line.split("\t") for line in gzip.decompress(out.read_bytes()).decode().splitlines() if line[0] != "#"]
    assert [row[:7] + row[8:] for row in after] == [row[:7] + row[8:] for row in before]
    infos = [dict(item.split("=") for item in row[7].split(";")) for row in after]
    scores = [score for info in infos for score in info["GENOMOE"].split(",")]
    statuses = [status for info in infos for status in info["GENOMOE_STATUS"].split(",")]
    assert [score != "." for score in scores] == [status == "ok" for status in statuses]
    assert sum(score != "." for score in scores) == SCORED.get(path.stem, sum(s == "ok" for s in statuses))
    if path.stem == "indels":  # one deletion, aligned at both ends of a run of one base
        assert scores[-1] == scores[-2] or scores[0] == scores[1]
