"""Normalisation and haplotypes beside bcftools, contig names, allele verdicts, window rules."""

from __future__ import annotations

import shutil

import pytest

from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.variants import (
    BlockWindow,
    CentredWindow,
    ContigNames,
    Status,
    UnknownContigError,
    check_alleles,
    haplotypes,
    make_window,
    normalise,
)
from tests.genome.oracles import FOLDER, run_consensus, run_norm

needs_bcftools = pytest.mark.skipif(shutil.which("bcftools") is None, reason="bcftools is not installed")


class InMemory:
    """A one-contig reference held as a string."""

    def __init__(self, sequence: str, contig: str = "ctg"):
        self.sequence, self.contigs = sequence, {contig: len(sequence)}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        assert 0 <= interval.start <= interval.end <= len(self.sequence)
        return self.sequence[interval.start : interval.end].encode()


REFERENCE = InMemory("".join((FOLDER / "ref.fa").read_text().split("\n")[1:]))


def read_table(text: str) -> dict[str, list[str]]:
    rows = [line.split("\t") for line in text.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def input_variants() -> dict[str, Variant]:
    rows = [line.split("\t") for line in (FOLDER / "input.vcf").read_text().splitlines() if line[0] != "#"]
    return {row[2]: Variant(row[0], int(row[1]) - 1, row[3], row[4]) for row in rows}


@needs_bcftools
@pytest.mark.parametrize(("run", "name"), [(run_norm, "bcftools_norm.tsv"), (run_consensus, "bcftools_consensus.tsv")])
def test_committed_oracle_is_what_bcftools_says(run, name):
    assert run() == (FOLDER / name).read_text()


@pytest.mark.parametrize("step", [1, 3, 128])
def test_normalise_equals_bcftools_norm(step):
    expected = read_table((FOLDER / "bcftools_norm.tsv").read_text())
    variants = input_variants()
    assert len(variants) == len(expected) > 300
    for name, variant in variants.items():
        got = normalise(variant, REFERENCE, step=step)
        assert [str(got.position + 1), got.ref, got.alt] == expected[name], f"{name}: {variant}"


def test_haplotype_windows_equal_bcftools_consensus():
    consensus = read_table((FOLDER / "bcftools_consensus.tsv").read_text())
    variants, length = input_variants(), REFERENCE.contigs["ctg"]
    for name, (whole,) in consensus.items():
        variant = normalise(variants[name], REFERENCE)
        for rule in (CentredWindow(length=40), CentredWindow(length=41), BlockWindow(length=64)):
            window = rule.interval(variant, length)
            plus = haplotypes(variant, window, REFERENCE, strand="+")
            minus = haplotypes(variant, window, REFERENCE, strand="-")
            assert plus.alt.decode() == whole[window.start :][: len(plus.alt)]
            until = len(whole) - (length - window.end)
            assert reverse_complement(minus.alt).decode() == whole[:until][-len(minus.alt) :]
            assert plus.ref == REFERENCE.fetch(window)[: len(plus.ref)]
            for pair in (plus, minus):
                assert len(pair.ref) == len(pair.alt)
                assert pair.ref[: pair.first] == pair.alt[: pair.first]


def test_two_spellings_of_one_indel_become_one():
    reference = InMemory("GGGCACACACTTT")
    spellings = [("CAC", "C", 3), ("ACA", "A", 6), ("CACA", "CA", 5), ("GCA", "G", 2)]
    assert {normalise(Variant("ctg", p, ref, alt), reference) for ref, alt, p in spellings} == {
        Variant("ctg", 2, "GCA", "G")
    }


@pytest.mark.parametrize(("length", "centre"), [(8, 4), (9, 4), (2, 1)])
def test_window_centre_and_its_reverse_complement(length, centre):
    reference = InMemory("ACGTTGCAAGCTTACGATCGA")
    variant = Variant("ctg", 10, "C", "T")
    window = CentredWindow(length=length).interval(variant, 21)
    plus, minus = (haplotypes(variant, window, reference, strand=strand) for strand in "+-")
    assert plus.first == centre
    assert minus.first == length - 1 - centre
    assert minus.alt == reverse_complement(plus.alt)
    assert minus.ref == reverse_complement(plus.ref)


def test_first_and_last_base_are_clipped_not_padded():
    reference = InMemory("ACGTACGTAC")
    first, last = Variant("ctg", 0, "A", "T"), Variant("ctg", 9, "C", "G")
    rule = CentredWindow(length=6)
    assert haplotypes(first, rule.interval(first, 10), reference).alt == b"TCG"
    assert haplotypes(last, rule.interval(last, 10), reference).alt == b"GTAG"
    deletion = Variant("ctg", 7, "TAC", "T")
    pair = haplotypes(deletion, rule.interval(deletion, 10), reference)
    assert (pair.ref, pair.alt) == (b"ACGT", b"ACGT")  # both cut to the shorter: nothing is left to compare


def test_block_window_depends_on_the_position_alone():
    rule = BlockWindow(length=100)
    windows = {rule.interval(Variant("ctg", p, "A", "C"), 1000) for p in range(500, 525)}
    assert windows == {Interval("ctg", 438, 538)}
    reverse = {rule.interval(Variant("ctg", p, "A", "C"), 1000, "-") for p in range(500, 525)}
    assert reverse == {Interval("ctg", 487, 587)}  # 62 bases before the block in reading direction, 13 after it
    assert rule.interval(Variant("ctg", 3, "A", "C"), 1000) == Interval("ctg", 0, 100)
    assert rule.interval(Variant("ctg", 999, "A", "C"), 1000) == Interval("ctg", 900, 1000)
    assert rule.interval(Variant("ctg", 7, "A", "C"), 50) == Interval("ctg", 0, 50)


def test_bad_window_arguments():
    with pytest.raises(ValueError, match="at least 2 bases"):
        make_window("centred", 0)
    with pytest.raises(ValueError, match="centred or block"):
        make_window("middle", 10)


def test_allele_longer_than_its_window_is_refused():
    variant = Variant("ctg", 20, REFERENCE.sequence[20:60], REFERENCE.sequence[20])
    with pytest.raises(ValueError, match="widen --window"):
        haplotypes(variant, CentredWindow(length=10).interval(variant, 700), REFERENCE)


@pytest.mark.parametrize(
    ("reference", "name", "found"),
    [
        (["chr1", "chrM"], "1", "chr1"),
        (["chr1", "chrM"], "MT", "chrM"),
        (["1", "MT"], "chr1", "1"),
        (["1", "MT"], "chrM", "MT"),
        (["1", "M"], "chrMT", "M"),
        (["1", "chr1"], "chr1", "chr1"),
        (["chrI"], "I", "chrI"),
        (["chr1"], "2", None),
    ],
)
def test_contig_names(reference, name, found):
    assert ContigNames(reference).find(name) == found


def test_contig_alias_and_unknown_contig():
    assert ContigNames(["NC_001133.9"], {"chrI": "NC_001133.9"}).resolve("chrI") == "NC_001133.9"
    with pytest.raises(UnknownContigError, match=r"'chr12'.*nearest are chr2, chr1"):
        ContigNames(["chr1", "chr2"]).resolve("chr12")
    with pytest.raises(UnknownContigError, match="lacks"):
        ContigNames(["chr1"], {"one": "chrOne"})


@pytest.mark.parametrize(
    ("ref", "alt", "status"),
    [
        ("A", "C", Status.OK),
        ("a", "c", Status.OK),
        ("A", "<DEL>", Status.ALT_SYMBOLIC),
        ("A", "*", Status.ALT_SYMBOLIC),
        ("A", "A[chr2:5[", Status.ALT_SYMBOLIC),
        ("A", ".A", Status.ALT_SYMBOLIC),
        ("A", ".", Status.ALT_MISSING),
        ("A", "", Status.ALT_MISSING),
        ("N", "C", Status.REF_NOT_ACGT),
        ("", "C", Status.REF_NOT_ACGT),
        ("A", "R", Status.ALT_NOT_ACGT),
        ("a", "A", Status.REF_EQUALS_ALT),
    ],
)
def test_allele_verdicts(ref, alt, status):
    assert check_alleles(ref, alt) == status
    assert status.has_score == (status == Status.OK)
