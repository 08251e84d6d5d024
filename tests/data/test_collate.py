"""Codes: what they are widened to, on the CPU and elsewhere, and that only they travel."""

import pickle
import threading

import numpy as np
import pytest
import torch

from genomoe.data.collate import CACHEFUL, ArrayPool, Batch, Encoder, widen_anywhere, widen_on_cpu
from genomoe.genome.alphabet import KmerTokenizer, make_tokenizer, reverse_complement

LETTERS = np.frombuffer(b"ACGTacgtNnRU", dtype=np.uint8)


def made(tokenizer, lengths, sizes, packed, seed=0) -> tuple[Batch, list[bytes]]:
    """A batch of random letters, and the letters of each sequence."""
    rng = np.random.default_rng(seed)
    encoder = Encoder(tokenizer, 0.1)
    lengths, sizes = np.array(lengths), np.array(sizes)
    room = sizes * tokenizer.bases_per_token
    starts = np.cumsum(room) - room
    texts = [rng.choice(LETTERS, length) for length in lengths]
    codes = np.full(int(room.sum()), encoder.pad_id, dtype=np.uint8)
    for text, start in zip(texts, starts.tolist(), strict=True):
        encoder.encode(text, codes[start : start + len(text)])
    batch = encoder.batch(
        codes, starts=starts, lengths=lengths, sizes=sizes, packed=packed, index=np.arange(len(sizes))
    )
    return batch, [text.tobytes() for text in texts]


SHAPES = {
    "packed": ([1, 7, 40, 3], [2, 7, 44, 3], True),
    "packed, odd": ([5], [5], True),
    "fixed": ([12, 5, 0], [12, 12, 12], False),
    "fixed, odd": ([11], [11], False),
    "more than a cacheful": ([CACHEFUL + 1, CACHEFUL], [CACHEFUL + 1, CACHEFUL + 8], True),
}


@pytest.mark.parametrize("name", ["nucleotide", "byte", "kmer2", "kmer3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_widening_with_numpy_equals_widening_with_pytorch(shape, name):
    batch, _ = made(make_tokenizer(name), *SHAPES[shape])
    for _ in range(3):  # the later ones in memory that was used before
        fast = widen_on_cpu(batch.codes, batch.cu_seqlens, batch.coding)
        slow = widen_anywhere(batch.codes, batch.cu_seqlens, batch.coding)
        for field in fast._fields:
            one, other = getattr(fast, field), getattr(slow, field)
            assert (one is None) == (other is None) == (field == "position_ids" and not SHAPES[shape][2])
            if one is not None:
                assert one.dtype == other.dtype, field
                assert torch.equal(one, other), field
                one.fill_(-77)
        del fast


@pytest.mark.parametrize("name", ["nucleotide", "byte"])
@pytest.mark.parametrize("shape", SHAPES)
def test_widened_codes_are_what_the_letters_say(shape, name):
    tokenizer = make_tokenizer(name)
    batch, texts = made(tokenizer, *SHAPES[shape])
    tokens, labels, weights = (x.reshape(-1).tolist() for x in (batch.tokens, batch.labels, batch.weights))
    place = 0
    for text, size in zip(texts, SHAPES[shape][1], strict=True):
        ids = tokenizer.encode(text).tolist() + [tokenizer.pad_id] * (size - len(text))
        worth = [1.0 if letter in b"ACGTU" else np.float32(0.1) if letter in b"acgt" else 0.0 for letter in text]
        assert tokens[place : place + size] == ids
        assert labels[place : place + size] == [*ids[1:], tokenizer.pad_id]
        assert weights[place : place + size] == ([*worth, *[0.0] * (size + 1)])[1 : size + 1]
        place += size
    assert place == len(tokens)


@pytest.mark.parametrize("k", [2, 5, 8])
def test_a_kmer_weighs_the_mean_of_its_bases_and_nothing_where_one_is_unknown(k):
    batch, (text,) = made(KmerTokenizer(k), [40 * k + 1], [42], True)
    table = {**dict.fromkeys(b"ACGTU", 1.0), **dict.fromkeys(b"acgt", 0.1)}
    groups = [text[i : i + k] for i in range(0, 40 * k, k)] + [text[40 * k :]]
    worth = [np.mean([table[b] for b in g]) if all(b in table for b in g) else 0.0 for g in groups]
    assert any(worth[1:])
    assert batch.tokens[:41].tolist() == KmerTokenizer(k).encode(text).tolist()
    assert batch.weights.tolist() == pytest.approx([*worth[1:], 0, 0], rel=1e-6)


def test_the_minus_strand_is_the_reverse_complement_over_several_pieces():
    encoder = Encoder(make_tokenizer("nucleotide"), 0.1)
    letters = np.random.default_rng(0).choice(LETTERS, 2 * CACHEFUL + 5)
    minus, plus = np.empty_like(letters), np.empty_like(letters)
    encoder.encode(letters, minus, minus=True)
    encoder.encode(np.frombuffer(reverse_complement(letters.tobytes()), dtype=np.uint8), plus)
    assert np.array_equal(minus, plus)


def test_a_batch_travels_as_its_codes_and_arrives_the_same():
    batch, _ = made(make_tokenizer("nucleotide"), *SHAPES["more than a cacheful"])
    assert batch.weights.sum() > 0
    sent = pickle.dumps(batch)
    assert len(sent) < batch.num_tokens + 2000
    arrived = pickle.loads(sent)
    for name in ("codes", "tokens", "labels", "weights", "position_ids", "cu_seqlens", "index"):
        assert torch.equal(getattr(arrived, name), getattr(batch, name)), name
    arrived.codes.fill_(0)
    assert batch.codes.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["nucleotide", "kmer3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_read_on_a_gpu_is_the_one_read_on_the_cpu(shape, name):
    batch, _ = made(make_tokenizer(name), *SHAPES[shape])
    moved = batch.pin_memory().to("cuda", non_blocking=True)
    for field in ("tokens", "labels", "weights", "position_ids"):
        here, there = getattr(batch, field), getattr(moved, field)
        assert (here is None) == (there is None)
        if here is not None:
            assert there.is_cuda
            assert torch.equal(there.cpu(), here), field


def test_batch_memory_is_used_again_only_when_nobody_holds_it():
    pool = ArrayPool(most=4)
    kept = torch.from_numpy(pool.empty(1000, np.int64)).fill_(7)
    view = torch.from_numpy(pool.empty(1000, np.int64)).fill_(8)[10:20].view(2, 5).numpy()
    address = pool.empty(1000, np.int64).ctypes.data
    again = pool.empty(1000, np.int64)
    assert again.ctypes.data == address
    again.fill(9)
    for _ in range(20):
        pool.empty(1000, np.int64).fill(0)
    assert (kept == 7).all()
    assert (view == 8).all()
    assert (again == 9).all()


def test_threads_share_no_memory_of_a_pool():
    pool = ArrayPool()
    address = pool.empty(1000, np.int64).ctypes.data  # free again at once
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(pool.empty(1000, np.int64)))
    thread.start()
    thread.join()
    assert elsewhere[0].ctypes.data != address
    assert pool.empty(1000, np.int64).ctypes.data == address
