"""Every FASTA rule: one good or bad file a row, what the reader says and in which line, and what bases it gives."""

import gzip
import lzma
import os

import numpy as np
import pyarrow
import pytest
from pysam import BGZFile

from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError, InputError
from genomoe.genome.fasta import Reference
from genomoe.genome.fasta_parser import Verdict, read_fasta
from genomoe.genome.random_access import BgzfFile

# name: (content, the records read, rules warned of as (rule, line))
GOOD = {
    "plain": (b">a\nACGT\n>b\nTTTT\n", {"a": b"ACGT", "b": b"TTTT"}, []),
    "crlf": (b">a\r\nACGT\r\nAC\r\n>b\r\nTT\r\n", {"a": b"ACGTAC", "b": b"TT"}, []),
    "no final newline": (b">a\nACGT\n>b\nTTTT", {"a": b"ACGT", "b": b"TTTT"}, []),
    "crlf without the last one": (b">a\r\nACGT", {"a": b"ACGT"}, []),
    "blank lines everywhere": (b"\n\n>a\n\nACGT\n\nAC\n\n\n>b\nTT\n\n\n", {"a": b"ACGTAC", "b": b"TT"}, []),
    "uneven lines": (b">a\nACGTACGT\nAC\nACGTAC\n", {"a": b"ACGTACGTACACGTAC"}, []),
    "one long line": (b">a\n" + b"ACGT" * 50_000 + b"\n", {"a": b"ACGT" * 50_000}, []),
    "description": (b">a chromosome one\nACGT\n", {"a": b"ACGT"}, []),
    "lower case": (b">a\nacgtn\n", {"a": b"acgtn"}, []),
    "IUPAC": (b">a\nACGTRYSWKMBDHVN\nacgtryswkmbdhvn\n", {"a": b"ACGTRYSWKMBDHVNacgtryswkmbdhvn"}, []),
    "comments first": (b"; made by x\n# and y\n>a\nACGT\n", {"a": b"ACGT"}, [("comment", 1), ("comment", 2)]),
    "space after the mark": (b"> a b\nACGT\n", {"a": b"ACGT"}, [("space-after-mark", 1)]),
    "blanks in a line": (b">a\nAC GT \nAC\tGT\n", {"a": b"ACGTACGT"}, [("blank-in-line", 2)]),
    "header only": (
        b">a\n>b\nACGT\n>c\n",
        {"a": b"", "b": b"ACGT", "c": b""},
        [("no-sequence", 1), ("no-sequence", 4)],
    ),
    "RNA": (b">a\nACGT\nACGU\n", {"a": b"ACGTACGU"}, [("rna", 3)]),
    "byte-order mark": (b"\xef\xbb\xbf>a\nACGT\n", {"a": b"ACGT"}, [("byte-order-mark", 1)]),
    "mostly ambiguous": (b">p\n" + b"MKVHSDRW" * 7 + b"\n", {"p": b"MKVHSDRW" * 7}, [("mostly-ambiguous", 1)]),
    "marks in a header": (b">a>b>c\nACGT\n", {"a>b>c": b"ACGT"}, []),
}

# name: (content, rule, line, words of the message)
BAD = {
    "empty file": (b"", "empty", 0, "empty"),
    "only blank lines": (b"\n\n\n", "no-record", 0, "no line starts with '>'"),
    "only comments": (b"; nothing\n", "no-record", 0, "no line starts with '>'"),
    "no mark": (b"ACGT\nACGT\n", "no-header", 1, "FASTA"),
    "letters before the first mark": (b"\nACGT\n>a\nACGT\n", "no-header", 2, "'>'"),
    "FASTQ": (b"@r1\nACGT\n+\nIIII\n", "no-header", 1, "FASTQ"),
    "VCF": (b"##fileformat=VCFv4.2\n#CHROM\n", "no-header", 1, "VCF"),
    "UTF-16": (">a\nACGT\n".encode("utf-16"), "no-header", 1, "UTF-16"),
    "no name": (b">\nACGT\n", "no-name", 1, "name"),
    "no name but blanks": (b">a\nAC\n>  \nACGT\n", "no-name", 3, "name"),
    "same first word": (b">a one\nACGT\n>b\nAC\n>a two\nACGT\n", "duplicate-name", 5, "line 1"),
    "protein": (b">p\nMKVLAAGIVGL\n", "invalid-letter", 2, "protein"),
    "stop": (b">a\nACGT*\n", "invalid-letter", 2, "protein"),
    "gap": (b">a\nACGT\nAC-GT\n", "invalid-letter", 3, "gaps"),
    "dot": (b">a\nACGT\nAC.GT\n", "invalid-letter", 3, "gaps"),
    "digits": (b">a\n1 ACGT\n", "invalid-letter", 2, "numbers"),
    "masked X": (b">a\nACXXGT\n", "invalid-letter", 2, "N or in lower case"),
    "zero byte": (b">a\nAC\0GT\n", "invalid-letter", 2, "0x00"),
    "not ASCII": (">a\nAC\u00e9GT\n".encode(), "invalid-letter", 2, "0xc3"),
    "mark inside a line": (b">a\nACGT>b\nACGT\n", "invalid-letter", 2, "line end is missing"),
    "carriage returns alone": (b">a\nACGT\rACGT\rAC\n", "invalid-letter", 2, "carriage return"),
    "comment inside": (b">a\nACGT\n;x\nACGT\n", "invalid-letter", 3, "comments"),
    "second of two CRLF lines": (b">a\r\nACGT\r\nAC!T\r\n", "invalid-letter", 3, "'!'"),
}

