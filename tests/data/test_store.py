"""The store gives what the files give, appears whole or not at all, and notices every change."""

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpora import write_fasta

from genomoe.data import build as build_module
from genomoe.data import parse as parse_module
from genomoe.data.build import build_corpus
from genomoe.data.corpus import apply_letters, apply_mask, join_runs, letter_runs, lower_case_runs
from genomoe.data.description import describe_paths, read_description
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.open import open_corpus
from genomoe.data.shards import open_shards
from genomoe.data.store import FORMAT, ZarrCorpus, pack, unpack
from genomoe.genome.errors import GenoMoEError, InputError, IntegrityError


@pytest.mark.parametrize("workers", [1, 2])
def test_store_and_files_are_the_same_corpus(corpus_files, tmp_path, workers):
    description = read_description(corpus_files)
    files = FastaCorpus(description)
    store = build_corpus(description, tmp_path / "s.zarr", workers=workers)
    assert store.sources == files.sources
    assert store.contigs.names == files.contigs.names == ["a0", "a3", "b0", "b1", "c0"]
    assert np.array_equal(store.contigs.offsets, files.contigs.offsets)
    for one, other in zip(store.segments, files.segments, strict=True):
        assert np.array_equal(one, other)
    total = int(files.contigs.lengths.sum())
    whole = files.read(0, total)
    assert np.array_equal(store.read(0, total), whole)
    rng = np.random.default_rng(0)
    for start, end in np.sort(rng.integers(0, total + 1, (200, 2)), axis=1).tolist():
        assert np.array_equal(store.read(start, end), whole[start:end])
        assert np.array_equal(files.read(start, end), whole[start:end])
    assert store.fingerprint() == {str(Path(k).resolve()): v for k, v in files.fingerprint().items()}
    store.verify()
    assert not list(tmp_path.glob(".s.zarr*"))


def test_filters_regions_and_case_do_what_they_say(corpus_files):
    corpus = FastaCorpus(read_description(corpus_files))
    offset = dict(zip(corpus.contigs.names, corpus.contigs.offsets.tolist(), strict=True))
    spans = [
        (int(start), int(end), corpus.sources[source].name) for start, end, source in zip(*corpus.segments, strict=True)
    ]
    b0, b1 = offset["b0"], offset["b1"]
    assert [span[:2] for span in spans if span[2] == "second"] == [
        (b0 + 100, b0 + 600),
        (b1, b1 + 6000),
        (b1 + 9000, b1 + 12_000),
    ]
    c0 = offset["c0"]  # all lower-case: no masking, except what the BED file says
    letters = corpus.read(c0, c0 + 8000)
    lower = np.flatnonzero(letters >= 97)
    assert (lower.min(), lower.max(), len(lower)) == (10, 699, 690)
    assert corpus.sources[1].weight == 2
    assert [source.split for source in corpus.sources] == [None, "valid", "test"]
    assert dict(corpus.sources[0].tags) == {"species": "one"}


@given(st.text("ACGTNRYK", max_size=50), st.integers(0, 10**12))
def test_two_bits_and_letter_runs_keep_every_letter(text, start):
    letters = text.encode()
    again = unpack(pack(letters))[: len(letters)].copy()
    apply_letters(again, start, letter_runs(np.frombuffer(letters, dtype=np.uint8), start))
    assert again.tobytes() == letters


@settings(max_examples=200)
@given(st.lists(st.text("acgtACGT", max_size=30), min_size=1, max_size=6), st.integers(0, 10**12), st.data())
def test_mask_runs_keep_every_case(pieces, start, data):
    runs, place = [], start
    for piece in pieces:
        runs.append(lower_case_runs(np.frombuffer(piece.encode(), dtype=np.uint8), place))
        place += len(piece)
    joined = join_runs(runs)
    text = "".join(pieces)
    low = data.draw(st.integers(0, len(text)))
    high = data.draw(st.integers(low, len(text)))
    letters = np.frombuffer(text[low:high].upper().encode(), dtype=np.uint8).copy()
    apply_mask(letters, start + low, joined)
    assert letters.tobytes().decode() == text[low:high]


def test_many_letter_runs_take_the_vectorised_way():
    letters = np.frombuffer((b"ACGTN" * 1000) + b"RR", dtype=np.uint8)
    runs = letter_runs(letters, 5)
    again = unpack(pack(letters.tobytes()))[: len(letters)].copy()
    apply_letters(again, 5, runs)
    assert np.array_equal(again, letters)
    part = again[3:4000].copy()
    part[part == ord("N")] = ord("A")
    apply_letters(part, 8, runs)
    assert np.array_equal(part, letters[3:4000])


