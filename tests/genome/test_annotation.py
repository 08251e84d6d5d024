"""Features and consequence classes on a toy contig whose answers are worked out by hand."""

from __future__ import annotations

import gzip

import pytest

from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.annotation import Consequence, read_annotation
from genomoe.genome.coordinates import Interval, Variant

# plus-strand CDS at 10..25: ATG AAA TGG TGC TAA; minus-strand CDS in two exons, 40..46 and 50..56,
# which spells (reverse complement, right to left) ATG CAT | GGT TAA; a tRNA at 60..70
PLUS = "ATGAAATGGTGCTAA"
MINUS = "ATGCATGGTTAA"
RC = reverse_complement(MINUS.encode()).decode()
CONTIG = "C" * 10 + PLUS + "C" * 15 + RC[:6] + "GTAC" + RC[6:] + "CCCC" + "A" * 10 + "C" * 5


class InMemory:
    def __init__(self):
        self.contigs = {"ctg": len(CONTIG)}

    def fetch(self, interval: Interval, pad: bool = False) -> bytes:
        return CONTIG[interval.start : interval.end].encode()


GFF = "\n".join(
    [
        "##gff-version 3",
        "ctg\tx\tgene\t11\t25\t.\t+\t.\tID=g1;gene=plus",
        "ctg\tx\tCDS\t11\t25\t.\t+\t0\tID=c1;gene=plus",
        "ctg\tx\tCDS\t41\t46\t.\t-\t0\tID=c2;gene=minus",
        "ctg\tx\tCDS\t51\t56\t.\t-\t0\tID=c2;gene=minus",
        "ctg\tx\ttRNA\t61\t70\t.\t+\t.\tID=t1;gene=trnA",
    ]
)


@pytest.fixture
def annotation(tmp_path):
    path = tmp_path / "a.gff3.gz"
    path.write_bytes(gzip.compress(GFF.encode()))
    return read_annotation(path)


@pytest.mark.parametrize(
    ("position", "ref", "alt", "consequence", "amino_acid"),
    [
        (11, "T", "C", Consequence.START_LOST, "M1T"),
        (10, "A", "C", Consequence.MISSENSE, "M1L"),  # CTG is a start codon of table 1
        (13, "A", "G", Consequence.MISSENSE, "K2E"),
        (15, "A", "G", Consequence.SYNONYMOUS, "K2K"),
        (18, "G", "A", Consequence.STOP_GAINED, "W3*"),
        (24, "A", "C", Consequence.STOP_LOST, "*5Y"),
        (17, "G", "GA", Consequence.FRAMESHIFT, ""),
        (13, "AAAT", "A", Consequence.INFRAME_INDEL, ""),
        (54, "A", "C", Consequence.START_LOST, "M1R"),
        (52, "G", "A", Consequence.MISSENSE, "H2Y"),
        (50, "A", "G", Consequence.SYNONYMOUS, "H2H"),
        (46, "G", "A", Consequence.SPLICE, ""),
        (45, "C", "A", Consequence.MISSENSE, "G3C"),
        (65, "A", "C", Consequence.TRNA, ""),
        (30, "C", "A", Consequence.INTERGENIC, ""),
    ],
)
def test_consequence(annotation, position, ref, alt, consequence, amino_acid):
    assert CONTIG[position : position + len(ref)] == ref
    effect = annotation.effect(Variant("ctg", position, ref, alt), InMemory())
    assert (effect.consequence, effect.amino_acid) == (consequence, amino_acid)


def test_joined_exons_spell_the_minus_strand_gene(annotation):
    (feature,) = annotation.overlapping("ctg", 40, 41)
    assert feature.sequence(InMemory()).decode() == MINUS
    assert feature.strand == "-"
    assert [feature.offset(p) for p in (55, 50, 49, 45, 40)] == [0, 5, None, 6, 11]


def test_genbank_says_the_same_as_gff(tmp_path, annotation):
    from Bio.Seq import Seq
    from Bio.SeqFeature import CompoundLocation, SeqFeature, SimpleLocation
    from Bio.SeqIO import write
    from Bio.SeqRecord import SeqRecord

    record = SeqRecord(Seq(CONTIG.lower()), id="ctg", name="ctg", annotations={"molecule_type": "DNA"})
    exons = CompoundLocation([SimpleLocation(50, 56, -1), SimpleLocation(40, 46, -1)])
    record.features = [
        SeqFeature(SimpleLocation(10, 25, 1), type="CDS", qualifiers={"gene": ["plus"]}),
        SeqFeature(exons, type="CDS", qualifiers={"gene": ["minus"]}),
        SeqFeature(SimpleLocation(60, 70, 1), type="tRNA", qualifiers={"gene": ["trnA"]}),
    ]
    path = tmp_path / "a.gbk"
    write([record], path, "genbank")
    other = read_annotation(path)
    assert [(f.name, f.parts, f.strand) for f in other.features["ctg"]] == [
        (f.name, f.parts, f.strand) for f in annotation.features["ctg"]
    ]


def test_bed_regions_and_errors(tmp_path):
    bed = tmp_path / "a.bed"
    bed.write_text("track name=x\nctg\t5\t9\ttRNA\t0\t-\n")
    effect = read_annotation(bed).effect(Variant("ctg", 5, "C", "A"), InMemory())
    assert (effect.consequence, effect.strand) == (Consequence.TRNA, "-")
    bed.write_text("ctg\t5\n")
    with pytest.raises(ValueError, match=r"a\.bed, line 1: not a BED row"):
        read_annotation(bed)
    gff = tmp_path / "a.gff3"
    gff.write_text("ctg\tx\tCDS\t11\n")
    with pytest.raises(ValueError, match="line 1: 4 columns"):
        read_annotation(gff)
    with pytest.raises(ValueError, match="no annotation file"):
        read_annotation(tmp_path / "none.gff3")


def test_a_long_feature_before_many_short_ones_is_found(tmp_path):
    rows = ["ctg\t0\t90\tlong"] + [f"ctg\t{i}\t{i + 1}\tshort" for i in range(1, 60)]
    path = tmp_path / "many.bed"
    path.write_text("\n".join(rows))
    assert [f.name for f in read_annotation(path).overlapping("ctg", 80, 81)] == ["long"]
