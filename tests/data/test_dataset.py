"""The stream is the same from files and store, for any number of workers and ranks, and it resumes exactly."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from small_corpora import write_fasta

from genomoe.data.build import build_corpus
from genomoe.data.datamodule import BatchLoader, GenomeDataModule
from genomoe.data.dataset import StreamingGenomeDataset
from genomoe.data.description import describe_paths, read_description
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.sampling import SamplingConfig
from genomoe.genome.alphabet import make_tokenizer
from genomoe.genome.errors import GenoMoEError, IntegrityError

MODES = {
    "stride": {"mode": "stride"},
    "overlapping": {"mode": "stride", "stride": 50},
    "random": {"mode": "random"},
    "replacement": {"mode": "random", "replacement": True, "samples_per_epoch": 500},
    "packed": {"mode": "stride", "pack": True},
}


def make(
    corpus, batch_size=4, context=96, tokenizer="nucleotide", pack=False, fill_last=True, drop_last=False, **options
):
    tokenizer = make_tokenizer(tokenizer)
    config = SamplingConfig(
        window=context * tokenizer.bases_per_token,
        **{"seed": 5, "block_bases": 400, "group_bases": 2000, "lanes": 3, "lane_run": batch_size, **options},
    )
    return StreamingGenomeDataset(
        corpus,
        config,
        tokenizer,
        batch_size=batch_size,
        context_length=context,
        pack=pack,
        pad_to_multiple=8 if pack else 1,
        fill_last=fill_last,
        drop_last=drop_last,
    )


def same(one, other) -> bool:
    for name in ("tokens", "labels", "weights", "cu_seqlens", "max_seqlen", "position_ids", "index", "tags"):
        a, b = getattr(one, name), getattr(other, name)
        if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
            return False
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            return False
    return True


def all_same(one, other) -> bool:
    one, other = list(one), list(other)
    return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def corpora(corpus_files, tmp_path):
    description = read_description(corpus_files)
    return FastaCorpus(description), build_corpus(description, tmp_path / "s.zarr")


@pytest.mark.parametrize("tokenizer", ["nucleotide", "byte", "kmer3"])
@pytest.mark.parametrize("mode", MODES)
def test_files_and_store_give_the_same_batches(corpora, mode, tokenizer):
    files, store = (make(corpus, tokenizer=tokenizer, **MODES[mode]) for corpus in corpora)
    assert all_same(files, store)
    files.set_epoch(1)
    assert not all_same(files, store)
    store.set_epoch(1)
    assert all_same(files, store)


@pytest.mark.parametrize(
    ("kind", "method", "workers"),
    [(k, "fork", w) for k in ("files", "store") for w in (1, 2, 3)] + [("files", "spawn", 1), ("store", "spawn", 2)],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_and_start_methods_change_nothing(corpora, kind, method, workers):
    corpus = corpora[kind == "store"]
    alone = list(make(corpus, **MODES["random"]))
    loader = BatchLoader(make(corpus, **MODES["random"]), num_workers=workers, start_method=method)
    assert all_same(alone, loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_program_s_random_numbers_alone(corpora, workers):
    before = torch.get_rng_state()
    assert list(BatchLoader(make(corpora[1]), num_workers=workers))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_processes_live_over_epochs_and_interrupted_iterations(corpora, method):
    alone = BatchLoader(make(corpora[1]))
    shared = BatchLoader(make(corpora[1]), num_workers=2, start_method=method)
    assert all_same(alone, shared)
    assert all_same(alone, shared)  # the second epoch
    for loader in (alone, shared):
        for number, _ in enumerate(loader):  # the third one, left after five batches
            loader.dataset.advance()
            if number == 4:
                break
        assert (loader.dataset.epoch, loader.dataset.consumed) == (2, 5)
    rest = list(alone)
    assert rest[0].index[0] == 20
    assert all_same(rest, shared)
    assert all_same(alone, shared)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_an_epoch(corpora, mode, ranks):
    single = list(make(corpora[1], **MODES[mode]))
    shards = []
    for rank in range(ranks):
        dataset = make(corpora[1], **MODES[mode])
        dataset.set_shard(rank, ranks)
        shards.append(list(dataset))
        assert len(shards[-1]) == len(dataset)
    merged = [shards[number % ranks][number // ranks] for number in range(ranks * len(shards[0]))]
    assert all_same(single, merged[: len(single)])
    for filler in merged[len(single) :]:
        assert (filler.index == -1).all()
        assert (filler.weights == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_stream_continues_after_every_batch(corpora, mode):
    whole = list(make(corpora[1], **MODES[mode]))
    for used in range(0, len(whole), 7):
        first = make(corpora[0], **MODES[mode])
        for _ in range(used):
            first.advance()
        state = json.loads(json.dumps(first.state_dict()))
        resumed = make(corpora[0], **MODES[mode])
        resumed.load_state_dict(state)
        assert len(resumed) == len(whole)
        assert all_same(resumed, whole[used:])


def test_a_whole_epoch_used_means_the_next_one(corpora):
    dataset = make(corpora[1])
    for _ in range(len(dataset)):
        dataset.advance()
    again = make(corpora[1])
    again.load_state_dict(dataset.state_dict())
    assert (again.epoch, again.consumed, again.steps) == (1, 0, 0)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1), (4, 2)])
def test_another_number_of_ranks_loses_nothing_and_repeats_nothing(corpora, before, after):
    steps = 3
    seen = []
    for rank in range(before):
        dataset = make(corpora[1])
        dataset.set_shard(rank, before)
        for _, batch in zip(range(steps), dataset, strict=False):
            seen.append(batch.index)
        for _ in range(steps):
            dataset.advance()
    state = dataset.state_dict()
    lengths = set()
    for rank in range(after):
        resumed = make(corpora[1])
        resumed.set_shard(rank, after)
        resumed.load_state_dict(state)
        batches = list(resumed)
        lengths.add(len(batches))
        assert len(resumed) == steps + len(batches)
        seen.extend(batch.index for batch in batches)
    assert len(lengths) == 1
    index = torch.cat(seen)
    assert torch.equal(index[index >= 0].sort().values, torch.arange(len(dataset.plan())))


def test_a_changed_file_or_setting_is_refused_by_name(corpus_files, tmp_path):
    def dataset(**options):
        return make(FastaCorpus(read_description(corpus_files)), **options)

    state = dataset().state_dict()
    dataset().load_state_dict(state)
    with pytest.raises(GenoMoEError, match=r"seed: 5 then, 6 now"):
        dataset(seed=6).load_state_dict(state)
    with pytest.raises(GenoMoEError, match="batch_size"):
        dataset(batch_size=8, lane_run=4).load_state_dict(state)
    with pytest.raises(GenoMoEError, match="tokenizer"):
        dataset(tokenizer="byte").load_state_dict(state)
    with pytest.raises(IntegrityError, match="version"):
        dataset().load_state_dict({**state, "version": 0})
    text = (tmp_path / "a.fa").read_bytes()
    (tmp_path / "a.fa").write_bytes(text.replace(b"ACG", b"ACT", 1))
    with pytest.raises(IntegrityError, match=r"a\.fa changed"):
        dataset().load_state_dict(state)
    (tmp_path / "a.fa").write_bytes(text)
    (tmp_path / "b.extra.fa").write_bytes(b">b9\n" + b"ACGT" * 100 + b"\n")
    with pytest.raises(IntegrityError, match=r"b\.extra\.fa joined"):
        dataset().load_state_dict(state)


def test_a_store_continues_what_its_files_began(corpora):
    """Only contents are compared, not paths: the same data may be read from files first and from a store later."""
    files, store = (make(corpus) for corpus in corpora)
    for _ in range(4):
        files.advance()
    store.load_state_dict(files.state_dict())
    assert all_same(files, store)


def test_short_contigs_are_padded_and_padding_weighs_nothing(tmp_path):
    path = write_fasta(tmp_path / "x.fa", {"a": b"ACGTA", "b": b"CC", "c": b"G"})
    (batch,) = list(make(FastaCorpus([str(path)]), context=8, mode="stride", reverse_complement=0, shuffle=False))
    assert batch.tokens.tolist() == [
        [4, 5, 6, 7, 4, 0, 0, 0],
        [5, 5, 0, 0, 0, 0, 0, 0],
        [6, 0, 0, 0, 0, 0, 0, 0],
        [0] * 8,
    ]
    assert batch.labels.tolist() == [[5, 6, 7, 4, 0, 0, 0, 0], [5] + [0] * 7, [0] * 8, [0] * 8]
    assert batch.weights.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0], [1] + [0] * 7, [0] * 8, [0] * 8]
    assert batch.index.tolist() == [0, 1, 2, -1]
    assert batch.tags == ("x.fa", "x.fa", "x.fa", "")


def test_last_batch_filled_short_or_dropped(tmp_path):
    path = write_fasta(tmp_path / "x.fa", {"a": b"ACGT" * 16})
    corpus = FastaCorpus([str(path)])
    options = {"context": 8, "batch_size": 3, "mode": "stride"}
    filled, short, dropped = (
        list(make(corpus, **options)),
        list(make(corpus, fill_last=False, **options)),
        list(make(corpus, drop_last=True, **options)),
    )
    assert [len(batch.index) for batch in filled] == [3, 3, 3]
    assert filled[-1].index.tolist() == [6, 7, -1]
    assert [len(batch.index) for batch in short] == [3, 3, 2]
    assert [len(batch.index) for batch in dropped] == [3, 3]


def test_lower_case_genomes_and_iupac_weights(tmp_path):
    path = write_fasta(tmp_path / "x.fa", {"a": b"acgtnracgtA"})
    (batch,) = list(
        make(FastaCorpus([str(path)]), context=11, batch_size=1, mode="stride", reverse_complement=0, shuffle=False)
    )
    assert batch.weights[0].tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0]  # case is no masking here; N and R only are 0
    path = write_fasta(tmp_path / "y.fa", {"a": b"acgtnRACGT"})
    (batch,) = list(
        make(FastaCorpus([str(path)]), context=10, batch_size=1, mode="stride", reverse_complement=0, shuffle=False)
    )
    assert batch.weights[0].tolist() == pytest.approx([0.1, 0.1, 0.1, 0, 0, 1, 1, 1, 1, 0])


def test_kmer_windows_follow_the_remainder_rule(tmp_path):
    path = write_fasta(tmp_path / "x.fa", {"a": b"ACGTACGTAC", "b": b"ACNTT"})
    dataset = make(
        FastaCorpus([str(path)]), context=4, batch_size=2, tokenizer="kmer3", mode="stride", reverse_complement=0,
        shuffle=False,
    )  # fmt: skip
    (batch,) = list(dataset)
    tokenizer = dataset.tokenizer
    assert batch.tokens[0].tolist() == tokenizer.encode("ACGTACGTAC").tolist()
    assert batch.tokens[1].tolist() == [*tokenizer.encode("ACNTT").tolist(), 0]
    assert batch.weights[1].tolist() == [1, 1, 0, 0]
    packed = make(
        FastaCorpus([str(path)]), context=4, batch_size=2, tokenizer="kmer3", mode="stride", reverse_complement=0,
        shuffle=False, pack=True,
    )  # fmt: skip
    (batch,) = list(packed)
    assert batch.tokens[:4].tolist() == tokenizer.encode("ACGTACGTAC").tolist()
    assert batch.cu_seqlens.tolist() == [0, 8, 16]


def test_batches_that_are_kept_stay_what_they_were(corpora):
    dataset = make(corpora[1])
    kept = list(BatchLoader(dataset))
    fresh = make(corpora[1])
    bounds = fresh.bounds()
    for number, batch in enumerate(kept):
        assert same(batch, fresh.make_batch(int(bounds[number]), int(bounds[number + 1])))


def test_memory_is_bounded_by_the_setting(tmp_path):
    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"ACGT"), 2_000_000).astype(np.uint8).tobytes()
    corpus = FastaCorpus([str(write_fasta(tmp_path / "x.fa", {"x": letters}))])
    dataset = make(corpus, context=1000, block_bases=20_000, group_bases=100_000, lanes=2)
    held = []
    from genomoe.data import dataset as module

    class Watched(module.BlockCache):
        def get(self, block, start, end):
            found = super().get(block, start, end)
            held.append(self._held)
            return found

    original, module.BlockCache = module.BlockCache, Watched
    try:
        for _ in dataset:
            pass
    finally:
        module.BlockCache = original
    assert max(held) <= dataset.cache_bases(1) < 0.25 * len(letters)


def test_resident_memory_is_flat_over_an_epoch(tmp_path):
    """A corpus of 64 Mb read with a cache of about 4 Mb: what the process holds does not grow with what it has read."""
    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"ACGT"), 64_000_000).astype(np.uint8).tobytes()
    store = build_corpus(describe_paths([str(write_fasta(tmp_path / "x.fa", {"x": letters}))]), tmp_path / "s.zarr")
    del letters
    dataset = make(store, batch_size=16, context=8192, block_bases=1 << 18, group_bases=1 << 20)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    held = [resident() for number, _ in enumerate(dataset) if number >= 100]
    assert len(held) > 300
    assert max(held) - held[0] < 24_000_000


def test_each_block_is_decoded_once_whatever_the_number_of_workers(tmp_path):
    rng = np.random.default_rng(0)
    letters = rng.choice(list(b"ACGT"), 4_000_000).astype(np.uint8).tobytes()
    corpus = FastaCorpus([str(write_fasta(tmp_path / "x.fa", {"x": letters}))])

    def bases_read(workers: int) -> int:
        total = 0
        for worker in range(workers):
            dataset = make(corpus, context=500, block_bases=20_000, group_bases=100_000, lanes=4)
            dataset.set_shard(worker, workers)  # ranks stride over batches exactly as workers do
            read, count = corpus.read, 0

            def counted(start, end, read=read):
                nonlocal count
                count += end - start
                return read(start, end)

            corpus.read = counted
            for _ in dataset:
                pass
            corpus.read = read
            total += count
        return total

    assert bases_read(1) < 1.02 * len(letters)  # windows across the border of two blocks make no base come twice
    for workers in (2, 4):
        assert bases_read(workers) < 1.5 * len(letters)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"context_length": 1},
        {"num_workers": -1},
        {"soft_mask_weight": 2},
        {"seed": "x"},
        {"tokenizer": "words"},
        {"train": []},
        {"split": {"by": "species"}},
        {"train": ["missing.fa"]},
    ],
)
def test_bad_settings_are_one_sentence(options, tmp_path):
    path = write_fasta(tmp_path / "x.fa", {"a": b"ACGT" * 50})
    with pytest.raises(GenoMoEError):
        GenomeDataModule(**{"train": [str(path)], "context_length": 8, **options}).setup()
