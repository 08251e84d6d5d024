"""Features from GenBank, GFF3, GTF and BED, codons on both strands, and the consequence class of a variant.

Classes are the usual Sequence Ontology terms, one per variant, the most severe first; distances and 0-based
half-open coordinates as everywhere. GenBank is parsed by Biopython; the translation tables are Biopython's
(NCBI's numbers).
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import IO, Literal
from urllib.parse import unquote

from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.variants import SequenceSource

__all__ = ["Annotation", "AnnotationError", "Consequence", "Effect", "Feature", "read_annotation"]

Strand = Literal["+", "-"]


class AnnotationError(GenoMoEError):
    """An annotation file that cannot be read; the message holds the file and the line."""


class Consequence(StrEnum):
    """Sequence Ontology terms, most severe first."""

    STOP_GAINED = "stop_gained"
    FRAMESHIFT = "frameshift_variant"
    STOP_LOST = "stop_lost"
    START_LOST = "start_lost"
    INFRAME_INDEL = "inframe_indel"
    SPLICE = "splice_site_variant"
    MISSENSE = "missense_variant"
    SYNONYMOUS = "synonymous_variant"
    TRNA = "tRNA_variant"
    RRNA = "rRNA_variant"
    NCRNA = "non_coding_transcript_variant"
    INTRON = "intron_variant"
    INTERGENIC = "intergenic_variant"

    @property
    def rank(self) -> int:
        return list(Consequence).index(self)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A gene product: its parts in reading direction, so that joined exons spell it."""

    kind: str
    """CDS, tRNA, rRNA, or another feature type of the file."""
    name: str
    strand: Strand
    parts: tuple[Interval, ...]
    phase: int = 0
    """Bases of the first part to skip before the first whole codon."""
    table: int | None = None
    """NCBI translation table where the file says it."""
    complete_start: bool = True

    @property
    def start(self) -> int:
        return min(part.start for part in self.parts)

    @property
    def end(self) -> int:
        return max(part.end for part in self.parts)

    def offset(self, position: int) -> int | None:
        """How many bases of the feature come before the genome position, in reading direction; None if
        outside.
        """
        before = 0
        for part in self.parts:
            if part.start <= position < part.end:
                return before + (position - part.start if self.strand == "+" else part.end - 1 - position)
            before += len(part)
        return None

    def sequence(self, reference: SequenceSource) -> bytes:
        """The joined parts in reading direction, upper case."""
        pieces = (reference.fetch(Interval(part.contig, part.start, part.end)).upper() for part in self.parts)
        return b"".join(piece if self.strand == "+" else reverse_complement(piece) for piece in pieces)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What a variant does to its most affected feature."""

    consequence: Consequence
    gene: str = ""
    codon: str = ""
    """Codon change such as `aTg>aCg`'s `ATG>ACG`; empty outside a CDS."""
    amino_acid: str = ""
    """Change such as `M1T`, 1-based; empty outside a CDS."""
    strand: str = "."