COMPRESS = {
    "plain": lambda data, path: path.write_bytes(data),
    "gzip": lambda data, path: path.write_bytes(gzip.compress(data)),
    "gzip in two members": lambda data, path: path.write_bytes(gzip.compress(data[:7]) + gzip.compress(data[7:])),
    "xz": lambda data, path: path.write_bytes(lzma.compress(data)),
    "zstd": lambda data, path: path.write_bytes(pyarrow.compress(data, codec="zstd", asbytes=True)),
}


def write_bgzip(data: bytes, path) -> None:
    with BGZFile(str(path), "wb") as out:
        out.write(data)


COMPRESS["bgzip"] = write_bgzip


def collect(path) -> tuple[dict[str, bytes], list[Verdict]]:
    verdicts: list[Verdict] = []
    return {record.header.name: record.sequence for record in read_fasta(path, verdicts.append)}, verdicts


@pytest.mark.parametrize("name", GOOD)
def test_good_file_gives_its_bases_and_its_warnings(name, tmp_path):
    content, records, warned = GOOD[name]
    path = tmp_path / "with space.fa"
    path.write_bytes(content)
    read, verdicts = collect(path)
    assert read == records
    assert [(verdict.rule, verdict.line) for verdict in verdicts] == warned
    assert all(verdict.level == "warn" for verdict in verdicts)
    assert {record.header.name: record.sequence for record in read_fasta(path)} == records


@pytest.mark.parametrize("name", BAD)
def test_bad_file_is_refused_with_its_line(name, tmp_path):
    content, rule, line, words = BAD[name]
    path = tmp_path / "bad.fa"
    path.write_bytes(content)
    _, verdicts = collect(path)
    errors = [verdict for verdict in verdicts if verdict.level == "error"]
    assert (errors[0].rule, errors[0].line) == (rule, line)
    assert words in errors[0].message
    where = f"{path}:{line}: " if line else f"{path}: "
    assert str(errors[0]).startswith(where + "error: ")
    with pytest.raises(InputError, match=r"bad\.fa"):
        list(read_fasta(path))
    with pytest.raises(InputError, match=r"bad\.fa"):
        Reference(path)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_chunk_borders_change_nothing(name, chunk, tmp_path):
    from genomoe.genome.fasta_parser import Header, scan_fasta

    content = (GOOD.get(name) or BAD[name])[0][:4000]
    path = tmp_path / "x.fa"
    path.write_bytes(content)

    def read(size):
        verdicts: list[Verdict] = []
        out: list[tuple] = []
        for item in scan_fasta(path, verdicts.append, chunk=size):
            if isinstance(item, Header):
                out.append((item, []))
            else:
                out[-1][1].append(item)
        kinds = sorted((verdict.rule, verdict.line) for verdict in verdicts)
        return [(header, b"".join(pieces)) for header, pieces in out], kinds

    small, large = read(chunk), read(1 << 20)
    assert [header for header, _ in small[0]] == [header for header, _ in large[0]]
    assert small[1] == large[1]
    if name in GOOD:
        assert small[0] == large[0]


@pytest.mark.parametrize("kind", COMPRESS)
def test_every_compression_gives_the_same_bases(kind, tmp_path):
    letters = np.random.default_rng(1).choice(list(b"ACGTNacgt"), 5000).astype(np.uint8).tobytes()
    content = b">a one\n" + b"\n".join(letters[i : i + 60] for i in range(0, 5000, 60)) + b"\n>b\nAC\n"
    path = tmp_path / "x.fa.any"
    COMPRESS[kind](content, path)
    reference = Reference(path)
    assert reference.contigs == {"a": 5000, "b": 2}
    assert reference.fetch(Interval("a", 0, 5000)) == letters


