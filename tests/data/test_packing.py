"""Packing: budgets and layout, and packed equals separate, logits and gradients, through the model."""

import itertools

import numpy as np
import pytest
import torch
from small_corpora import random_letters, write_fasta

from genomoe.data.dataset import StreamingGenomeDataset
from genomoe.data.fasta_corpus import FastaCorpus
from genomoe.data.sampling import SamplingConfig
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.model.config import ModelConfig
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.losses import next_token_loss

CONTEXT, ROWS = 64, 4


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(2)
    records = {f"c{number}": random_letters(rng, int(size)) for number, size in enumerate(rng.integers(1, 200, 60))}
    return FastaCorpus([str(write_fasta(tmp_path / "x.fa", records))])


def stream(corpus, *, pack, multiple=1, tokenizer=None):
    return StreamingGenomeDataset(
        corpus,
        SamplingConfig(window=CONTEXT, mode="stride", seed=1, lane_run=ROWS),
        tokenizer or NucleotideTokenizer(),
        batch_size=ROWS,
        context_length=CONTEXT,
        pack=pack,
        pad_to_multiple=multiple,
    )


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_batches_hold_the_windows_of_the_plan_and_keep_the_budget(corpus, multiple):
    dataset = stream(corpus, pack=True, multiple=multiple)
    windows = dataset.plan().windows(0, len(dataset.plan()))
    seen = []
    batches = list(dataset)
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        assert batch.cu_seqlens.dtype == torch.int32
        assert bounds[0] == 0
        assert bounds[-1] == len(batch.tokens) <= ROWS * CONTEXT
        sizes = np.diff(bounds)
        assert batch.max_seqlen == sizes.max()
        assert (sizes % multiple == 0).all()
        assert len(batch.index) == len(batch.tags) == len(sizes)
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            row = int(batch.index[number])
            length = int(windows.ends[row] - windows.starts[row])
            assert high - low == -(-length // multiple) * multiple
            assert batch.position_ids[low:high].tolist() == list(range(high - low))
            assert (batch.tokens[low : low + length] != 0).all()
            assert (batch.tokens[low + length : high] == 0).all()
            assert (batch.weights[low + length - 1 : high] == 0).all()
            assert batch.labels[high - 1] == 0
            assert torch.equal(batch.labels[low : high - 1], batch.tokens[low + 1 : high])
            seen.append(row)
    assert sorted(seen) == list(range(len(dataset.plan())))
    for batch, following in itertools.pairwise(batches):  # greedy: the next sequence had no room left
        first = int(following.cu_seqlens[1])
        assert len(batch.tokens) + first > ROWS * CONTEXT


def test_packed_targets_are_those_of_fixed_windows(corpus):
    fixed = {}
    for batch in stream(corpus, pack=False):
        for row, index in enumerate(batch.index.tolist()):
            fixed[index] = (batch.tokens[row], batch.labels[row], batch.weights[row])
    for batch in stream(corpus, pack=True):
        bounds = batch.cu_seqlens.tolist()
        for index, low, high in zip(batch.index.tolist(), bounds[:-1], bounds[1:], strict=True):
            for packed, padded in zip((batch.tokens, batch.labels, batch.weights), fixed[index], strict=True):
                assert torch.equal(packed[low:high], padded[: high - low])


CONFIG = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_size": 16, "num_experts": 4, "top_k": 2}


@pytest.mark.parametrize("multiple", [1, 8])
def test_packed_equals_separate_logits_and_gradients(corpus, multiple):
    torch.manual_seed(0)
    model = GenoMoEModel(ModelConfig(vocab_size=16, hidden_size=32, expert_size=48, **CONFIG))
    batch = next(iter(stream(corpus, pack=True, multiple=multiple)))
    bounds = batch.cu_seqlens.tolist()
    assert len(bounds) > 3
    packed = model(
        batch.tokens,
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        position_ids=batch.position_ids,
        valid=batch.tokens != 0,
    )
    loss = next_token_loss(packed.hidden, model.lm_head.weight, batch.labels, batch.weights)
    loss.loss.backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    for low, high in itertools.pairwise(bounds):
        length = int((batch.tokens[low:high] != 0).sum())
        alone = model(batch.tokens[None, low : low + length])
        torch.testing.assert_close(packed.logits[low : low + length], alone.logits[0], rtol=1e-5, atol=1e-5)
        weights = batch.weights[None, low : low + length]
        if weights.sum() > 0:
            part = next_token_loss(alone.hidden, model.lm_head.weight, batch.labels[None, low : low + length], weights)
            (part.loss * (part.weight_sum / loss.weight_sum)).backward()
    for name, parameter in model.named_parameters():
        error = (parameter.grad - together[name]).norm() / together[name].norm()
        assert error < 1e-5, (name, float(error))