@pytest.fixture
def store(tmp_path):
    rng = np.random.default_rng(3)
    for name in ("x", "y"):
        letters = rng.choice(list(b"ACGTacgtN"), 3000).astype(np.uint8).tobytes()
        write_fasta(tmp_path / f"{name}.fa", {name: letters})
    build_corpus(describe_paths(str(tmp_path / "*.fa")), tmp_path / "s.zarr")
    return tmp_path / "s.zarr"


def test_a_changed_source_is_noticed_at_open(store):
    source = store.parent / "x.fa"
    os.utime(source)
    ZarrCorpus(store)  # another time, the same content
    text = bytearray(source.read_bytes())
    text[20] = ord("A") if text[20] != ord("A") else ord("C")
    source.write_bytes(text)
    with pytest.raises(IntegrityError, match=r"x\.fa changed since"):
        ZarrCorpus(store)
    with pytest.warns(UserWarning, match=r"x\.fa changed since"):
        ZarrCorpus(store, on_changed_source="warn")
    source.unlink()
    ZarrCorpus(store).verify()  # a store may travel without its sources


def test_another_format_a_damaged_table_and_a_damaged_chunk_are_noticed(store):
    attributes = store / "zarr.json"
    good = attributes.read_text()
    attributes.write_text(good.replace(f'"format": {FORMAT}', '"format": 99'))
    with pytest.raises(IntegrityError, match="format 99"):
        ZarrCorpus(store)
    attributes.write_text(good)
    group = zarr.open_group(str(store), mode="r+")
    contigs = group["contigs"][:]
    group["contigs"][:] = contigs + 1
    with pytest.raises(IntegrityError, match="contigs is damaged"):
        ZarrCorpus(store)
    group["contigs"][:] = contigs
    shard = next(path for path in (store / "sequence" / "c").iterdir())
    data = bytearray(shard.read_bytes())
    data[len(data) // 4] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        ZarrCorpus(store).verify()
    shard.unlink()
    with pytest.raises(IntegrityError, match="isn't the one that was built"):
        ZarrCorpus(store).verify()


def test_what_is_no_store_says_so(tmp_path):
    (tmp_path / "x.zarr").mkdir()
    with pytest.raises(GenoMoEError, match="not a corpus store"):
        open_corpus(str(tmp_path / "x.zarr"))
    with pytest.raises(GenoMoEError, match="does not exist"):
        open_corpus(str(tmp_path / "y.zarr"))
    zarr.create_group(str(tmp_path / "z.zarr"))
    with pytest.raises(GenoMoEError, match="not a corpus store"):
        ZarrCorpus(tmp_path / "z.zarr")


def _read(corpus, results):
    results.put(corpus.read(1234, 4321).tobytes())


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_share_a_store(store, method):
    corpus = ZarrCorpus(store)
    expected = corpus.read(1234, 4321).tobytes()  # the parent has read, so its threads run
    context = multiprocessing.get_context(method)
    results = context.Queue()
    workers = [context.Process(target=_read, args=(corpus, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    assert all(results.get(timeout=120) == expected for _ in workers)
    for worker in workers:
        worker.join()
    assert pickle.loads(pickle.dumps(corpus)).read(1234, 4321).tobytes() == expected


def test_the_shard_reader_gives_what_zarr_gives(tmp_path):
    from zarr.codecs import Crc32cCodec, ZstdCodec

    rng = np.random.default_rng(0)
    values = rng.integers(0, 4, 10_000).astype(np.uint8)
    values[2000:4700] = 0  # whole chunks and a whole shard of fill value, which are not written
    group = zarr.create_group(str(tmp_path / "g"))
    array = group.create_array(
        "sequence", shape=(10_000,), dtype="uint8", chunks=(100,), shards=(800,), fill_value=0,
        compressors=[ZstdCodec(level=1), Crc32cCodec()],
    )  # fmt: skip
    array[:] = values
    reader = open_shards(tmp_path / "g" / "sequence")
    assert reader is not None
    for low, high in [(0, 10_000), (9_990, 10_000), *np.sort(rng.integers(0, 10_001, (200, 2)), axis=1).tolist()]:
        assert np.array_equal(reader.read(low, high), values[low:high])
        assert np.array_equal(pickle.loads(pickle.dumps(reader)).read(low, high), array[low:high])
    (shard,) = [path for path in (tmp_path / "g" / "sequence" / "c").iterdir() if path.name == "1"]
    data = shard.read_bytes()
    for place in (5, len(data) - 3, len(data) - 40):
        broken = bytearray(data)
        broken[place] ^= 4
        shard.write_bytes(broken)
        with pytest.raises(IntegrityError, match="checksum"):
            open_shards(tmp_path / "g" / "sequence").read(800, 1600)


def test_another_layout_is_read_by_zarr(tmp_path, store):
    group = zarr.open_group(str(store), mode="r+")
    packed = group["sequence"][:]
    expected = ZarrCorpus(store).read(0, 6000)
    shutil.rmtree(store / "sequence")
    group.create_array("sequence", shape=packed.shape, dtype="uint8", chunks=(500,), fill_value=0)[:] = packed
    assert open_shards(store / "sequence") is None
    corpus = ZarrCorpus(store)
    assert np.array_equal(corpus.read(0, 6000), expected)
    corpus.verify()


def test_a_failed_build_leaves_nothing_and_an_existing_store_stays(store, tmp_path):
    before = ZarrCorpus(store).attributes["sequence_sha256"]
    bad = tmp_path / "bad.fasta"
    bad.write_bytes(b">a\nACGT\nAC-T\n")
    with pytest.raises(InputError, match=r"bad\.fasta:3: "):
        build_corpus(describe_paths([str(bad)]), tmp_path / "new.zarr")
    with pytest.raises(InputError):
        build_corpus(describe_paths([str(bad)]), store, overwrite=True)
    with pytest.raises(GenoMoEError, match="exists"):
        build_corpus(describe_paths([str(tmp_path / "x.fa")]), store)
    assert not (tmp_path / "new.zarr").exists()
    assert not list(tmp_path.glob(".*building*"))
    assert ZarrCorpus(store).attributes["sequence_sha256"] == before
    good = build_corpus(describe_paths([str(tmp_path / "x.fa")]), store, overwrite=True)
    assert good.contigs.names == ["x"]


def test_a_killed_build_leaves_no_store(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(40):
        letters = rng.choice(list(b"ACGT"), 500_000).astype(np.uint8).tobytes()
        write_fasta(tmp_path / f"{number}.fa", {f"c{number}": letters})
    out = tmp_path / "s.zarr"
    command = [sys.executable, "-m", "genomoe", "corpus", "build", str(tmp_path), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".s.zarr.building-*/raw/3*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    subprocess.run(command, check=True, capture_output=True)
    assert len(ZarrCorpus(out).contigs.names) == 40


def test_a_file_that_changes_while_it_is_parsed_is_refused(tmp_path, monkeypatch):
    path = write_fasta(tmp_path / "x.fa", {"x": b"ACGT" * 100})
    parse = parse_module.scan_sequences

    def slow(*arguments):
        yield from parse(*arguments)
        write_fasta(path, {"x": b"ACGT" * 101})

    monkeypatch.setattr(parse_module, "scan_sequences", slow)
    with pytest.raises(IntegrityError, match="while it was being read"):
        build_corpus(describe_paths([str(path)]), tmp_path / "s.zarr")


def test_contigs_past_two_to_the_31_bases(tmp_path, monkeypatch):
    """A store of 2^31 + 10^6 bases of which only the last shard is written: the rest reads as its fill value."""
    length = (1 << 31) + 1_000_000
    path = write_fasta(tmp_path / "x.fa", {"x": b"ACGTN" * 200_000})
    small = build_corpus(describe_paths([str(path)]), tmp_path / "small.zarr")
    tail = small.read(0, 1_000_000)
    huge = tmp_path / "huge.zarr"
    shutil.copytree(tmp_path / "small.zarr", huge)
    shutil.rmtree(huge / "sequence")
    group = zarr.open_group(str(huge), mode="r+")
    array = group.create_array(
        "sequence", shape=(length // 4,), dtype="uint8", chunks=(1 << 17,), shards=(1 << 22,), fill_value=0
    )
    array[(1 << 31) // 4 :] = pack(tail.tobytes().replace(b"N", b"A"))
    tables = {
        "contigs": np.array([[length, 0, 0, 0, 0, 0]], dtype=np.int64),
        "segments": np.array([[0, length, 0]], dtype=np.int64),
        "letters": small.letters + np.array([1, 1, 0]) * (1 << 31),
    }
    attributes = json.loads(json.dumps(small.attributes))
    for name, values in tables.items():
        del group[name]
        made = group.create_array(name, shape=values.shape, dtype="int64", chunks=values.shape)
        made[:] = values
        attributes["table_sha256"][name] = build_module.array_sha256(values)
    group.attrs["genomoe"] = attributes
    corpus = ZarrCorpus(huge)
    assert np.array_equal(corpus.read(1 << 31, length), tail)
    assert corpus.read((1 << 31) - 3, (1 << 31) + 4).tobytes() == b"AAA" + tail[:4].tobytes()

    from genomoe.data.dataset import StreamingGenomeDataset
    from genomoe.data.sampling import SamplingConfig
    from genomoe.genome.alphabet import NucleotideTokenizer

    config = SamplingConfig(window=1 << 20, mode="stride", shuffle=False, reverse_complement=0.0)
    dataset = StreamingGenomeDataset(corpus, config, NucleotideTokenizer(), batch_size=1, context_length=1 << 20)
    last = dataset.make_batch(len(dataset.plan()) - 1, len(dataset.plan()))
    shown = dataset.tokenizer.decode(last.tokens[0].numpy())
    assert shown == tail[len(tail) - len(shown) :].tobytes().decode()
