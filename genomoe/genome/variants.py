"""Variants as biology: validity, normalisation, contig names, and the REF and ALT windows a model reads.

Coordinates are 0-based half-open throughout. Files are read and written in `variant_files`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError

__all__ = [
    "BlockWindow",
    "CentredWindow",
    "ContigNames",
    "Haplotypes",
    "RightEndWindow",
    "SequenceSource",
    "Status",
    "Strand",
    "UnknownContigError",
    "WindowRule",
    "check_alleles",
    "haplotypes",
    "make_window",
    "normalise",
]

ACGT = frozenset("ACGT")
Strand = Literal["+", "-"]


class Status(StrEnum):
    """What became of one input ALT. Only `OK` and `REF_SUBSTITUTED` carry a score."""

    OK = "ok"
    REF_SUBSTITUTED = "ref_substituted"
    REF_MISMATCH = "ref_mismatch"
    REF_NOT_ACGT = "ref_not_acgt"
    ALT_NOT_ACGT = "alt_not_acgt"
    ALT_SYMBOLIC = "alt_symbolic"
    ALT_MISSING = "alt_missing"
    REF_EQUALS_ALT = "ref_equals_alt"
    ALLELE_TOO_LONG = "allele_too_long"
    POSITION_OUT_OF_RANGE = "position_out_of_range"
    UNKNOWN_CONTIG = "unknown_contig"

    @property
    def has_score(self) -> bool:
        return self in (Status.OK, Status.REF_SUBSTITUTED)


class SequenceSource(Protocol):
    """What this module needs of a reference genome; `genomoe.genome.fasta.Reference` is one."""

    @property
    def contigs(self) -> Mapping[str, int]: ...

    def fetch(self, interval: Interval, pad: bool = False) -> bytes: ...


class UnknownContigError(GenoMoEError):
    """A contig of the variant file is not in the reference, under any of its usual names."""


class ContigNames:
    """Maps a file's contig names to the reference's: exact, then the user's table, then chr1 = 1 and MT =
    chrM.

    An exact match always wins, so a reference that holds both `1` and `chr1` is never confused.
    """

    def __init__(self, reference_contigs: Iterable[str], aliases: Mapping[str, str] | None = None):
        self._known = list(reference_contigs)
        self._set = frozenset(self._known)
        self._aliases = dict(aliases or {})
        for source, target in self._aliases.items():
            if target not in self._set:
                raise UnknownContigError(
                    f"The contig alias {source} -> {target} names a contig that the reference lacks; "
                    f"{self._nearest(target)}."
                )
        self._cache: dict[str, str | None] = {}

    def find(self, name: str) -> str | None:
        """The reference's name for `name`, or None."""
        if name not in self._cache:
            self._cache[name] = self._find(name)
        return self._cache[name]

    def resolve(self, name: str) -> str:
        """As `find`, but raises UnknownContigError, which lists the nearest names."""
        found = self.find(name)
        if found is None:
            raise UnknownContigError(
                f"Contig '{name}' is not in the reference, also not as one of its usual other names; "
                f"{self._nearest(name)}."
            )
        return found

    def _find(self, name: str) -> str | None:
        if name in self._set:
            return name
        if name in self._aliases:
            return self._aliases[name]
        bare = name[3:] if name.lower().startswith("chr") else name
        candidates = [bare, f"chr{bare}", f"Chr{bare}", f"CHR{bare}"]
        if bare.upper() in ("M", "MT"):
            candidates += ["chrM", "MT", "M", "chrMT"]
        return next((candidate for candidate in candidates if candidate in self._set), None)

    def _nearest(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._known, n=3, cutoff=0.3) or self._known[:3]
        return "the nearest are " + ", ".join(near) if near else "the reference has no contigs"


def check_alleles(ref: str, alt: str) -> Status:
    """Whether both alleles are plain sequence; says what is wrong with the first that is not.

    Case does not matter. `*`, `<DEL>` and breakends are symbolic; `.` and an empty string are missing.
    """
    if alt in ("", "."):
        return Status.ALT_MISSING
    if any(symbol in alt for symbol in "<>[]*."):
        return Status.ALT_SYMBOLIC
    ref, alt = ref.upper(), alt.upper()
    if not ref or not ACGT.issuperset(ref):
        return Status.REF_NOT_ACGT
    if not ACGT.issuperset(alt):
        return Status.ALT_NOT_ACGT
    return Status.REF_EQUALS_ALT if ref == alt else Status.OK


def normalise(variant: Variant, reference: SequenceSource, *, step: int = 128) -> Variant:
    """The one left-aligned, parsimonious way to write a variant (Tan et al. 2015, doi
    10.1093/bioinformatics/btv112).

    Shared last bases are cut, the alleles being extended to the left whenever one is empty; then shared
    first bases. The result agrees with `bcftools norm -f`. Alleles come back in upper case. REF must match
    the reference.
    """
    position, ref, alt = variant.position, variant.ref.upper(), variant.alt.upper()
    if len(ref) == len(alt) == 1 or ref == alt:
        return Variant(variant.contig, position, ref, alt)
    before = ""  # reference bases just left of `position`, fetched in steps
    while ref[-1] == alt[-1]:
        if len(ref) > 1 and len(alt) > 1:
            ref, alt = ref[:-1], alt[:-1]
            continue
        if position == 0:
            break
        if not before:
            start = max(0, position - step)
            before = reference.fetch(Interval(variant.contig, start, position)).decode("ascii").upper()
        base, before = before[-1], before[:-1]
        position -= 1
        ref, alt = base + ref[:-1], base + alt[:-1]
    while len(ref) > 1 and len(alt) > 1 and ref[0] == alt[0]:
        ref, alt, position = ref[1:], alt[1:], position + 1
    return Variant(variant.contig, position, ref, alt)