@dataclass(frozen=True, kw_only=True)
class Annotation:
    """Features by contig, sorted by start, searched by overlap."""

    features: Mapping[str, tuple[Feature, ...]]
    table: int = 1
    """NCBI translation table used where a feature does not name its own (2: vertebrate mitochondrion, 11:
    bacteria).
    """
    _starts: dict[str, list[int]] = field(default_factory=dict, repr=False)
    _longest: dict[str, int] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for contig, features in self.features.items():
            self._starts[contig] = [feature.start for feature in features]
            self._longest[contig] = max((feature.end - feature.start for feature in features), default=0)

    def overlapping(self, contig: str, start: int, end: int) -> Iterator[Feature]:
        """The features that share a base with [start, end)."""
        features = self.features.get(contig, ())
        if not features:
            return
        index = bisect.bisect_left(self._starts[contig], start - self._longest[contig])
        while index < len(features) and features[index].start < end:
            if features[index].end > start:
                yield features[index]
            index += 1

    def effect(self, variant: Variant, reference: SequenceSource) -> Effect:
        """The most severe effect over all features the variant touches; ties go to the first feature."""
        begin, end = variant.position, variant.position + len(variant.ref)
        effects = [
            self._effect_on(feature, variant, reference) for feature in self.overlapping(variant.contig, begin, end)
        ]
        return min(
            effects,
            key=lambda effect: effect.consequence.rank,
            default=Effect(consequence=Consequence.INTERGENIC),
        )

    def _effect_on(self, feature: Feature, variant: Variant, reference: SequenceSource) -> Effect:
        def effect(consequence: Consequence, codon: str = "", amino_acid: str = "") -> Effect:
            return Effect(
                consequence=consequence,
                gene=feature.name,
                strand=feature.strand,
                codon=codon,
                amino_acid=amino_acid,
            )

        kinds = {"trna": Consequence.TRNA, "rrna": Consequence.RRNA}
        if feature.kind.lower() in kinds:
            return effect(kinds[feature.kind.lower()])
        if feature.kind != "CDS":
            return effect(Consequence.NCRNA)
        positions = range(variant.position, variant.position + len(variant.ref))
        inside = [position for position in positions if feature.offset(position) is not None]
        if not inside:
            return effect(Consequence.SPLICE if self._at_splice_site(feature, positions) else Consequence.INTRON)
        if len(variant.ref) != len(variant.alt):
            changed = abs(len(variant.ref) - len(variant.alt))
            return effect(Consequence.INFRAME_INDEL if changed % 3 == 0 else Consequence.FRAMESHIFT)
        return self._substitution(feature, variant, reference, effect)

    def _substitution(self, feature: Feature, variant: Variant, reference: SequenceSource, effect) -> Effect:
        coding = bytearray(feature.sequence(reference))
        changed = bytearray(coding)
        for index, base in enumerate(variant.alt.upper().encode()):
            offset = feature.offset(variant.position + index)
            if offset is not None:
                letter = bytes([base])
                changed[offset] = (letter if feature.strand == "+" else reverse_complement(letter))[0]
        first = next((i for i, (a, b) in enumerate(zip(coding, changed, strict=True)) if a != b), None)
        if first is None or first < feature.phase:
            return effect(Consequence.SYNONYMOUS)
        codon_index = (first - feature.phase) // 3
        at = feature.phase + 3 * codon_index
        before, after = bytes(coding[at : at + 3]).decode(), bytes(changed[at : at + 3]).decode()
        if len(before) < 3:
            return effect(Consequence.MISSENSE)
        table = feature.table or self.table
        old, new = _amino_acid(before, table), _amino_acid(after, table)
        codon, change = f"{before}>{after}", f"{old}{codon_index + 1}{new}"
        if codon_index == 0 and feature.complete_start and not _is_start(after, table):
            return effect(Consequence.START_LOST, codon, change)
        if old == new:
            return effect(Consequence.SYNONYMOUS, codon, change)
        if new == "*":
            return effect(Consequence.STOP_GAINED, codon, change)
        if old == "*":
            return effect(Consequence.STOP_LOST, codon, change)
        return effect(Consequence.MISSENSE, codon, change)

    @staticmethod
    def _at_splice_site(feature: Feature, positions: range) -> bool:
        """Within two intronic bases of an inner exon edge."""
        ordered = sorted(feature.parts, key=lambda part: part.start)
        for left, right in itertools.pairwise(ordered):
            for position in positions:
                if left.end <= position < right.start and (position < left.end + 2 or position >= right.start - 2):
                    return True
        return False


def read_annotation(
    path: str | Path, *, table: int = 1, kinds: Iterable[str] = ("CDS", "tRNA", "rRNA", "ncRNA")
) -> Annotation:
    """Reads GenBank (.gb .gbk .gbff), GFF3/GTF (.gff .gff3 .gtf) or BED (.bed), plain, gzip, or a zip of
    GenBank files.

    Only features of `kinds` are kept (all of a BED's are, its name column being the kind). Raises
    AnnotationError with the line of the first bad row.
    """
    path = Path(path)
    if not path.is_file():
        raise AnnotationError(f"There is no annotation file {path}.")
    name = path.name.lower().removesuffix(".gz")
    wanted = {kind.lower() for kind in kinds}
    if name.endswith((".gb", ".gbk", ".gbff", ".genbank", ".zip")):
        features = _genbank(path, wanted)
    elif name.endswith((".gff", ".gff3", ".gtf")):
        features = _gff(path, wanted)
    elif name.endswith(".bed"):
        features = _bed(path)
    else:
        raise AnnotationError(f"{path}: the name must end in .gb, .gbk, .gbff, .gff3, .gtf or .bed (also with .gz).")
    by_contig: dict[str, list[Feature]] = defaultdict(list)
    for feature in features:
        by_contig[feature.parts[0].contig].append(feature)
    if not by_contig:
        raise AnnotationError(f"{path} holds no feature of kind {', '.join(sorted(wanted))}.")
    return Annotation(
        features={contig: tuple(sorted(found, key=lambda f: f.start)) for contig, found in by_contig.items()},
        table=table,
    )


