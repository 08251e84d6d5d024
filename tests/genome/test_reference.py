"""Reference against pyfaidx: every interval, every way of reading, and files that change under it."""

import gzip
import multiprocessing
import os
import pickle
import warnings

import numpy as np
import pyfaidx
import pytest
from pysam import BGZFile

from genomoe.genome.coordinates import Interval, Variant
from genomoe.genome.errors import GenoMoEError, InputError, IntegrityError
from genomoe.genome.fasta import Reference


def fasta_text(seed: int = 0, widths=(60, 7, 1), lengths=(1000, 61, 60, 1, 5), line_end: bytes = b"\n") -> bytes:
    rng = np.random.default_rng(seed)
    out = []
    for number, length in enumerate(lengths):
        letters = rng.choice(list(b"ACGTNacgtnRY"), length).astype(np.uint8).tobytes()
        width = widths[number % len(widths)]
        out.append(b">c%d some words" % number + line_end)
        out.extend(letters[i : i + width] + line_end for i in range(0, length, width))
    return b"".join(out)


@pytest.fixture(params=["memory", "plain", "bgzip", "gzip", "crlf"])
def opened(request, tmp_path):
    """A Reference read in each way, beside pyfaidx on the plain file."""
    text = fasta_text(line_end=b"\r\n" if request.param == "crlf" else b"\n")
    plain = tmp_path / "oracle.fa"
    plain.write_bytes(text)
    path = tmp_path / "read.fa"
    if request.param == "bgzip":
        with BGZFile(str(path), "wb") as out:
            for start in range(0, len(text), 100):  # many small blocks
                out.write(text[start : start + 100])
                out.flush()
    else:
        path.write_bytes(gzip.compress(text) if request.param == "gzip" else text)
    indexed = request.param in ("plain", "bgzip", "crlf")
    return Reference(path, in_memory=False if indexed else None), pyfaidx.Fasta(str(plain), sequence_always_upper=False)


def test_every_interval_is_pyfaidx_s(opened):
    reference, oracle = opened
    assert reference.contigs == {name: len(oracle[name]) for name in oracle.keys()}  # noqa: SIM118 - not a dict
    rng = np.random.default_rng(1)
    for name, length in reference.contigs.items():
        spans = [(0, length), (0, 1), (length - 1, length), (length, length)]
        spans += [tuple(sorted(rng.integers(0, length + 1, 2).tolist())) for _ in range(60)]
        for start, end in spans:
            expected = str(oracle[name][start:end]) if end > start else ""
            assert reference.fetch(Interval(name, start, end)).decode() == expected
            if end > start:
                other_strand = str(-oracle[name][start:end])
                assert reference.fetch(Interval(name, start, end, "-")).decode() == other_strand


def test_padding_and_ends(opened):
    reference, _ = opened
    whole = reference.fetch(Interval("c4", 0, 5))
    from genomoe.genome.alphabet import reverse_complement

    assert reference.fetch(Interval("c4", 3, 9), pad=True) == whole[3:] + b"NNNN"
    assert reference.fetch(Interval("c4", 3, 9, "-"), pad=True) == b"NNNN" + reverse_complement(whole[3:])
    assert reference.fetch(Interval("c4", 20, 23), pad=True) == b"NNN"
    with pytest.raises(GenoMoEError, match="5 bases"):
        reference.fetch(Interval("c4", 3, 9))
    with pytest.raises(GenoMoEError, match="nearest names"):
        reference.fetch(Interval("c44", 0, 1))


def test_negative_starts_can_be_padded(tmp_path):
    (tmp_path / "a.fa").write_bytes(b">a\nACGT\n")
    reference = Reference(tmp_path / "a.fa")
    assert reference.fetch(Interval("a", -2, 3), pad=True) == b"NNACG"
    with pytest.raises(GenoMoEError, match="beyond"):
        reference.fetch(Interval("a", -2, 3))


def test_check_ref(tmp_path):
    (tmp_path / "a.fa").write_bytes(b">a\nACgtN\n")
    reference = Reference(tmp_path / "a.fa")
    reference.check_ref(Variant("a", 2, "GT", "G"))
    with pytest.raises(GenoMoEError, match="gives REF A but"):
        reference.check_ref(Variant("a", 2, "A", "G"))
    with pytest.raises(GenoMoEError, match="has 5 bases"):
        reference.check_ref(Variant("a", 4, "NN", "G"))


