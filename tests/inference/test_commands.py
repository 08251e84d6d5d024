"""The shell commands of inference, run as a user would, on a tiny model."""

from __future__ import annotations

import gzip

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
    header = (
        "##fileformat=VCFv4.2\n##contig=<ID=1,length=900>\n#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\n"
    )
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
    frame = pd.DataFrame(rows, columns=["pos", "ref", "alt"]).assign(chrom="1")[
        ["alt", "chrom", "ref", "pos"]
    ]
    frame.to_csv(folder / "e.tsv", sep="\t", index=False)
    frame.to_csv(folder / "f.csv", index=False)
    frame.to_parquet(folder / "g.parquet")
    return sorted(folder.glob("?.*"))


def test_score_reads_every_kind_the_same(model, fasta, sequences, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    found = []
    for number, path in enumerate(variant_files(tmp_path / "in", sequences["chr1"])):
        out = tmp_path / f"{number}.tsv"
        assert (
            genomoe("score", path, "--reference", fasta, "--model", model, "--out", out, "--window", 64) == 0
        )
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


def test_mistakes_are_one_sentence(model, fasta, sequences, tmp_path, capsys):
    (tmp_path / "in").mkdir()
    path, *_ = variant_files(tmp_path / "in", sequences["chr1"])
    good = ["--reference", fasta, "--model", model, "--out", tmp_path / "o.tsv"]
    for arguments, message in [
        (["score", path, *good, "--window", 5000], "longer than the model's context"),
        (["score", path, *good, "--score", "best"], "one of llr"),
        (["score", tmp_path / "none.vcf", *good], "There is no variant file"),
        (["score", path, *good[:4], "--out", tmp_path / "o.txt"], "must end in .vcf.gz"),
        (["score", path, "--reference", fasta, "--model", tmp_path, "--out", "o.tsv"], "not a model folder"),
        (["generate", "hello", "--model", model], "neither a sequence of bases nor a FASTA file"),
        (["mutagenesis", "chr1:1-9999", *good], "does not lie within chr1"),
        (["embed", fasta, "--model", model, "--out", tmp_path / "o.npz"], "Sequence 1 has 900 tokens"),
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
