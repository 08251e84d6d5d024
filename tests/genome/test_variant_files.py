"""Every kind of variant file in and out: nothing lost, errors with their line, order and samples kept."""

from __future__ import annotations

import gzip
import shutil
import subprocess

import pandas as pd
import pysam
import pytest

from genomoe.genome.variant_files import open_variants
from genomoe.genome.variant_output import open_output

HEADER = (
    '##fileformat=VCFv4.2\n##contig=<ID=chrI,length=1000>\n##INFO=<ID=DP,Number=1,Type=Integer,Description="d">\n'
    '##FORMAT=<ID=GT,Number=1,Type=String,Description="g">\n'
)
COLUMNS = "#CHROM\tPOS\tID\tREF\tALT\tQUAL\tFILTER\tINFO\tFORMAT\ts1\ts2\n"
ROWS = "chrI\t5\trs1\tA\tC,G\t30\tPASS\tDP=3\tGT\t0/1\t1/2\nchrI\t9\t.\tAC\tA\t.\t.\t.\tGT\t0/0\t./.\n"
SITES = [("chrI", 4, "A", ("C", "G")), ("chrI", 8, "AC", ("A",))]


def bgzip(path, text):
    with pysam.BGZFile(str(path), "wb") as file:
        file.write(text.encode())
    return path


def sites(path, columns=None):
    return [(row.contig, row.position, row.ref, row.alts) for row in open_variants(path, columns).rows()]


@pytest.mark.parametrize("kind", ["plain", "crlf", "gzip", "bgzip", "bcf", "no final newline", "blank lines"])
def test_every_kind_of_vcf_reads_the_same(tmp_path, kind):
    text, path = HEADER + COLUMNS + ROWS, tmp_path / "in.vcf"
    if kind == "crlf":
        path.write_bytes(text.replace("\n", "\r\n").encode())
    elif kind == "gzip":
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "bgzip":
        bgzip(path, text)
    elif kind == "bcf":
        plain = tmp_path / "plain.vcf"
        plain.write_text(text)
        with (
            pysam.VariantFile(str(plain)) as source,
            pysam.VariantFile(str(path), "wb", header=source.header) as out,
        ):
            for record in source:
                out.write(record)
    elif kind == "blank lines":
        path.write_text(HEADER + COLUMNS + "\n" + ROWS.replace("\nchrI", "\n\nchrI") + "\n\n")
    else:
        path.write_text(text.rstrip("\n") if kind == "no final newline" else text)
    assert sites(path) == SITES


@pytest.mark.parametrize("kind", ["tsv", "csv", "tsv.gz", "parquet"])
def test_tables_in_any_column_order(tmp_path, kind):
    frame = pd.DataFrame(
        {
            "alt": ["C,G", "A"],
            "note": ["x", None],
            "POS": [5, 9],
            "Ref": ["A", "AC"],
            "#CHROM": ["chrI", "chrI"],
        }
    )
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, sep="," if kind == "csv" else "\t", index=False)
    assert sites(path) == SITES


def test_columns_by_other_names(tmp_path):
    path = tmp_path / "in.tsv"
    path.write_text("where\tp\tref\tmut\nchrI\t5\tA\tC\n")
    with pytest.raises(ValueError, match=r"no column for contig .* columns are where, p, ref, mut"):
        open_variants(path)
    assert sites(path, {"contig": "where", "position": "p", "alt": "mut"}) == [("chrI", 4, "A", ("C",))]


def test_a_vcf_without_header_is_accepted(tmp_path):
    path = tmp_path / "in.vcf"
    path.write_text("chrI\t5\t.\tA\tC\n")
    assert sites(path) == [("chrI", 4, "A", ("C",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (HEADER + COLUMNS + "chrI\t5\t.\tA\n", r"line 6: 4 columns"),
        (HEADER + COLUMNS + "chrI 5 . A C\n", r"line 6: .*spaces instead of tabs"),
        (HEADER + "#CHROM POS ID REF ALT QUAL FILTER INFO\n", "line 5: the columns are separated by spaces"),
        (HEADER + COLUMNS + "chrI\tfive\t.\tA\tC\n", "line 6: the position is 'five'"),
        (HEADER + COLUMNS + "chrI\t5.5\t.\tA\tC\n", "line 6: the position is '5.5'"),
        ("#contig\tpos\n", "line 1: the header line starts with"),
    ],
)
def test_bad_vcf_names_its_line(tmp_path, text, message):
    path = tmp_path / "in.vcf"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(open_variants(path).rows())


def test_truncated_files_are_errors(tmp_path):
    whole = bgzip(tmp_path / "whole.vcf.gz", HEADER + COLUMNS + ROWS * 2000).read_bytes()
    cut = tmp_path / "cut.vcf.gz"
    cut.write_bytes(whole[:-28])
    with pytest.raises(ValueError, match="end marker"):
        open_variants(cut)
    packed = gzip.compress((HEADER + COLUMNS + ROWS * 2000).encode())
    cut.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match=r"after line \d+: the compressed file is truncated"):
        list(open_variants(cut).rows())