def _genbank(path: Path, wanted: set[str]) -> Iterator[Feature]:
    from Bio import SeqIO

    for stream in _streams(path):
        with stream:
            for record in SeqIO.parse(stream, "genbank"):
                for found in record.features:
                    if found.type.lower() not in wanted or found.location is None:
                        continue
                    strand: Strand = "-" if found.location.strand == -1 else "+"
                    parts = [Interval(record.id, int(p.start), int(p.end)) for p in found.location.parts]
                    get = found.qualifiers.get
                    yield Feature(
                        kind=found.type,
                        name=(get("gene") or get("locus_tag") or get("product") or [""])[0],
                        strand=strand,
                        parts=tuple(parts),  # Biopython lists the parts in reading direction
                        phase=int(get("codon_start", ["1"])[0]) - 1,
                        table=int(get("transl_table")[0]) if get("transl_table") else None,
                        complete_start="<" not in str(found.location) and ">" not in str(found.location),
                    )


def _streams(path: Path) -> Iterator[IO[str]]:
    import io

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if name.lower().endswith((".gb", ".gbk", ".gbff")):
                    yield io.TextIOWrapper(archive.open(name), encoding="utf-8")
    else:
        yield _open_text(path)


def _gff(path: Path, wanted: set[str]) -> Iterator[Feature]:
    groups: dict[tuple[str, str, str], list[tuple[Interval, str, int, str, int | None]]] = defaultdict(list)
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith("##FASTA"):
                break
            if line.startswith("#") or not line.strip():
                continue
            columns = line.rstrip("\r\n").split("\t")
            if len(columns) != 9:
                raise AnnotationError(f"{path}, line {number}: {len(columns)} columns, GFF3 and GTF have 9.")
            contig, _, kind, start, end, _, strand, phase, text = columns
            if kind.lower() not in wanted:
                continue
            try:
                interval = Interval(contig, int(start) - 1, int(end))
            except ValueError as error:
                raise AnnotationError(f"{path}, line {number}: bad coordinates {start}-{end}: {error}") from error
            attributes = _attributes(text)
            key = next(
                (attributes[k] for k in ("ID", "protein_id", "transcript_id", "Parent") if k in attributes),
                "",
            )
            name = next(
                (attributes[k] for k in ("gene", "gene_name", "Name", "locus_tag", "gene_id") if k in attributes),
                key,
            )
            table = int(attributes["transl_table"]) if "transl_table" in attributes else None
            skip = int(phase) if phase.isdigit() else 0
            groups[contig, kind, key or str(number)].append((interval, strand, skip, name, table))
    for (_, kind, _), rows in groups.items():
        minus = rows[0][1] == "-"
        rows.sort(key=lambda row: row[0].start, reverse=minus)
        yield Feature(
            kind="CDS" if kind.lower() == "cds" else kind,
            name=rows[0][3],
            strand="-" if minus else "+",
            parts=tuple(row[0] for row in rows),
            phase=rows[0][2],
            table=rows[0][4],
        )


def _attributes(text: str) -> dict[str, str]:
    """Column 9 of GFF3 (`key=value;`) or GTF (`key "value";`)."""
    found = {}
    for item in text.split(";"):
        item = item.strip()
        if "=" in item:
            key, value = item.split("=", 1)
            found[key] = unquote(value)
        elif " " in item:
            key, value = item.split(" ", 1)
            found[key] = value.strip().strip('"')
    return found


def _bed(path: Path) -> Iterator[Feature]:
    with _open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith(("#", "track", "browser")):
                continue
            columns = line.rstrip("\r\n").split("\t")
            try:
                interval = Interval(columns[0], int(columns[1]), int(columns[2]))
            except (IndexError, ValueError) as error:
                raise AnnotationError(f"{path}, line {number}: not a BED row (contig, start, end): {error}") from error
            kind = columns[3].strip('"') if len(columns) > 3 else "region"
            strand: Strand = "-" if len(columns) > 5 and columns[5] == "-" else "+"
            yield Feature(kind=kind, name=kind, strand=strand, parts=(interval,))


def _open_text(path: Path) -> IO[str]:
    with open(path, "rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if zipped else open(path, encoding="utf-8")


def _amino_acid(codon: str, table: int) -> str:
    from Bio.Seq import translate

    return "X" if not set("ACGT").issuperset(codon) else str(translate(codon, table=table))


def _is_start(codon: str, table: int) -> bool:
    from Bio.Data import CodonTable

    return codon in CodonTable.unambiguous_dna_by_id[table].start_codons
