"""Fuzz the FASTA parser against an independent slow one: it raises its own error or gives exactly the same bases."""

import string

import hypothesis.strategies as st
from hypothesis import example, given, settings

from genomoe.genome.coordinates import Interval
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.fasta import Reference
from genomoe.genome.fasta_index import index_fasta
from genomoe.genome.fasta_parser import Header, Verdict, read_fasta, scan_fasta
from genomoe.genome.random_access import PlainFile

ALLOWED = set("ACGTURYSWKMBDHVNacgturyswkmbdhvn")


def slow_parse(content: bytes) -> list[tuple[str, str]] | None:
    """Records, or None where a rule is broken; one character at a time, sharing nothing with the parser under test."""
    text = content.decode("latin-1").removeprefix("\xef\xbb\xbf")
    lines: list[str] = []
    line = ""
    place = 0
    while place < len(text):
        character = text[place]
        if character == "\n":
            lines.append(line)
            line = ""
        else:
            line += character
        place += 1
    if line:
        lines.append(line)
    records: list[tuple[str, list[str]]] = []
    for raw in lines:
        clean = raw.rstrip("\r") if raw.startswith(">") or not records else raw[:-1] if raw.endswith("\r") else raw
        if clean.startswith(">"):
            words = clean[1:].encode("latin-1").decode("utf-8", "replace").split()
            if not words or "\0" in clean or words[0] in [name for name, _ in records]:
                return None
            records.append((words[0], []))
        elif not records:
            stripped = clean.encode("latin-1").strip()
            if stripped and (clean[0] not in ";#" or clean.startswith("##fileformat") or clean.startswith("##gff")):
                return None
        else:
            for character in clean:
                if character in " \t":
                    continue
                if character not in ALLOWED:
                    return None
                records[-1][1].append(character)
    if not records:
        return None
    return [(name, "".join(letters)) for name, letters in records]


line_end = st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\r", b"\n\n", b""])
letters = st.text("ACGTNacgtnURYKMk", max_size=12).map(str.encode)
odd = st.sampled_from([b"-", b"*", b".", b"1", b" ", b"\t", b"X", b"E", b">", b"\0", b"\xff", b";", b"\xef\xbb\xbf"])
header = st.tuples(
    st.sampled_from([b">", b">", b"> ", b">\t", b">>", b"@", b";", b"#", b""]),
    st.text(string.ascii_letters + string.digits + "|. ", max_size=6).map(str.encode),
).map(b"".join)
piece = st.one_of(letters, letters, letters, header, header, odd)
files = st.lists(st.tuples(piece, line_end).map(b"".join), max_size=14).map(b"".join)


@settings(max_examples=600, deadline=None)
@given(content=st.one_of(files, st.binary(max_size=60)), chunk=st.integers(1, 40))
@example(content=b">a\r\r\nAC\r\n", chunk=1)
@example(content=b">a\n\rAC\n", chunk=2)
@example(content=b">a\nAC\r", chunk=4)
@example(content=b"\xef\xbb\xbf", chunk=1)
@example(content=b">\xc3\xa9\nA\n", chunk=2)
def test_parser_agrees_with_a_slow_one_or_refuses(content, chunk, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.fa"
    path.write_bytes(content)
    expected = slow_parse(content)
    try:
        records: list[tuple[str, bytes]] = []
        for item in scan_fasta(path, chunk=chunk):
            if isinstance(item, Header):
                records.append((item.name, b""))
            else:
                name, before = records[-1]
                records[-1] = (name, before + item)
    except GenoMoEError:
        assert expected is None
        return
    assert [(name, sequence.decode()) for name, sequence in records] == expected
    verdicts: list[Verdict] = []
    list(read_fasta(path, verdicts.append))
    assert all(verdict.level == "warn" for verdict in verdicts)


@settings(max_examples=300, deadline=None)
@given(content=files, spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=6))
@example(content=b">a\nACGT\nAC\n\n\n", spans=[(2, 6)])
@example(content=b">a\nACGT\nACGTA\n", spans=[(2, 6)])
@example(content=b">a\nAC\n\nACGT\n", spans=[(0, 6)])
def test_random_access_never_gives_a_wrong_base(content, spans, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz-index.fa"
    path.write_bytes(content)
    expected = slow_parse(content)
    try:
        indexed = Reference(path, in_memory=False)
    except GenoMoEError:
        return  # refused: even lines are needed
    for name, length in indexed.contigs.items():
        for start, size in spans:
            low, high = min(start, length), min(start + size, length)
            try:
                found = indexed.fetch(Interval(name, low, high)).decode()
            except GenoMoEError:
                assert expected is None or " " in content.decode("latin-1") or "\t" in content.decode("latin-1")
                continue
            if expected is not None:
                assert found == dict(expected)[name][low:high]


@settings(max_examples=300, deadline=None)
@given(content=files, row=st.integers(0, 5), column=st.integers(1, 4), change=st.integers(-3, 3))
def test_an_altered_index_is_noticed_or_harmless(content, row, column, change, tmp_path_factory):
    import warnings

    path = tmp_path_factory.getbasetemp() / "fuzz-fai.fa"
    path.write_bytes(content)
    expected = slow_parse(content)
    if expected is None:
        return
    try:
        index = index_fasta(path)
    except GenoMoEError:
        return
    rows = [[n, *map(int, c)] for n, *c in zip(index.names, *index[1:], strict=True)]
    rows[row % len(rows)][column] += change
    fai = path.with_name(path.name + ".fai")
    fai.write_text("".join("\t".join(map(str, line)) + "\n" for line in rows))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = Reference(path, in_memory=False)
        for name, sequence in expected:
            assert reference.contigs[name] == len(sequence)
            for start in range(0, len(sequence)):
                try:
                    found = reference.fetch(Interval(name, start, len(sequence))).decode()
                except GenoMoEError:
                    assert b" " in content or b"\t" in content or change
                    continue
                assert found == sequence[start:]
    finally:
        fai.unlink()
    assert PlainFile(str(path)).size == len(content)