@dataclass(frozen=True, kw_only=True)
class CentredWindow:
    """Each variant has its own window: its first base stands at index `length // 2`, also when length is
    even.

    Windows are clipped at the ends of a contig, never padded.
    """

    length: int

    def interval(self, variant: Variant, contig_length: int, strand: Strand = "+") -> Interval:
        start = variant.position - self.length // 2
        return Interval(variant.contig, max(0, start), min(contig_length, start + self.length))

    @property
    def longest_allele(self) -> int:
        """The longest allele that such a window can hold on both strands, in bases."""
        return max(1, self.length - self.length // 2)


@dataclass(frozen=True, kw_only=True)
class BlockWindow:
    """Neighbours share a window: the contig is cut into blocks of a quarter of the length, each in one window.

    In reading direction five eighths of the window come before the block and one eighth after it: a causal model
    gets most of its context where it uses it, and little is run again for each variant. So each strand has a
    window of its own. It depends on the position alone: a score does not depend on which other variants are in
    the file. At a contig's ends the window is moved inside it, and clipped only where the contig is shorter.
    """

    length: int

    @property
    def block(self) -> int:
        return max(1, self.length // 4)

    def interval(self, variant: Variant, contig_length: int, strand: Strand = "+") -> Interval:
        first = variant.position // self.block * self.block
        before = 5 * self.length // 8
        start = first - before if strand == "+" else first + self.block + before - self.length
        start = max(0, min(start, contig_length - self.length))
        return Interval(variant.contig, start, min(contig_length, start + self.length))

    @property
    def longest_allele(self) -> int:
        return max(1, self.length // 8)


@dataclass(frozen=True, kw_only=True)
class RightEndWindow:
    """The longer allele ends the window in reading direction, so that the model reads all its left context.

    On the minus strand the context is what lies to the right in the genome. Clipped at the ends of a contig.
    """

    length: int

    def interval(self, variant: Variant, contig_length: int, strand: Strand = "+") -> Interval:
        allele = max(len(variant.ref), len(variant.alt))
        if strand == "+":
            end = variant.position + allele
            return Interval(variant.contig, max(0, end - self.length), min(contig_length, end))
        start = variant.position + len(variant.ref) - allele
        return Interval(variant.contig, max(0, start), min(contig_length, start + self.length))

    @property
    def longest_allele(self) -> int:
        return max(1, self.length // 2)


class WindowRule(Protocol):
    """Where a variant's window lies."""

    @property
    def longest_allele(self) -> int: ...

    def interval(self, variant: Variant, contig_length: int, strand: Strand = "+") -> Interval: ...


def make_window(mode: str, length: int) -> CentredWindow | BlockWindow:
    """The window rule for `mode` "centred" or "block" and a length in bases."""
    if length < 2:
        raise GenoMoEError(f"A window needs at least 2 bases, but --window is {length}.")
    if mode == "centred":
        return CentredWindow(length=length)
    if mode == "block":
        return BlockWindow(length=length)
    raise GenoMoEError(f"Unknown window mode '{mode}': it is centred or block.")


@dataclass(frozen=True, kw_only=True)
class Haplotypes:
    """The window without and with the variant, in reading direction, equally long, in upper case.

    `ref[:first] == alt[:first]`; the alleles start at `first` and are `ref_allele` and `alt_allele` bases
    long.
    """

    ref: bytes
    alt: bytes
    first: int
    ref_allele: int
    alt_allele: int


def haplotypes(variant: Variant, window: Interval, reference: SequenceSource, *, strand: Strand = "+") -> Haplotypes:
    """The REF and ALT sequences of `window` as read on `strand`.

    Rule for indels: both start at the same base in reading direction and are equally long. What a deletion
    removes is made up for by reference bases beyond the window's end, what an insertion adds is cut there;
    at the end of a contig both are cut to the shorter. So on the minus strand the window's right-hand end is
    the fixed one, and for a substitution the minus-strand sequences are the reverse complements of the plus
    strand's. The variant's REF allele replaces the reference's bases (they are equal unless REF is
    substituted).
    """
    contig_length = reference.contigs[variant.contig]
    ref, alt = variant.ref.upper().encode("ascii"), variant.alt.upper().encode("ascii")
    begin, end = variant.position, variant.position + len(ref)
    if not window.start <= begin or not end <= window.end:
        raise GenoMoEError(f"{variant} does not lie within its window {window}: it is too long; widen --window.")
    missing = max(0, len(ref) - len(alt))
    low = window.start if strand == "+" else max(0, window.start - missing)
    high = min(contig_length, window.end + missing) if strand == "+" else window.end
    around = reference.fetch(Interval(variant.contig, low, high)).upper()
    before, after = around[: begin - low], around[end - low :]
    if strand == "-":
        before, after = reverse_complement(after), reverse_complement(before)
        ref, alt = reverse_complement(ref), reverse_complement(alt)
    with_ref, with_alt = before + ref + after, before + alt + after
    length = min(window.end - window.start, len(with_ref), len(with_alt))
    return Haplotypes(
        ref=with_ref[:length],
        alt=with_alt[:length],
        first=len(before),
        ref_allele=len(ref),
        alt_allele=len(alt),
    )