def _fetch(reference, results):
    results.put(reference.fetch(Interval("c0", 100, 300)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes_read_the_same(opened, method):
    reference, oracle = opened
    reference.fetch(Interval("c0", 0, 10))  # the handle is open before the processes start
    context = multiprocessing.get_context(method)
    results = context.Queue()
    workers = [context.Process(target=_fetch, args=(reference, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join()
    assert {text.decode() for text in found} == {str(oracle["c0"][100:300])}


def test_a_file_changed_between_processes_is_noticed(opened):
    reference, _ = opened
    copy = pickle.loads(pickle.dumps(reference))
    assert copy.fetch(Interval("c0", 5, 50)) == reference.fetch(Interval("c0", 5, 50))
    late = pickle.loads(pickle.dumps(reference))
    os.utime(reference.path, ns=(1, 1))
    with pytest.raises(IntegrityError, match="changed"):
        late.fetch(Interval("c0", 5, 50))


def test_a_stale_index_is_left_aside(tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(fasta_text())
    pyfaidx.Faidx(str(path))
    assert (tmp_path / "a.fa.fai").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Reference(path, in_memory=False)  # a fresh index is used without a word
    path.write_bytes(fasta_text(widths=(50, 9)))
    os.utime(tmp_path / "a.fa.fai")  # newer than the file: times prove nothing
    with pytest.warns(UserWarning, match="does not belong"):
        reference = Reference(path, in_memory=False)
    in_memory = Reference(path, in_memory=True)
    for name, length in in_memory.contigs.items():
        assert reference.fetch(Interval(name, 0, length)) == in_memory.fetch(Interval(name, 0, length))


def test_an_unreadable_index_and_an_unwritable_folder_do_not_matter(tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(fasta_text())
    (tmp_path / "a.fa.fai").write_text("rubbish\n")
    tmp_path.chmod(0o555)
    try:
        with pytest.warns(UserWarning, match="not a readable index"):
            reference = Reference(path, in_memory=False)
        assert len(reference.fetch(Interval("c0", 0, 1000))) == 1000
        assert sorted(file.name for file in tmp_path.iterdir()) == ["a.fa", "a.fa.fai"]
    finally:
        tmp_path.chmod(0o755)


def test_uneven_lines_are_read_in_memory_or_refused(tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(b">a\nACGT\nAC\nACGT\n")
    with pytest.raises(InputError, match="corpus build"):
        Reference(path, in_memory=False)
    assert Reference(path).fetch(Interval("a", 0, 10)) == b"ACGTACACGT"


def test_gzip_by_position_says_what_to_run(tmp_path):
    path = tmp_path / "a.fa.gz"
    path.write_bytes(gzip.compress(fasta_text()))
    with pytest.raises(GenoMoEError, match="bgzip"):
        Reference(path, in_memory=False)


def test_a_bad_letter_is_noticed_when_it_is_fetched(tmp_path):
    path = tmp_path / "a.fa"
    path.write_bytes(b">a\nACGT\nAC-T\nACGT\n")
    reference = Reference(path, in_memory=False)
    assert reference.fetch(Interval("a", 0, 4)) == b"ACGT"
    with pytest.raises(InputError, match="corpus validate"):
        reference.fetch(Interval("a", 2, 8))


def test_positions_past_two_to_the_31(tmp_path):
    """A sparse file of one record of 2^31 + 3,000 bases, of which only the two ends are on the disk."""
    path = tmp_path / "huge.fa"
    length = (1 << 31) + 3000
    tail = b"ACGTTGCA" * 250
    with open(path, "wb") as out:
        out.write(b">huge\n" + b"GATTACA")
        out.seek(6 + length - len(tail))
        out.write(tail + b"\n>next\nTTTT\n")
    (tmp_path / "huge.fa.fai").write_text(
        f"huge\t{length}\t6\t{length}\t{length + 1}\nnext\t4\t{6 + length + 7}\t4\t5\n"
    )
    reference = Reference(path, in_memory=False)
    assert reference.contigs == {"huge": length, "next": 4}
    assert reference.fetch(Interval("huge", 0, 7)) == b"GATTACA"
    assert reference.fetch(Interval("huge", length - 2000, length)) == tail
    assert reference.fetch(Interval("huge", (1 << 31) + 1001, (1 << 31) + 1009)) == tail[1:9]
    assert reference.fetch(Interval("next", 0, 4)) == b"TTTT"
    with pytest.raises(InputError):
        reference.fetch(Interval("huge", 1000, 1010))  # a hole holds zero bytes, which are no bases


def test_thousands_of_files_need_few_descriptors(tmp_path):
    references = []
    for number in range(1500):
        (tmp_path / f"{number}.fa").write_bytes(b">c\n" + b"ACGT"[number % 4 : number % 4 + 1] * 9 + b"\n")
        references.append(Reference(tmp_path / f"{number}.fa", in_memory=False))
    for _ in range(2):
        for number, reference in enumerate(references):
            assert reference.fetch(Interval("c", 2, 5)) == b"ACGT"[number % 4 : number % 4 + 1] * 3
    if os.path.isdir("/proc/self/fd"):
        assert len(os.listdir("/proc/self/fd")) < 300


def test_ten_thousand_contigs_open_quickly(tmp_path):
    path = tmp_path / "many.fa"
    path.write_bytes(b"".join(b">c%d\nACGT\nAC\n" % n for n in range(10_000)))
    reference = Reference(path, in_memory=False)
    assert len(reference.contigs) == 10_000
    assert reference.fetch(Interval("c9999", 3, 6)) == b"TAC"