def test_wrong_paths(tmp_path):
    for path, message in [
        (tmp_path / "none.vcf", "does not exist"),
        (tmp_path, "is a folder"),
        ("-", "standard input"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_variants(path)


def write(source, out, results, key="GENOMOE"):
    with open_output(out, source, key=key, description='score, "formula"') as writer:
        for row, result in zip(source.rows(), results, strict=True):
            writer.write(row, result)


RESULTS = [[(0.5, "ok"), (float("nan"), "ref_mismatch")], [(-1.25, "ok")]]


def test_vcf_out_keeps_everything_and_is_indexed(tmp_path):
    source = open_variants(bgzip(tmp_path / "in.vcf.gz", HEADER + COLUMNS + ROWS))
    out = tmp_path / "out.vcf.gz"
    write(source, out, RESULTS)
    lines = gzip.decompress(out.read_bytes()).decode().splitlines()
    assert lines[:4] == HEADER.splitlines()
    assert lines[6] == COLUMNS.rstrip()
    assert lines[7] == "chrI\t5\trs1\tA\tC,G\t30\tPASS\tDP=3;GENOMOE=0.5,.;GENOMOE_STATUS=ok,ref_mismatch\tGT\t0/1\t1/2"
    assert lines[8] == "chrI\t9\t.\tAC\tA\t.\t.\tGENOMOE=-1.25;GENOMOE_STATUS=ok\tGT\t0/0\t./."
    with pysam.VariantFile(str(out)) as file:
        records = list(file.fetch("chrI", 0, 6))
        assert records[0].info["GENOMOE"] == (0.5, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.vcf.gz", "out.vcf.gz", "out.vcf.gz.tbi"]
    if shutil.which("bcftools"):
        done = subprocess.run(
            ["bcftools", "view", "-H", str(out), "chrI:9"], capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith("chrI\t9")
        assert done.stderr == ""


def test_unsorted_vcf_keeps_its_order_and_has_no_index(tmp_path):
    path, out = tmp_path / "in.vcf", tmp_path / "out.vcf.gz"
    path.write_text(HEADER + COLUMNS + "".join(reversed(ROWS.splitlines(keepends=True))))
    with pytest.warns(UserWarning, match="not sorted"):
        write(open_variants(path), out, RESULTS[::-1])
    lines = [line for line in gzip.decompress(out.read_bytes()).decode().splitlines() if line[0] != "#"]
    assert [line.split("\t")[1] for line in lines] == ["9", "5"]
    assert not (tmp_path / "out.vcf.gz.tbi").exists()


@pytest.mark.parametrize("out_kind", ["tsv", "parquet"])
@pytest.mark.parametrize("in_kind", ["vcf", "tsv", "parquet"])
def test_tables_out_have_a_row_for_each_alt(tmp_path, in_kind, out_kind):
    path, out = tmp_path / f"in.{in_kind}", tmp_path / f"out.{out_kind}"
    frame = pd.DataFrame({"note": [1, 2], "chrom": "chrI", "pos": [5, 9], "ref": ["A", "AC"], "alt": ["C,G", "A"]})
    if in_kind == "vcf":
        path.write_text(HEADER + COLUMNS + ROWS)
    elif in_kind == "tsv":
        frame.to_csv(path, sep="\t", index=False)
    else:
        frame.to_parquet(path)
    write(open_variants(path), out, RESULTS)
    table = pd.read_parquet(out) if out_kind == "parquet" else pd.read_csv(out, sep="\t")
    assert table["alt"].tolist() == ["C", "G", "A"]
    assert table["genomoe_status"].tolist() == ["ok", "ref_mismatch", "ok"]
    assert table["genomoe"].isna().tolist() == [False, True, False]
    if in_kind != "vcf":
        assert list(table.columns[:5]) == list(frame.columns)
        assert table["note"].astype(int).tolist() == [1, 1, 2]
    else:
        assert table["row"].astype(int).tolist() == [6, 6, 7]
        assert table["position"].astype(int).tolist() == [5, 5, 9]


def test_table_in_vcf_out(tmp_path):
    path, out = tmp_path / "in.tsv", tmp_path / "out.vcf.gz"
    path.write_text("ref\talt\tpos\tchrom\nA\tC,G\t5\tchrI\nAC\tA\t9\tchrI\n")
    write(open_variants(path), out, RESULTS)
    with pysam.VariantFile(str(out)) as file:
        assert [(r.pos, r.ref, r.alts) for r in file] == [(5, "A", ("C", "G")), (9, "AC", ("A",))]


def test_output_mistakes(tmp_path):
    path = tmp_path / "in.vcf"
    path.write_text(HEADER + COLUMNS + ROWS)
    source = open_variants(path)
    with pytest.raises(ValueError, match="already declares INFO DP"):
        open_output(tmp_path / "o.vcf.gz", source, key="DP", description="")
    with pytest.raises(ValueError, match=r"must end in \.vcf\.gz"):
        open_output(tmp_path / "o.txt", source, key="S", description="")
    with pytest.raises(ValueError, match="does not exist"):
        open_output(tmp_path / "no" / "o.tsv", source, key="S", description="")


def test_a_failure_leaves_the_previous_output(tmp_path):
    path, out = tmp_path / "in.vcf", tmp_path / "out.tsv"
    path.write_text(HEADER + COLUMNS + ROWS)
    out.write_text("before")

    def fail_half_way():
        with open_output(out, open_variants(path), key="S", description="") as writer:
            writer.write(next(open_variants(path).rows()), RESULTS[0])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_half_way()
    assert out.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.vcf", "out.tsv"]