@pytest.mark.parametrize("kind", ["gzip", "bgzip", "xz", "zstd"])
@pytest.mark.parametrize("cut", [1, 9, 300])
def test_a_truncated_file_is_never_taken_for_a_short_one(kind, cut, tmp_path):
    letters = np.random.default_rng(1).choice(list(b"ACGT"), 200_000).astype(np.uint8).tobytes()
    path = tmp_path / "x.fa.any"
    COMPRESS[kind](b">a\n" + letters + b"\n>b\nAC\n", path)
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"truncated|damaged"):
        Reference(path)


def test_bgzip_cut_between_two_blocks_is_noticed(tmp_path):
    path = tmp_path / "x.fa.gz"
    write_bgzip(b">a\n" + b"ACGT" * 100_000 + b"\n", path)
    path.write_bytes(path.read_bytes()[:-28])  # the end marker alone: every block left is whole
    with pytest.raises(InputError, match="end marker"):
        Reference(path)


def test_a_damaged_bgzip_block_never_gives_a_wrong_base(tmp_path):
    path, damaged = tmp_path / "x.fa.gz", tmp_path / "y.fa.gz"
    rng = np.random.default_rng(1)
    letters = rng.choice(list(b"ACGT"), 30_000).astype(np.uint8).tobytes()
    write_bgzip(b">a\n" + b"\n".join(letters[i : i + 60] for i in range(0, 30_000, 60)) + b"\n", path)
    whole = path.read_bytes()
    table = BgzfFile(str(path))
    end = int(table._compressed[1])  # of the only block that is not empty: its data, checksum and size
    for place in [*rng.integers(18, end - 4, 60).tolist(), *range(end - 8, end - 4)]:
        data = bytearray(whole)
        data[place] ^= 1 << int(rng.integers(8))
        damaged.write_bytes(data)
        with pytest.raises(InputError, match=r"y\.fa\.gz: a bgzip block (is damaged|fails its checksum)"):
            BgzfFile(str(damaged)).read(0, table.size)
    for place in range(end - 4, end):  # the size
        data = bytearray(whole)
        data[place] ^= 1
        damaged.write_bytes(data)
        with pytest.raises(InputError, match=r"y\.fa\.gz"):
            BgzfFile(str(damaged)).read(0, table.size)


def test_no_bgzip_block_is_inflated_twice_when_a_file_is_read_in_pieces(tmp_path, monkeypatch):
    path = tmp_path / "x.gz"
    text = np.random.default_rng(1).choice(list(b"ACGT"), 400_000).astype(np.uint8).tobytes()
    write_bgzip(text, path)
    file, blocks = BgzfFile(str(path)), []
    inflate = BgzfFile._inflate
    monkeypatch.setattr(
        BgzfFile, "_inflate", lambda self, member, block: blocks.append(block) or inflate(self, member, block)
    )
    assert b"".join(file.read(start, start + 100_001) for start in range(0, len(text), 100_001)) == text
    assert blocks == list(range(len(blocks)))
    assert len(blocks) > 5


def test_damaged_gzip_content_is_noticed(tmp_path):
    path = tmp_path / "x.fa.gz"
    letters = np.random.default_rng(1).choice(list(b"ACGT"), 50_000).astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(b">a\n" + letters))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"x\.fa\.gz"):
        Reference(path)


def test_a_path_that_is_missing_or_a_folder_says_so(tmp_path):
    (tmp_path / "genome.fa").write_bytes(b">a\nAC\n")
    with pytest.raises(GenoMoEError, match=r"does not exist; near it are genome\.fa"):
        Reference(tmp_path / "genom.fa")
    with pytest.raises(GenoMoEError, match="is a folder"):
        Reference(tmp_path)


def test_standard_input_and_pipes_are_refused(tmp_path):
    os.mkfifo(tmp_path / "genome.fa")
    for path in ("-", tmp_path / "genome.fa"):
        with pytest.raises(GenoMoEError, match="write it to a file first"):
            Reference(path)


def test_a_binary_file_without_line_ends_ends_soon(tmp_path):
    path = tmp_path / "x.fa"
    path.write_bytes(b">" + b"A" * (20 << 20))
    with pytest.raises(InputError, match="never ends"):
        list(read_fasta(path))
