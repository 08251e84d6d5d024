"""Corpus descriptions: what a YAML file may say, and one sentence for what it may not."""

import numpy as np
import pytest
from small_corpora import write_fasta

from genomoe.data.description import describe_paths, read_description, read_regions
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.open import open_corpus
from genomoe.genome.errors import GenoMoEError, InputError


@pytest.fixture
def folder(tmp_path):
    write_fasta(tmp_path / "a.fa", {"x": b"ACGT" * 10, "y": b"acgtACGT"})
    (tmp_path / "sub").mkdir()
    write_fasta(tmp_path / "sub" / "b.fasta", {"z": b"ACGTN" * 10})
    (tmp_path / "notes.txt").write_text("no sequence")
    return tmp_path


def written(folder, text):
    path = folder / "d.yaml"
    path.write_text(text)
    return path


def test_paths_are_files_folders_and_globs(folder):
    assert [source.name for source in describe_paths(str(folder)).sources] == ["a.fa", "b.fasta"]
    assert [source.name for source in describe_paths([str(folder / "*.fa")]).sources] == ["a.fa"]
    assert [source.name for source in describe_paths([str(folder / "**" / "*.fasta")]).sources] == ["b.fasta"]
    named = describe_paths({"all": [str(folder / "a.fa"), str(folder / "sub")]}, {"all": 2})
    assert (len(named.sources[0].files), named.sources[0].weight) == (2, 2)
    corpus = open_corpus(str(folder))
    assert corpus.contigs.names == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        (["nowhere.fa"], "does not exist"),
        (["*.none"], "No file matches"),
        ([], "no source"),
        (["a.fa", "a.fa"], "listed twice"),
        (["empty"], "holds no sequence file"),
    ],
)
def test_paths_that_give_nothing(folder, monkeypatch, paths, words):
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    with pytest.raises(GenoMoEError, match=words):
        describe_paths(paths)


def test_two_files_with_one_contig(folder):
    write_fasta(folder / "c.fa", {"x": b"TTTT"})
    with pytest.raises(GenoMoEError, match=r"'x' .*a\.fa and .*c\.fa"):
        FastaCorpus({"one": [str(folder / "a.fa"), str(folder / "c.fa")]})
    both = FastaCorpus([str(folder / "a.fa"), str(folder / "c.fa")])  # in two sources they are two contigs
    assert both.contigs.names == ["x", "y", "x"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sources: [", "not valid YAML"),
        ("x: 1", "must hold a list called 'sources'"),
        ("format: 9\nsources: [{name: a, path: a.fa}]", "format 9"),
        ("sources: [{name: a, path: a.fa}]\nsplits: 1", "no setting is called 'splits'"),
        ("sources: [{name: a, pathh: a.fa}]", "did you mean 'path'"),
        ("sources: [{name: a}]", "lacks path"),
        ("sources: [3]", "must be a mapping"),
        ("sources: [{name: a, path: a.fa}, {name: a, path: a.fa}]", "Two sources are called 'a'"),
        ("sources: [{name: a, path: a.fa, weight: -1}]", "weight must be zero or more"),
        ("sources: [{name: a, path: a.fa, weight: x}]", "weight must be a number"),
        ("sources: [{name: a, path: a.fa, min_length: 0}]", "min_length"),
        ("sources: [{name: a, path: a.fa, max_n_fraction: 2}]", "max_n_fraction"),
        ("sources: [{name: a, path: a.fa, split: dev}]", "split must be one of"),
        ("sources: [{name: a, path: a.fa, soft_mask: maybe}]", "soft_mask must be"),
        ("sources: [{name: a, path: [a.fa, '*.fa']}]", "matches two of the paths"),
        ("sources: [{name: a, path: a.fa, keep: no.bed}]", "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(folder, text, words):
    with pytest.raises(GenoMoEError, match=words):
        read_description(written(folder, text))


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("include: ['q*']", "No contig of source 'a' passes"),
        ("min_length: 1000", "the longest of 40 bases"),
        ("max_n_fraction: 0.1, path: sub", "No contig"),
    ],
)
def test_filters_that_leave_nothing(folder, option, words):
    text = "sources: [{name: a, " + (option if "path" in option else f"path: a.fa, {option}") + "}]"
    with pytest.raises(GenoMoEError, match=words):
        FastaCorpus(read_description(written(folder, text)))


def test_soft_masking_can_be_forced(folder):
    for value, expected in (("true", 4), ("false", 0), ("auto", 4)):
        corpus = FastaCorpus(
            read_description(written(folder, f"sources: [{{name: a, path: a.fa, soft_mask: {value}}}]"))
        )
        assert int((corpus.read(0, 48) >= 97).sum()) == expected


def test_regions_are_merged_and_checked(tmp_path):
    bed = tmp_path / "r.bed"
    bed.write_text("track x\n#c\nx\t5\t9\tname\nx\t0\t5\nx\t20\t30\nx\t22\t25\ny 1 2\n\n")
    regions = read_regions(bed, {"x": 40, "y": 8})
    assert regions.starts["x"].tolist() == [0, 20]
    assert regions.ends["x"].tolist() == [9, 30]
    assert regions.starts["y"].tolist() == [1]
    for text, words in (
        ("x\t5\n", r":1: a BED line"),
        ("x\t5\t9\nq\t1\t2\n", r":2: no contig is called 'q'"),
        ("x\t5\t99\n", r":1: \[5, 99\) is no region"),
        ("x\t9\t5\n", r":1: \[9, 5\) is no region"),
    ):
        bed.write_text(text)
        with pytest.raises(InputError, match=words):
            read_regions(bed, {"x": 40, "y": 8})


def test_a_hundred_thousand_contigs(tmp_path):
    """One file with 100,000 short contigs opens, builds and streams."""
    from genomoe.data.build import build_corpus
    from genomoe.data.datamodule import GenomeDataModule

    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"ACGT"), 100_000 * 40).astype(np.uint8).tobytes()
    path = tmp_path / "many.fa"
    path.write_bytes(b"".join(b">c%d\n%b\n" % (n, letters[n * 40 : n * 40 + 20 + n % 21]) for n in range(100_000)))
    store = build_corpus(describe_paths([str(path)]), tmp_path / "s.zarr")
    assert len(store.contigs.names) == 100_000
    assert store.read(0, 20).tobytes() == letters[:20]
    data = GenomeDataModule([str(tmp_path / "s.zarr")], context_length=40, batch_size=512, pack=True)
    seen = 0
    for batch in data.train_dataloader():
        seen += int((batch.tokens != 0).sum())
    assert seen == int(store.contigs.lengths.sum())
