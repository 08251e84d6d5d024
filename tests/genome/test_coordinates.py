"""Interval and Variant: conventions, text both ways, errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError

names = st.text("abcXYZ019_.|*-", min_size=1, max_size=8)


def test_written_intervals_are_one_based_and_inclusive():
    assert Interval.parse("chrI:1,001-1,200") == Interval("chrI", 1000, 1200)
    assert Interval.parse("chrI:1001-1200:-") == Interval("chrI", 1000, 1200, "-")
    assert Interval.parse("chrI:1001-1200(-)").strand == "-"
    assert Interval.parse("HLA-A*01:01:5-6") == Interval("HLA-A*01:01", 4, 6)
    assert len(Interval.parse("chrI:5-5")) == 1
    assert str(Interval("chrI", 1000, 1200)) == "chrI:1001-1200"


@pytest.mark.parametrize("text", ["chrI", "chrI:0-5", "chrI:9-5", "chrI:a-b", "", ":1-2", "chrI:-5-9"])
def test_broken_intervals_are_refused(text):
    with pytest.raises(GenoMoEError):
        Interval.parse(text)


@given(names, st.integers(0, 10**10), st.integers(1, 10**6), st.sampled_from("+-"))
def test_interval_text_round_trip(contig, start, length, strand):
    interval = Interval(contig, start, start + length, strand)
    assert Interval.parse(str(interval)) == interval


@given(
    names, st.integers(0, 10**10), st.text("ACGTN", min_size=1, max_size=5), st.text("ACGTN", min_size=1, max_size=5)
)
def test_variant_text_round_trip(contig, position, ref, alt):
    variant = Variant(contig, position, ref, alt)
    assert Variant.parse(str(variant)) == variant


def test_variants():
    assert Variant.parse("chrI:1000:a>g") == Variant("chrI", 999, "A", "G")
    assert Variant.parse("chrI:1000:A:G") == Variant("chrI", 999, "A", "G")
    assert Variant("c", 3, "AC", "A").end == 5
    assert Variant("c", 3, "A", "<DEL>").alt == "<DEL>"
    for text in ("chrI:0:A>G", "chrI:5", "chrI:5:>G", "chrI:5:A>", "5:A>G"):
        with pytest.raises(GenoMoEError):
            Variant.parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("", 0, 1), "empty"),
        (("c", 5, 4), "before it starts"),
        (("c", 0, 1, "x"), "strand"),
        (("c", 0.5, 1), "integer"),
        (("c", True, 1), "integer"),
    ],
)
def test_an_interval_checks_itself(arguments, words):
    with pytest.raises(GenoMoEError, match=words):
        Interval(*arguments)


def test_a_variant_checks_itself():
    with pytest.raises(GenoMoEError, match="before the first base"):
        Variant("c", -1, "A", "G")
    with pytest.raises(GenoMoEError, match="empty REF"):
        Variant("c", 1, "", "G")


def test_resized_keeps_the_centre():
    assert Interval("c", 10, 20).resized(4) == Interval("c", 13, 17)
    assert Interval("c", 10, 11).resized(4) == Interval("c", 8, 12)
    assert Interval("c", 10, 20).overlaps(Interval("c", 19, 30, "-"))
    assert not Interval("c", 10, 20).overlaps(Interval("c", 20, 30))
