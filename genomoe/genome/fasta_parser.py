"""Read FASTA strictly and fast, in bounded memory, with a verdict and a line number for everything unusual.

`scan_fasta` yields, for each record, its header and then its letters in pieces of at most a few megabytes, so a
contig of any length (past 2^31 bases) streams. Case is kept; U stays U. Rules (data/README.md has them as a table):

error   no '>' line, an empty file, letters before the first '>', an empty or repeated name, a character that is no
        nucleotide code (with a hint: protein, gap, stop, digits, masked X), '>' inside a line, a lone carriage
        return, broken compression
warn    comment lines before the first record, '> name', blanks inside a line, a header-only record, RNA letters,
        a byte-order mark, more than half ambiguity codes in a record of 50 letters or more
accept  CRLF, no final newline, blank lines, uneven line lengths, lower case, IUPAC codes
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, NamedTuple

from genomoe.genome.alphabet import IUPAC
from genomoe.genome.compression import open_stream, require_file
from genomoe.genome.errors import InputError

CHUNK = 1 << 22
_LONGEST_HEADER = 1 << 24
_LETTERS = IUPAC + IUPAC.lower()
_BLANK = b"\n\r \t"
_PLAIN_BASES = b"ACGTUNacgtun"
_PROTEIN_ONLY = b"EFILPQZJOefilpqzjo"
_FORMAT_HINTS = (
    (b"LOCUS", "it looks like GenBank; name the file .gb, .gbk or .gbff"),
    (b"@", "it looks like FASTQ or SAM; convert it to FASTA first"),
    (b"##fileformat=VCF", "it looks like a VCF"),
    (b"##gff", "it looks like GFF"),
    (b"\xff\xfe", "it looks like UTF-16; save it as plain text"),
    (b"\xfe\xff", "it looks like UTF-16; save it as plain text"),
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one place of an input file earns; prints as ``file:line: level: message``."""

    level: Literal["error", "warn"]
    """'error' stops a build; 'warn' does not."""
    path: str
    """The file."""
    line: int
    """1-based line; 0 where the file as a whole is meant."""
    rule: str
    """A short stable name of the rule, such as ``invalid-letter``."""
    message: str
    """What was found and what to do."""

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.level}: {self.message}"


Report = Callable[[Verdict], None]


def raise_on_error(verdict: Verdict) -> None:
    """The default report: the first error raises InputError, warnings pass."""
    if verdict.level == "error":
        where = f"{verdict.path}:{verdict.line}" if verdict.line else verdict.path
        raise InputError(f"{where}: {verdict.message}")


class Header(NamedTuple):
    """The header of a record."""

    name: str
    """The first word after '>'."""
    description: str
    """The rest of the line."""
    line: int
    """1-based line of the header."""


class Record(NamedTuple):
    """A whole record: its header and its letters, case kept, blanks and line ends removed."""

    header: Header
    sequence: bytes


def scan_fasta(
    path: str | os.PathLike[str], report: Report = raise_on_error, chunk: int = CHUNK
) -> Iterator[Header | bytes]:
    """Yield a Header, then that record's letters as bytes pieces, then the next Header, ...

    Raises InputError through `report` (the default) at the first error; a `report` that only collects lets the
    scan continue, in which case the letters of a bad line are left out of the pieces.
    """
    checked = require_file(path)
    with open_stream(checked) as stream:
        yield from _Scanner(str(path), stream, report, chunk).run()


def read_fasta(path: str | os.PathLike[str], report: Report = raise_on_error) -> Iterator[Record]:
    """Yield whole records; each is held in memory while you have it."""
    header: Header | None = None
    pieces: list[bytes] = []
    for item in scan_fasta(path, report):
        if isinstance(item, Header):
            if header is not None:
                yield Record(header, b"".join(pieces))
            header, pieces = item, []
        else:
            pieces.append(item)
    if header is not None:
        yield Record(header, b"".join(pieces))


