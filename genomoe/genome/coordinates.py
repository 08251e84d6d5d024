"""Genomic coordinates that carry their own convention.

Inside GenoMoE every coordinate is **0-based and half-open**: ``[start, end)``. Text meant for people
("chrI:1,001-1,200", "chrI:1000:A>G") is **1-based and inclusive** and is converted here, at the edge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from genomoe.genome.errors import GenoMoEError

_INTERVAL = re.compile(r"(?P<contig>.+):(?P<start>[\d,_]+)-(?P<end>[\d,_]+)(?::?\(?(?P<strand>[+-])\)?)?")
_VARIANT = re.compile(r"(?P<contig>.+):(?P<position>[\d,_]+):(?P<ref>[A-Za-z]*)(?:>|:)(?P<alt>[A-Za-z*.<>]*)")


def _integer(text: str) -> int:
    return int(text.replace(",", "").replace("_", ""))


def _require_int(value: object, name: str) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise GenoMoEError(f"{name} must be an integer, got {value!r}.")


@dataclass(frozen=True, order=True)
class Interval:
    """A stretch of one contig: 0-based, half-open, with a strand.

    Raises GenoMoEError for a negative start, an end before the start or an unknown strand.
    """

    contig: str
    """Name of the contig: the first word of its FASTA header."""
    start: int
    """First base, 0-based."""
    end: int
    """One past the last base, 0-based."""
    strand: Literal["+", "-"] = "+"
    """``-`` reads the reverse complement."""

    def __post_init__(self) -> None:
        _require_int(self.start, "Interval.start")
        _require_int(self.end, "Interval.end")
        object.__setattr__(self, "start", int(self.start))
        object.__setattr__(self, "end", int(self.end))
        if not self.contig:
            raise GenoMoEError("Interval.contig is empty; give the contig's name.")
        if self.end < self.start:
            raise GenoMoEError(
                f"Interval {self.contig} [{self.start}, {self.end}) ends before it starts; "
                "coordinates are 0-based and half-open."
            )
        if self.strand not in ("+", "-"):
            raise GenoMoEError(f"Interval.strand must be '+' or '-', got {self.strand!r}.")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        suffix = "" if self.strand == "+" else ":-"
        return f"{self.contig}:{self.start + 1}-{self.end}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Interval:
        """Read ``contig:start-end`` as people write it: 1-based, inclusive, thousands separators allowed.

        An optional ``:-`` or ``(-)`` at the end names the strand: ``chrI:1,001-1,200:-``.
        """
        match = _INTERVAL.fullmatch(text.strip())
        if match is None:
            raise GenoMoEError(
                f"{text!r} is not an interval; write contig:start-end, 1-based and inclusive, "
                "for example chrI:1,001-1,200."
            )
        start, end = _integer(match["start"]), _integer(match["end"])
        if start < 1:
            raise GenoMoEError(f"{text!r} starts at {start}; written intervals are 1-based, so the first is 1.")
        if end < start:
            raise GenoMoEError(f"{text!r} ends before it starts.")
        return cls(match["contig"], start - 1, end, "-" if match["strand"] == "-" else "+")

    def resized(self, length: int) -> Interval:
        """The interval of `length` bases with the same centre (the extra base of an odd change goes right)."""
        start = self.start + (len(self) - length) // 2
        return Interval(self.contig, start, start + length, self.strand)

    def windows(self, length: int, stride: int | None = None) -> Iterator[Interval]:
        """Intervals of `length` bases that start every `stride` (None: `length`) until the end is reached.

        The last one is cut short at the end, as training's windows of `sampling.mode=stride` are; an empty
        interval has none. Strand and contig are this interval's.
        """
        stride = length if stride is None else stride
        for start in range(self.start, self.end, stride):
            yield Interval(self.contig, start, min(start + length, self.end), self.strand)
            if start + length >= self.end:
                return

    def overlaps(self, other: Interval) -> bool:
        """Whether the two share a base (the strand doesn't matter)."""
        return self.contig == other.contig and self.start < other.end and other.start < self.end


@dataclass(frozen=True, order=True)
class Variant:
    """A change of `ref` into `alt` at one place of one contig; `position` is 0-based.

    Alleles are upper-cased. Raises GenoMoEError for a negative position or an empty REF.
    """

    contig: str
    """Name of the contig."""
    position: int
    """0-based place of the first base of `ref` (a VCF's POS minus one)."""
    ref: str
    """The reference allele, on the plus strand."""
    alt: str
    """The alternative allele, on the plus strand; may be symbolic, such as ``<DEL>`` or ``*``."""

    def __post_init__(self) -> None:
        _require_int(self.position, "Variant.position")
        object.__setattr__(self, "position", int(self.position))
        if self.position < 0:
            raise GenoMoEError(
                f"Variant at {self.contig} position {self.position} (0-based) lies before the first base."
            )
        if not self.ref:
            raise GenoMoEError(
                f"Variant at {self.contig}:{self.position + 1} has an empty REF; write it with its anchor base."
            )
        object.__setattr__(self, "ref", self.ref.upper())
        if not self.alt.startswith("<"):
            object.__setattr__(self, "alt", self.alt.upper())

    def __str__(self) -> str:
        return f"{self.contig}:{self.position + 1}:{self.ref}>{self.alt}"

    @property
    def end(self) -> int:
        """One past the last reference base, 0-based."""
        return self.position + len(self.ref)

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``contig:position:REF>ALT`` (or ``contig:position:REF:ALT``) with a 1-based position."""
        match = _VARIANT.fullmatch(text.strip())
        if match is None or not match["ref"] or not match["alt"]:
            raise GenoMoEError(
                f"{text!r} is not a variant; write contig:position:REF>ALT with a 1-based position, "
                "for example chrI:1000:A>G."
            )
        position = _integer(match["position"])
        if position < 1:
            raise GenoMoEError(f"{text!r} is at position {position}; written positions are 1-based.")
        return cls(match["contig"], position - 1, match["ref"], match["alt"])
