"""Labelled sequences and intervals: every format, the same letters, and errors with their row."""

import numpy as np
import pandas as pd
import pytest
from small_corpora import write_fasta

from genomoe.data.tables import read_labelled, read_table
from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.errors import GenoMoEError

GENOME = {"c1": b"ACGTACGTACGTTTGCAacgt", "c2": b"GGGCCCAAATTT"}
ROWS = pd.DataFrame(
    {
        "contig": ["c1", "c2", "c1"],
        "start": [0, 3, 15],
        "end": [4, 9, 21],
        "strand": ["+", "-", "+"],
        "label": [0.5, 1.5, 2.5],
    }
)
LETTERS = [b"ACGT", reverse_complement(b"CCCAAA"), b"CAacgt"]


@pytest.fixture
def genome(tmp_path):
    return write_fasta(tmp_path / "g.fa", GENOME)


def write(frame: pd.DataFrame, path):
    if path.name.endswith(".parquet"):
        frame.to_parquet(path)
    elif ".bed" in path.name:
        bed = frame.assign(name=frame["label"], score=0)[["contig", "start", "end", "name", "score", "strand"]]
        bed.to_csv(path, sep="\t", header=False, index=False)
    else:
        frame.to_csv(path, sep="," if ".csv" in path.name else "\t", index=False)
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.txt", "t.parquet", "t.bed", "t.csv.gz", "t.bed.gz"])
def test_every_format_gives_the_same_rows(name, genome, tmp_path):
    rows = read_labelled(write(ROWS, tmp_path / name), reference=genome)
    assert rows.letters == LETTERS
    assert rows.labels.astype(float).tolist() == [0.5, 1.5, 2.5]
    assert rows.labels.flags.writeable, "torch warns of read-only arrays"
    assert rows.take([2, 0]).letters == [LETTERS[2], LETTERS[0]]


def test_coordinates_columns_and_windows(genome, tmp_path):
    renamed = ROWS.assign(start=ROWS["start"] + 1).rename(columns={"contig": "chrom", "label": "y"})
    path = write(renamed, tmp_path / "t.tsv")
    rows = read_labelled(path, reference=genome, columns={"contig": "chrom", "label": "y"}, one_based=True)
    assert rows.letters == LETTERS
    wide = read_labelled(write(ROWS, tmp_path / "w.tsv"), reference=genome, window=10)
    assert wide.letters == [b"NNNACGTACG", reverse_complement(b"GGCCCAAATT"), b"TGCAacgtNN"]


def test_sequences_need_no_reference(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("sequence,label\n ACGTN ,x\nacg,y\n")
    rows = read_labelled(path)
    assert rows.letters == [b"ACGTN", b"acg"]
    assert rows.labels.tolist() == ["x", "y"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"contig": ["c1", "c9", "c1"]}, "row 2: .*nearest"),
        ({"end": [4, 9, 210]}, "row 3: .*beyond"),
        ({"end": [4, 2, 21]}, "row 2: .*before it starts"),
        ({"start": [0, 3.5, 15]}, "row 2: .*no interval"),
        ({"label": [0.5, np.nan, 1]}, "row 2: the label is empty"),
    ],
)
def test_bad_rows_are_named(change, words, genome, tmp_path):
    with pytest.raises(GenoMoEError, match=words):
        read_labelled(write(ROWS.assign(**change), tmp_path / "t.csv"), reference=genome)


def test_other_mistakes_are_sentences(genome, tmp_path):
    path = write(ROWS, tmp_path / "t.csv")
    with pytest.raises(GenoMoEError, match="name the reference"):
        read_labelled(path)
    with pytest.raises(GenoMoEError, match="no column 'y'"):
        read_labelled(path, reference=genome, columns={"label": "y"})
    with pytest.raises(GenoMoEError, match="role"):
        read_labelled(path, reference=genome, columns={"labels": "y"})
    with pytest.raises(GenoMoEError, match="must end in"):
        read_table(genome)
    (tmp_path / "p.csv").write_text("sequence,label\nACGT,1\nMKL,2\n")
    with pytest.raises(GenoMoEError, match="row 2: 'L'"):
        read_labelled(tmp_path / "p.csv")