class _Scanner:
    """The state of one pass: which line we are on and what the current record has shown so far."""

    def __init__(self, path: str, stream: BinaryIO, report: Report, chunk: int) -> None:
        self.path, self.stream, self.report, self.chunk = path, stream, report, chunk
        self.line = 1
        self.header: Header | None = None
        self.names: dict[str, int] = {}
        self.record_letters = 0
        self.record_plain = 0
        self.warned: set[str] = set()
        self.preamble_failed = False
        self.bad_line = 0

    def say(self, level: Literal["error", "warn"], line: int, rule: str, message: str) -> None:
        self.report(Verdict(level=level, path=self.path, line=line, rule=rule, message=message))

    def run(self) -> Iterator[Header | bytes]:
        carry = b""  # an unfinished header or preamble line, or a CR whose LF is in the next chunk
        line_start = True
        first = True
        while True:
            data = self.stream.read(self.chunk)
            while first and data and len(data) < 3 and (more := self.stream.read(3 - len(data))):
                data += more  # enough to see a byte-order mark
            final = not data
            if first and data:
                data = self._strip_mark(data)
                first = False
            if final and first:
                self.say("error", 0, "empty", "the file is empty; no sequence to read.")
                return
            data, carry = carry + data, b""
            if not final and data.endswith(b"\r"):
                data, carry = data[:-1], b"\r"
            if not data and final:
                break
            position = 0
            while position < len(data):
                heads = line_start and (data[position] == 62 or self.header is None)
                if heads:  # a header or a line before the first header: take it whole
                    end = data.find(b"\n", position)
                    if end < 0 and not final:
                        carry = data[position:] + carry
                        if len(carry) > _LONGEST_HEADER:
                            what = "header" if carry[:1] == b">" else "first line"
                            self.say("error", self.line, "no-header", f"the {what} never ends; this is no FASTA file.")
                            return
                        break
                    end = len(data) if end < 0 else end
                    yield from self._line(data[position:end])
                    self.line += 1
                    position = end + 1
                    continue
                end = data.find(b"\n>", position)
                end = len(data) if end < 0 else end + 1
                segment = data[position:end]
                clean = self._letters(segment, line_start)
                if clean:
                    yield clean
                self.line += segment.count(b"\n")
                line_start = segment.endswith(b"\n")
                position = end
            if final:
                break
        self._end_record()
        if self.header is None and not self.preamble_failed:
            self.say("error", 0, "no-record", "no line starts with '>', so there is no FASTA record in it.")

    def _strip_mark(self, data: bytes) -> bytes:
        if data.startswith(b"\xef\xbb\xbf"):
            self.say("warn", 1, "byte-order-mark", "a UTF-8 byte-order mark was skipped.")
            return data[3:]
        return data

    def _line(self, raw: bytes) -> Iterator[Header]:
        text = raw.rstrip(b"\r")
        if text.startswith(b">"):
            self._end_record()
            header = self._parse_header(text)
            self.header = header
            self.record_letters = self.record_plain = 0
            self.warned = set()
            yield header
            return
        if not text.strip() or self.preamble_failed:
            return
        if text.startswith((b";", b"#")) and not text.startswith((b"##fileformat", b"##gff")):
            self.say("warn", self.line, "comment", "a comment line before the first record was skipped.")
            return
        hint = next((hint for start, hint in _FORMAT_HINTS if text.startswith(start)), None)
        found = text[:40].decode("ascii", "replace")
        self.say(
            "error",
            self.line,
            "no-header",
            f"a record must start with a '>' line, found {found!r}; "
            + (f"{hint}." if hint else "is this a FASTA file?"),
        )
        self.preamble_failed = True

    def _parse_header(self, text: bytes) -> Header:
        body = text[1:].decode("utf-8", "replace")
        if body[:1] in (" ", "\t") and body.strip():
            self.say("warn", self.line, "space-after-mark", "a space follows '>'; the next word is the name.")
        words = body.split(None, 1)
        name = words[0] if words else ""
        description = words[1].strip() if len(words) > 1 else ""
        if "\0" in body:
            self.say("error", self.line, "no-name", "a header holds a zero byte; this is no text file.")
        elif not name:
            self.say("error", self.line, "no-name", "a '>' line has no name; give each record one.")
        elif name in self.names:
            self.say(
                "error",
                self.line,
                "duplicate-name",
                f"the name {name!r} was used in line {self.names[name]} already; the first word of each "
                "header must be unique.",
            )
        self.names.setdefault(name, self.line)
        return Header(name, description, self.line)

    def _end_record(self) -> None:
        if self.header is None or self.bad_line > self.header.line:
            return
        if not self.record_letters:
            self.say("warn", self.header.line, "no-sequence", f"record {self.header.name!r} has no sequence.")
        elif self.record_letters >= 50 and 2 * self.record_plain < self.record_letters:
            self.say(
                "warn",
                self.header.line,
                "mostly-ambiguous",
                f"more than half of record {self.header.name!r} are ambiguity codes, not A, C, G, T or N; "
                "make sure that it is no protein sequence.",
            )

    def _letters(self, segment: bytes, at_line_start: bool) -> bytes:
        clean = segment.translate(None, _BLANK)
        if "blank" not in self.warned and (b" " in segment or b"\t" in segment):
            self.warned.add("blank")
            line = self.line + _first_of(segment, b" \t")
            self.say("warn", line, "blank-in-line", "blanks inside a sequence line were removed.")
        lone_return = segment.count(b"\r") != segment.count(b"\r\n") + (segment[-1:] == b"\r")
        if lone_return or clean.translate(None, _LETTERS):
            clean = self._report_bad_lines(segment, at_line_start)
        if ("rna" not in self.warned) and (b"U" in clean or b"u" in clean):
            self.warned.add("rna")
            line = self.line + _first_of(segment, b"Uu")
            self.say("warn", line, "rna", "RNA letters (U) are read as T.")
        self.record_letters += len(clean)
        self.record_plain += len(clean) - len(clean.translate(None, _PLAIN_BASES))
        return clean

    def _report_bad_lines(self, segment: bytes, at_line_start: bool) -> bytes:
        assert self.header is not None
        kept = []
        for number, line in enumerate(segment.split(b"\n")):
            text = line[:-1] if line.endswith(b"\r") else line
            letters = text.translate(None, b" \t")
            wrong = letters.translate(None, _LETTERS)
            if not wrong:
                kept.append(letters)
                continue
            if self.line + number == self.bad_line:
                continue  # the line's other half, from the next chunk
            self.bad_line = self.line + number
            column = text.index(wrong[:1]) + 1
            where = f" at column {column}" if number or at_line_start else ""
            self.say(
                "error",
                self.line + number,
                "invalid-letter",
                f"{_printable(wrong[0])}{where} in record {self.header.name!r} is no nucleotide code; {_hint(wrong)}.",
            )
        return b"".join(kept)


def _printable(byte: int) -> str:
    return repr(chr(byte)) if 32 <= byte < 127 else f"byte 0x{byte:02x}"


def _hint(wrong: bytes) -> str:
    first = wrong[:1]
    if first == b">":
        return "a header must stand on a line of its own, so a line end is missing"
    if first == b"\r":
        return "a carriage return must be followed by a line feed; convert the line ends"
    if first in b"0123456789":
        return "remove the numbers (numbered sequence blocks are not FASTA)"
    if first in b"-.":
        return "remove the gaps of the alignment"
    if first in b"xX":
        return "write masked bases as N or in lower case"
    if first in _PROTEIN_ONLY or first == b"*":
        return "this looks like a protein sequence"
    if first in b";#":
        return "comments are allowed before the first record only"
    return "remove it, or write N for an unknown base"


def _first_of(segment: bytes, letters: bytes) -> int:
    places = [place for letter in letters if (place := segment.find(letter)) >= 0]
    return segment.count(b"\n", 0, min(places)) if places else 0
