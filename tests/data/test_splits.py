"""Splits keep contigs whole and relatives together; the leakage check finds copies on both strands and nothing else."""

import numpy as np
import pytest
from small_corpora import write_fasta

from genomoe.data.corpus import restricted
from genomoe.data.datamodule import GenomeDataModule
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.sketch import canonical_kmers, containment, sketch
from genomoe.data.splits import SplitConfig, cluster_contigs, find_leaks, repeated_contigs, split_segments
from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.errors import GenoMoEError


def letters(seed: int, length: int = 8000) -> bytes:
    return np.random.default_rng(seed).choice(list(b"ACGT"), length).astype(np.uint8).tobytes()


def mutated(sequence: bytes, rate: float, seed: int = 9) -> bytes:
    rng = np.random.default_rng(seed)
    text = np.frombuffer(sequence, dtype=np.uint8).copy()
    places = np.flatnonzero(rng.random(len(text)) < rate)
    text[places] = rng.choice(list(b"ACGT"), len(places))
    return text.tobytes()


@pytest.fixture
def family(tmp_path):
    """a0 and b0 are strains of one sequence, b1 is a0's other strand with changes, a1 and c0 are unrelated."""
    a0 = letters(0)
    write_fasta(tmp_path / "a.fa", {"a0": a0, "a1": letters(1, 3000)})
    write_fasta(tmp_path / "b.fa", {"b0": mutated(a0, 0.02), "b1": reverse_complement(mutated(a0, 0.03, 5))})
    write_fasta(tmp_path / "c.fa", {"c0": letters(2, 3000)})
    return FastaCorpus({name: str(tmp_path / f"{name}.fa") for name in "abc"})


def naive_kmers(text: str, k: int) -> list[str | None]:
    complement = str.maketrans("ACGT", "TGCA")
    out: list[str | None] = []
    for start in range(len(text) - k + 1):
        kmer = text[start : start + k].upper()
        out.append(min(kmer, kmer.translate(complement)[::-1]) if set(kmer) <= set("ACGT") else None)
    return out


@pytest.mark.parametrize("k", [1, 2, 3, 7, 16, 21, 31])
def test_canonical_kmers_are_those_of_a_slow_count(k):
    text = letters(3, 120).decode()
    text = text[:50] + "nRa" + text[50:].lower()
    codes, valid = canonical_kmers(np.frombuffer(text.encode(), dtype=np.uint8), k)
    slow = naive_kmers(text, k)
    assert valid.tolist() == [kmer is not None for kmer in slow]
    value = {"A": 0, "C": 1, "G": 2, "T": 3}
    for code, kmer in zip(codes[valid].tolist(), [kmer for kmer in slow if kmer], strict=True):
        assert code == sum(value[letter] * 4 ** (k - 1 - place) for place, letter in enumerate(kmer))


def test_sketches_ignore_the_strand_and_estimate_identity():
    one = letters(4, 60_000)
    array = np.frombuffer(one, dtype=np.uint8)
    other = np.frombuffer(reverse_complement(one), dtype=np.uint8)
    assert set(sketch(array).hashes.tolist()) == set(sketch(other).hashes.tolist())
    near = np.frombuffer(mutated(one, 0.04), dtype=np.uint8)  # a quarter of the changes hit the same base: 3 %
    shared = containment(sketch(array).hashes, sketch(near).hashes)
    assert shared ** (1 / 21) == pytest.approx(0.97, abs=0.005)
    assert containment(sketch(array).hashes, sketch(np.frombuffer(letters(5, 60_000), dtype=np.uint8)).hashes) < 0.01
    assert containment(np.array([1]), np.array([], dtype=np.uint64)) == 0


def test_clusters_hold_relatives(family):
    clusters = dict(zip(family.contigs.names, cluster_contigs(family, 0.1).tolist(), strict=True))
    assert clusters["a0"] == clusters["b0"] == clusters["b1"]
    assert len({clusters["a0"], clusters["a1"], clusters["c0"]}) == 3


def names(family, segments):
    rows = np.searchsorted(family.contigs.offsets, segments.starts, side="right") - 1
    return {family.contigs.names[row] for row in rows}


@pytest.mark.parametrize(
    ("config", "valid", "test"),
    [
        ({"by": "source", "valid": ("c",)}, {"c0"}, set()),
        ({"by": "contig", "valid": ("a1",), "test": ("b/b*",)}, {"a1"}, {"b0", "b1"}),
        ({"by": "description"}, set(), set()),
    ],
)
def test_named_splits(family, config, valid, test):
    split = split_segments(family, SplitConfig(**config))
    assert names(family, split["valid"]) == valid
    assert names(family, split["test"]) == test
    assert names(family, split["train"]) == set(family.contigs.names) - valid - test
    assert sum(part.bases for part in split.values()) == family.segments.bases


