"""Embedding, generation, routing and loading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from genomoe.inference.generation import generate
from genomoe.inference.mutagenesis import as_matrix
from genomoe.inference.predictor import from_pretrained
from genomoe.inference.routing import expert_enrichment, expert_load
from genomoe.model.pretrained import save_pretrained


def test_embedding_depends_on_its_own_sequence_only(predictor):
    sequences = ["ACGTACGGT", "TTT", "GATTACA" * 9, "A"]
    together = predictor.embed(sequences)
    assert together.shape == (4, 32)
    for sequence, vector in zip(sequences, together, strict=True):
        np.testing.assert_allclose(predictor.embed(sequence)[0], vector, atol=1e-6)
    np.testing.assert_allclose(predictor.embed([s.lower() for s in sequences]), together, atol=1e-6)


@pytest.mark.parametrize("layer", [-1, 0, 1, 2])
def test_pools_agree_with_the_unpooled(predictor, layer):
    sequences = ["ACGTACGGT", "TTTGC"]
    tokens = predictor.embed(sequences, layer=layer, pool="none")
    for pool, combine in (
        ("mean", lambda x: x.mean(0)),
        ("max", lambda x: x.max(0)),
        ("last", lambda x: x[-1]),
    ):
        expected = np.stack([combine(x) for x in tokens])
        np.testing.assert_allclose(predictor.embed(sequences, layer=layer, pool=pool), expected, atol=1e-6)


def test_both_strands_make_the_vector_strand_invariant(predictor):
    first, second = predictor.embed(["AACCGTTT", "AAACGGTT"], strands="both")
    np.testing.assert_allclose(first, second, atol=1e-6)
    tokens = predictor.embed(["AACCGTTT", "AAACGGTT"], strands="both", pool="none")
    np.testing.assert_allclose(tokens[0], tokens[1][::-1], atol=1e-6)


def test_embedding_errors(predictor):
    for sequences, options, message in [
        ([""], {}, "Sequence 1 is empty"),
        (["A", "C" * 600], {}, "Sequence 2 has 600 tokens"),
        (["A"], {"layer": 9}, "no layer 9"),
        (["A"], {"pool": "median"}, "mean, max, last or none"),
    ]:
        with pytest.raises(ValueError, match=message):
            predictor.embed(sequences, **options)


@pytest.mark.parametrize("changes", [{}, {"window": 6, "global_every": 2}], ids=str)
def test_greedy_generation_with_kept_keys_equals_without(predictor, changes):
    model, tokenizer = tiny_model(**changes), predictor.tokenizer
    ids = list(tokenizer.encode("ACGTTGCA"))
    for _ in range(20):
        with torch.inference_mode():
            logits = model(torch.tensor([ids], dtype=torch.long)).logits[0, -1]
        bases = list(tokenizer.base_ids)
        ids.append(bases[int(logits[bases].argmax())])
    (got,) = generate(model, tokenizer, "ACGTTGCA", n=20, temperature=0)
    assert got == tokenizer.decode(np.array(ids[8:]))


def test_sampling_is_seeded_and_leaves_the_global_state(predictor):
    before = torch.random.get_rng_state()
    first = predictor.generate("ACGT", 30, samples=5, seed=3)
    assert first == predictor.generate("ACGT", 30, samples=5, seed=3)
    assert first != predictor.generate("ACGT", 30, samples=5, seed=4)
    assert len(set(first)) == 5
    assert all(len(s) == 30 and set(s) <= set("ACGT") for s in first)
    assert torch.equal(before, torch.random.get_rng_state())
    greedy = predictor.generate("ACGT", 30, temperature=0)
    assert predictor.generate("ACGT", 30, top_k=1) == greedy == predictor.generate("ACGT", 30, top_p=1e-6)


def test_samples_follow_the_models_distribution(predictor):
    draws = predictor.generate("ACGTACGTTT", 1, samples=4000, seed=1)
    ids = torch.from_numpy(predictor.tokenizer.encode("ACGTACGTTT")).long()
    with torch.inference_mode():
        logits = predictor.model(ids[None]).logits[0, -1]
    expected = logits[list(predictor.tokenizer.base_ids)].softmax(-1).numpy()
    np.testing.assert_allclose([draws.count(base) / 4000 for base in "ACGT"], expected, atol=0.03)


def test_generation_errors(predictor):
    for prompt, n, options, message in [
        ("", 5, {}, "prompt is empty"),
        ("ACGT", 0, {}, "at least 1"),
        ("ACGT", 5, {"temperature": -1}, "temperature is -1; it must be at least 0"),
        ("ACGT" * 100, 200, {}, "600 tokens, more than"),
    ]:
        with pytest.raises(ValueError, match=message):
            predictor.generate(prompt, n, **options)


def test_routing_table_covers_every_base_and_layer(predictor):
    table = predictor.routing(["ACGTA", "GG"])
    assert len(table) == 7 * 2
    assert table[table["sequence"] == 0].groupby("layer")["token"].agg("".join).tolist() == ["ACGTA"] * 2
    np.testing.assert_allclose(table["score_1"] + table["score_2"], 1, atol=1e-6)
    np.testing.assert_allclose(expert_load(table).sum(axis=1), 2)
    alone = predictor.routing("GG")
    assert (
        alone[["expert_1", "expert_2"]].values == table.loc[table["sequence"] == 1, ["expert_1", "expert_2"]].values
    ).all()


def test_enrichment_counts_by_hand(predictor):
    table = predictor.routing("ACGTACGTAC")
    table["expert_1"], table["expert_2"] = (table["token"] == "A").astype(int), 2
    got = expert_enrichment(table, table["token"]).loc[("A", 0)]
    assert got[1] == pytest.approx(np.log2((3.5 / 4) / (3.5 / 11)))
    assert got[2] == pytest.approx(np.log2((3.5 / 4) / (10.5 / 11)))


def test_mutagenesis_matrix_has_zero_at_the_reference(predictor, fasta):
    table = predictor.mutagenesis("chr1:140-144", fasta, window=64)
    matrix = as_matrix(table)
    assert matrix.shape == (4, 5)
    assert (matrix == 0).sum().tolist() == [1] * 5


def test_loading_a_run_or_its_model_folder(predictor, tmp_path):
    save_pretrained(predictor.model, predictor.tokenizer.to_dict(), tmp_path / "run" / "model")
    for path in (tmp_path / "run", tmp_path / "run" / "model"):
        again = from_pretrained(path, device="cpu")
        assert again.tokenizer.to_dict() == predictor.tokenizer.to_dict()
        np.testing.assert_allclose(again.embed("ACGT"), predictor.embed("ACGT"), atol=1e-6)
    with pytest.raises(FileNotFoundError, match="not a model folder"):
        from_pretrained(tmp_path / "none")
