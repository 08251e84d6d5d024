"""`genomoe corpus`: exit codes, file:line verdicts, tables, JSON, reports."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from genomoe.cli import main


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    output = capsys.readouterr()
    return int(ended.value.code or 0), output.out, output.err


def test_validate_names_file_and_line_and_exits_1(tmp_path, capsys):
    bad = tmp_path / "bad file.fa"
    bad.write_bytes(b">a\nACGT\nAC-GT\nMKLV\n>a\nACGT\n")
    code, out, err = run(capsys, "corpus", "validate", bad)
    assert code == 1
    assert f"{bad}:3: error: '-' at column 3" in out
    assert f"{bad}:4: error: 'L' at column 3" in out
    assert f"{bad}:5: error: the name 'a' was used in line 1" in out
    assert "3 errors in 1 of 1 file" in err
    code, out, _ = run(capsys, "corpus", "validate", bad, "--json")
    assert code == 1
    assert [verdict["line"] for verdict in json.loads(out)["files"][0]["verdicts"]] == [3, 4, 5]


def test_validate_passes_good_files_and_says_what_is_unusual(tmp_path, capsys):
    good = tmp_path / "good.fa"
    good.write_bytes(b"; comment\n> a\nacgu\n>b\n")
    code, out, _ = run(capsys, "corpus", "validate", good)
    assert code == 0
    for line, words in ((1, "comment"), (2, "a space"), (3, "RNA"), (4, "no sequence")):
        assert f"{good}:{line}: warn: " in out
        assert words in out
    assert "can't be soft-masking" in out
    assert f"{good}: ok, 4 bases in 2 records" in out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.fa.gz", gzip.compress(b">a\n" + b"ACGT" * 5000)[:-20], "truncated"),
        ("x.fa", b"", "empty"),
        ("x.gb", b"LOCUS nothing\n", "GenBank"),
        ("x.fa", b"ACGT\n", "'>'"),
    ],
    ids=["truncated", "empty", "genbank", "no-mark"],
)
def test_unreadable_files_are_verdicts_not_tracebacks(tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    code, out, _ = run(capsys, "corpus", "validate", tmp_path / name)
    assert code == 1
    assert str(tmp_path / name) in out
    assert "error" in out
    assert words in out


def test_a_missing_file_is_one_sentence(tmp_path, capsys):
    code, out, err = run(capsys, "corpus", "validate", tmp_path / "no.fa")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert "does not exist" in err


def test_stale_index_and_many_faults(tmp_path, capsys):
    path = tmp_path / "x.fa"
    path.write_bytes(b">a\nACGT\n")
    (tmp_path / "x.fa.fai").write_text("a\t40\t3\t4\t5\n")
    code, out, _ = run(capsys, "corpus", "validate", path)
    assert code == 0
    assert "samtools faidx" in out
    path.write_bytes(b">a\n" + b"AC-T\n" * 300)
    code, out, _ = run(capsys, "corpus", "validate", path)
    assert code == 1
    assert out.count("error") == 100
    assert "and 200 more verdicts" in out


def test_build_describe_validate_and_leakage(tmp_path, capsys):
    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"ACGT"), 5000).astype(np.uint8).tobytes().decode()
    (tmp_path / "a.fa").write_text(f">a\n{letters}\n>b\n{letters[:1000].lower()}NNNNN\n")
    (tmp_path / "c.fa").write_text(f">c\n{letters[:3000]}\n>d\n{letters[:3000]}\n")
    store = tmp_path / "s.zarr"
    code, out, err = run(capsys, "corpus", "build", tmp_path / "a.fa", tmp_path / "c.fa", "-o", store)
    assert (code, err) == (0, "")
    assert "12,005 bases of 4 contigs from 2 sources" in out
    code, out, err = run(capsys, "corpus", "build", tmp_path / "a.fa", "-o", store)
    assert code == 1
    assert "--overwrite" in err
    assert run(capsys, "corpus", "validate", store)[0] == 0

    code, out, _ = run(capsys, "corpus", "describe", store, "--report", tmp_path / "r.html")
    assert code == 0
    assert "c.fa/d has the same letters as c.fa/c" in out
    page = (tmp_path / "r.html").read_text()
    assert "<svg" in page
    assert "c.fa/c" in page
    described = [
        json.loads(run(capsys, "corpus", "describe", *what, "--json")[1])
        for what in ((store,), (tmp_path / "a.fa", tmp_path / "c.fa"))
    ]
    assert described[0]["sources"] == described[1]["sources"]
    assert described[0]["duplicates"] == described[1]["duplicates"]
    first = described[0]["sources"][0]
    assert (first["contigs"], first["bases"], first["longest"]) == (2, 6005, 5000)
    assert first["soft_masked"] == pytest.approx(1000 / 6005)
    assert first["n"] == pytest.approx(5 / 6005)
    assert described[0]["store"]["format"] == 1
    assert len(described[0]["files"][0]["sha256"]) == 64

    code, out, _ = run(capsys, "corpus", "leakage", tmp_path / "a.fa", "--held-out", tmp_path / "c.fa")
    assert code == 1
    assert "6 of 6 held-out windows" in out
    code, _, err = run(capsys, "corpus", "describe", store, "--report", tmp_path / "r.pdf")
    assert (code, "html" in err) == (1, True)


def test_a_protein_is_refused_by_build_in_one_sentence(tmp_path):
    (tmp_path / "p.faa.fa").write_text(">p\nMKVLAAGIVGLLLAQ\n")
    command = [sys.executable, "-m", "genomoe", "corpus", "build", str(tmp_path), "--out", str(tmp_path / "s.zarr")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "protein" in result.stderr
    assert "p.faa.fa:2" in result.stderr
