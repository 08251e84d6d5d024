"""Shared prefixes beside the plain way: both whole sequences through the model, log p summed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from genomoe.inference import engine
from genomoe.inference.engine import SCORES, Pair, PairScorer
from genomoe.inference.prefix import SuffixAttention, SuffixBlock, run_prefix

UNK = 8


def make_pairs(seed: int = 0) -> list[Pair]:
    """Substitutions and shifts, several to a window, at both ends, with N, and one pair that does not
    differ.
    """
    random = np.random.default_rng(seed)
    pairs = []
    for number in range(30):
        length = int(random.choice([2, 33, 64, 65, 150]))
        if number % 3 == 0 or not pairs:
            ref = random.integers(4, 8, length).astype(np.uint8)
            ref[random.random(length) < 0.03] = UNK
        else:
            ref = pairs[-1].ref
        length = len(ref)
        at = int(random.choice([0, length - 1, random.integers(length)]))
        alt = ref.copy()
        if number % 4 == 1:  # a shift, as an indel makes
            alt[at:] = np.append(ref[at + 1 :], 5)
        else:
            alt[at] = 4 + (int(ref[at]) - 3) % 4
        differs = np.flatnonzero(ref != alt)
        first = int(differs[0]) if len(differs) else length
        end = min(length, first + int(random.choice([1, 7, 500])))
        pairs.append(Pair(ref=ref, alt=alt, first=first, end=end, ref_after=first + 1, alt_after=first + 1))
    pairs.append(Pair(ref=ref, alt=ref, first=length, end=length, ref_after=length, alt_after=length))
    return pairs


def plain_score(model, kind: str, pair: Pair) -> float:
    """The definition, in float64 after the logits."""
    if pair.first >= pair.end:
        return 0.0
    with torch.inference_mode():
        out = {name: model(torch.from_numpy(getattr(pair, name)).long()[None]) for name in ("ref", "alt")}
    if kind in ("llr", "marginal"):
        sums = {}
        for name, found in out.items():
            log_p = found.logits[0].double().log_softmax(-1)
            ids = getattr(pair, name)
            counted = [j for j in range(max(1, pair.first), pair.end) if ids[j] != UNK]
            sums[name] = sum(float(log_p[j - 1, ids[j]]) for j in counted)
        return sums["alt"] - sums["ref"]
    if kind == "embedding":
        ref, alt = (out[name].hidden[0, pair.first : pair.end].double().mean(0) for name in ("ref", "alt"))
        return float((alt - ref).norm())
    p, q = (out[name].logits[0, pair.ref_after - 1 : pair.end - 1].double().softmax(-1) for name in ("alt", "ref"))
    if not len(p):
        return 0.0
    middle = (p + q) / 2
    return float(((p * (p / middle).log2()).sum(-1) + (q * (q / middle).log2()).sum(-1)).mean() / 2)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize(
    "changes", [{}, {"window": 20, "global_every": 2}, {"qk_norm": True, "num_shared_experts": 1}], ids=str
)
def test_shared_prefix_equals_whole_sequences(kind, changes):
    model, pairs = tiny_model(**changes), make_pairs()
    expected = np.array([plain_score(model, kind, pair) for pair in pairs])
    got = PairScorer(model, kind, unk_id=UNK)(pairs)
    assert np.abs(expected).max() > 1e-3
    np.testing.assert_allclose(got, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("step", [1, 64, 128])
@pytest.mark.parametrize("kind", SCORES)
def test_where_suffixes_start_does_not_matter(kind, step, monkeypatch):
    model, pairs = tiny_model(), make_pairs(1)
    expected = PairScorer(model, kind, unk_id=UNK)(pairs)
    monkeypatch.setattr(engine, "start_step", lambda length: step)
    np.testing.assert_allclose(PairScorer(model, kind, unk_id=UNK)(pairs), expected, atol=1e-5, rtol=0)


def test_suffixes_start_little_earlier_than_they_must():
    assert [engine.start_step(length) for length in (1, 100, 512, 600, 4096, 8192, 10**6)] == [1, 1, 8, 8, 64, 128, 128]


def test_in_the_middle_of_a_window_no_token_is_run_in_vain():
    ref = np.full(512, 4, dtype=np.uint8)
    alt = ref.copy()
    alt[256] = 5
    pair = Pair(ref=ref, alt=alt, first=256, end=512, ref_after=257, alt_after=257)
    window = PairScorer(tiny_model(), "llr", unk_id=UNK)._window([pair], [0])
    assert window.prefix == 256
    assert [(suffix.start, suffix.stop) for suffix in window.suffixes] == [(256, 512)] * 2


def test_batches_are_even_and_hold_every_suffix_once():
    model = tiny_model()
    random = np.random.default_rng(0)
    windows = []
    for _ in range(10):
        ref = random.integers(4, 8, 128).astype(np.uint8)
        windows += [(ref, 70), (ref, 71), (ref, 110)]
    pairs = []
    for ref, first in windows:
        alt = ref.copy()
        alt[first] = 4 + (int(ref[first]) - 3) % 4
        pairs.append(Pair(ref=ref, alt=alt, first=first, end=128, ref_after=first + 1, alt_after=first + 1))
    scorer = PairScorer(model, "llr", unk_id=UNK, batch_tokens=700)
    seen: list[int] = []
    window_batches = list(scorer._window_batches(pairs))
    assert [len(found) for found in window_batches] == [5, 5], "prefixes of 110 tokens, of which six fill a batch"
    for found in window_batches:
        batches = list(scorer._suffix_batches(found))
        tokens = [sum(len(suffix) for _, suffixes in batch for suffix in suffixes) for batch in batches]
        assert max(tokens) - min(tokens) <= 3 * 64, "even but for the suffixes of one window"
        assert max(tokens) <= 700 + 3 * 64 / 2
        started = set()
        for number, suffixes in (unit for batch in batches for unit in batch):
            assert number in started or suffixes[0].index is None, "REF runs before its ALTs"
            started.add(number)
            seen += [suffix.index for suffix in suffixes if suffix.index is not None]
    assert sorted(seen) == list(range(len(pairs)))


@pytest.mark.parametrize("kind", SCORES)
def test_score_depends_neither_on_batch_nor_on_order(kind):
    model, pairs = tiny_model(), make_pairs(3)
    once = PairScorer(model, kind, unk_id=UNK)(pairs)
    order = np.random.default_rng(0).permutation(len(pairs))
    shuffled = PairScorer(model, kind, unk_id=UNK, batch_tokens=200)([pairs[i] for i in order])
    np.testing.assert_allclose(shuffled, once[order], atol=1e-5, rtol=0)
    alone = np.concatenate([PairScorer(model, kind, unk_id=UNK, batch_pairs=1)([pair]) for pair in pairs])
    one_by_one = PairScorer(model, kind, unk_id=UNK, batch_pairs=1)(pairs[::-1])[::-1]
    assert (alone == one_by_one).all(), "one variant a batch must be bitwise the same whatever else is scored"


CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("cpu", {"head_size": 16}),
        pytest.param(
            "cuda",
            {"hidden_size": 256, "head_size": 64, "expert_size": 512, "num_experts": 8, "max_context": 2048},
            marks=CUDA,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_suffixes_that_agree_get_the_same_bits(device, sizes, dtype):
    """Wherever they stand in a batch: so what REF and ALT have in common cancels, rounding and all."""
    model = tiny_model(**sizes).to(device, dtype)
    half = model.config.max_context // 2
    generator = torch.Generator().manual_seed(0)
    prefixes, suffixes = (torch.randint(4, 8, (2, half), generator=generator).to(device) for _ in range(2))
    block = SuffixBlock(windows=[0, 1], start=half, count=3, length=half)
    with torch.inference_mode():
        cache, _ = run_prefix(model, prefixes)
        hidden_TD = model(
            suffixes[:, None].expand(-1, 3, -1).flatten(),
            cu_seqlens=torch.tensor([0, block.tokens], dtype=torch.int32, device=device),
            max_seqlen=2 * half,
            position_ids=block.positions(prefixes.device),
            compute_logits=False,
            attend=SuffixAttention(cache, [block]),
        ).hidden
    first, *others = hidden_TD.view(2, 3, half, -1).unbind(1)
    assert first.std() > 0
    assert all(torch.equal(other, first) for other in others)


def test_model_mode_and_random_state_are_left_alone():
    model = tiny_model().train()
    before = torch.random.get_rng_state()
    PairScorer(model, "llr", unk_id=UNK)(make_pairs())
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())


def test_unknown_score_is_an_error():
    with pytest.raises(ValueError, match="one of llr, marginal, embedding, jsd"):
        PairScorer(tiny_model(), "cosine", unk_id=UNK)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bfloat16_on_cuda_agrees_with_float32():
    pairs = make_pairs()
    model = tiny_model(head_size=16)
    expected = PairScorer(model, "llr", unk_id=UNK)(pairs)
    got = PairScorer(model.to("cuda", torch.bfloat16), "llr", unk_id=UNK)(pairs)
    assert np.corrcoef(got, expected)[0, 1] > 0.95  # bfloat16 sends some tokens to another expert


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SCORES)
def test_float32_on_cuda_equals_whole_sequences(kind):
    model, pairs = tiny_model(head_size=16), make_pairs(2)
    expected = np.array([plain_score(model, kind, pair) for pair in pairs])
    got = PairScorer(model.to("cuda"), kind, unk_id=UNK)(pairs)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)