def test_splitting_by_cluster_holds_out_no_relative(family):
    for seed in range(6):
        split = split_segments(family, SplitConfig(by="cluster", valid_fraction=0.12, test_fraction=0.12, seed=seed))
        held = names(family, split["valid"]) | names(family, split["test"])
        assert held == {"a1", "c0"}  # the family of 24 kb fits into neither
        train, valid = restricted(family, split["train"]), restricted(family, split["valid"])
        assert not len(find_leaks(train, valid, window=500))
    with pytest.raises(GenoMoEError, match="no cluster is small enough"):
        split_segments(family, SplitConfig(by="cluster", valid_fraction=0.01))


def test_leaks_are_found_on_both_strands_with_their_places(family, tmp_path):
    a0 = letters(0)
    held = letters(7, 2000) + mutated(a0[1000:3000], 0.01) + letters(8, 2000) + reverse_complement(a0[5000:7000])
    write_fasta(tmp_path / "h.fa", {"h": held + letters(9, 2000)})
    leaks = find_leaks(family, FastaCorpus([str(tmp_path / "h.fa")]), window=1000, threshold=0.5)
    assert leaks[["contig", "start", "end"]].to_numpy().tolist() == [
        ["h", 2000, 3000], ["h", 3000, 4000], ["h", 6000, 7000], ["h", 7000, 8000],
    ]  # fmt: skip
    assert (leaks["identity"] > 0.97).all()
    for place, row in zip((1000, 2000, 6000, 5000), leaks.to_dict("records"), strict=True):
        if row["train_contig"] == "a0":
            assert abs(row["train_position"] - place) < 1000
    strict = find_leaks(family, FastaCorpus([str(tmp_path / "h.fa")]), window=1000, threshold=0.95)
    assert set(strict["start"]) == {6000, 7000}
    with pytest.raises(GenoMoEError, match="too short"):
        find_leaks(family, family, window=50)


def test_a_contig_that_is_trained_on_and_held_out_is_found(family, tmp_path):
    write_fasta(tmp_path / "h.fa", {"copy": letters(2, 3000).lower(), "as_long": letters(7, 3000)}, width=80)
    held_out = FastaCorpus([str(tmp_path / "h.fa")])
    assert repeated_contigs(family, held_out) == [("h.fa/copy", "c/c0")]
    split = split_segments(family, SplitConfig(by="contig", valid=("a0",)))
    assert repeated_contigs(restricted(family, split["train"]), restricted(family, split["valid"])) == []


def test_the_data_module_trains_on_one_part_and_validates_on_the_other(family, tmp_path):
    (tmp_path / "d.yaml").write_text(
        "sources:\n- {name: a, path: a.fa}\n- {name: b, path: b.fa}\n- {name: c, path: c.fa, split: valid}\n"
    )
    data = GenomeDataModule(corpus=str(tmp_path / "d.yaml"), context_length=100, batch_size=4)
    assert {tag for batch in data.train_dataloader() for tag in batch.tags} <= {"a", "b", ""}
    assert {tag for batch in data.val_dataloader() for tag in batch.tags} == {"c"}
    assert data.test_dataloader() == []
    assert len(data.leaks()) == 0
    leaky = GenomeDataModule(
        corpus=str(tmp_path / "d.yaml"), split={"by": "contig", "valid": ["b0"]}, context_length=100, batch_size=4
    )
    assert len(leaky.leaks()) == 8


@pytest.mark.parametrize(
    "config",
    [
        {"by": "species"},
        {"valid_fraction": 1.0},
        {"similarity": 0},
    ],
)
def test_bad_split_settings(config):
    with pytest.raises(GenoMoEError):
        SplitConfig(**config)


def test_split_mistakes_are_named(family):
    with pytest.raises(GenoMoEError, match="no source matches 'x'; there are a, b, c"):
        split_segments(family, SplitConfig(by="source", valid=("x",)))
    with pytest.raises(GenoMoEError, match="held out already"):
        split_segments(family, SplitConfig(by="source", valid=("a",), test=("a",)))
    with pytest.raises(GenoMoEError, match="no contig to train on"):
        split_segments(family, SplitConfig(by="source", valid=("*",)))
