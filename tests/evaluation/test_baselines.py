"""Markov baselines: by hand on toy sequences, against known truths, and on the bundled yeasts."""

import numpy as np
import pytest

from genomoe.evaluation.baselines import CONCENTRATIONS, MarkovModel, encode, reverse_complement
from genomoe.evaluation.metrics import bits_per_base, scored


def model(*sequences: str, concentrations: tuple[float, ...]) -> MarkovModel:
    return MarkovModel(
        sequences=tuple(encode(sequence) for sequence in sequences),
        concentrations=concentrations,
        selection_bits=(),
    )


def test_encode_and_reverse_complement() -> None:
    assert encode("ACGTUacgtuNR-").tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 3, 3, -1, -1, -1]
    assert reverse_complement(encode("AACGN")).tolist() == encode("NCGTT").tolist()


def test_order_0_by_hand() -> None:
    # AAAC and its reverse complement GTTT: A 3, C 1, G 1, T 3 of 8; with concentration 8, p(A) = (3 + 2) / 16
    bits = model("AAAC", concentrations=(8.0,)).bits([encode("ACNT")])[0]
    np.testing.assert_allclose(bits, -np.log2([5 / 16, 3 / 16, np.nan, 5 / 16]))


def test_order_1_by_hand() -> None:
    # Words of AAAC: AA 2, AC 1; of GTTT: GT 1, TT 2. n(A.) = 3, n(C.) = 0.
    bits = model("AAAC", concentrations=(8.0, 1.0)).bits([encode("AACG")])[0]
    p_a, p_c, p_g = 5 / 16, 3 / 16, 3 / 16
    # A: no context yet; A after A: 2 of 3; C after A: 1 of 3; G after C: context never seen, order 0 as it is
    np.testing.assert_allclose(bits, -np.log2([p_a, (2 + p_a) / 4, (1 + p_c) / 4, p_g]))


def test_probabilities_sum_to_one_in_every_context() -> None:
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("ACGT"), 400))
    markov = model(text, concentrations=(1.0, 2.0, 3.0, 0.5, 4.0))
    for context in ("ACGT", "TTTT", text[100:104], "NACG"):
        total = sum(2.0 ** -markov.bits([encode(context + base)])[0][-1] for base in "ACGT")
        assert total == pytest.approx(1.0)


def test_a_contexts_count_does_not_cross_an_ambiguous_base_or_a_sequence_end() -> None:
    split = model("AANAC", "CCA", concentrations=(1.0, 1e-9)).bits([encode("NAC")])[0]
    # AC occurs once on this strand, AA once; the reverse complements GTNTT and TGG add none that start with A
    assert split[2] == pytest.approx(1.0, abs=1e-6)


def test_both_strands_score_alike() -> None:
    rng = np.random.default_rng(1)
    text = "".join(rng.choice(list("ACGT"), 3000, p=[0.4, 0.1, 0.2, 0.3]))
    query = encode("".join(rng.choice(list("ACGT"), 50)))
    forward = model(text, concentrations=(1.0, 1.0, 1.0)).bits([query])[0]
    other = MarkovModel(
        sequences=(reverse_complement(encode(text)),), concentrations=(1.0, 1.0, 1.0), selection_bits=()
    )
    np.testing.assert_allclose(other.bits([query])[0], forward)


def test_fit_gains_most_at_the_order_of_a_markov_chain() -> None:
    rng = np.random.default_rng(2)
    table = rng.dirichlet([0.3] * 4, size=64)
    chain = [0, 1, 2]
    for _ in range(60_000):
        chain.append(int(rng.choice(4, p=table[chain[-3] * 16 + chain[-2] * 4 + chain[-1]])))
    codes = np.array(chain, np.int8)
    # Counting both strands mixes the chain with its reverse complement; longer contexts tell which it is.
    fitted = MarkovModel.fit([codes], max_order=8)
    assert fitted.order >= 3
    gains = -np.diff(fitted.selection_bits)
    assert gains[2] > 2 * max(gains[3:])


def test_fit_of_random_bases_is_two_bits() -> None:
    codes = np.random.default_rng(3).integers(4, size=30_000).astype(np.int8)
    fitted = MarkovModel.fit([codes], max_order=6)
    assert fitted.order == 0
    fresh = np.random.default_rng(4).integers(4, size=30_000).astype(np.int8)
    assert np.mean(fitted.bits([fresh])[0]) == pytest.approx(2.0, abs=1e-3)
    assert fitted.concentrations[0] in CONCENTRATIONS


def test_fit_refuses_nothing_to_train_on() -> None:
    with pytest.raises(ValueError, match="unambiguous base"):
        MarkovModel.fit([encode("NNNN")])
    with pytest.raises(ValueError, match="max_order=31"):
        MarkovModel.fit([encode("ACGT")], max_order=31)


def test_the_yeast_baseline_is_as_strong_as_known() -> None:
    """Order 5 must reach the 1.960 bits known for these chromosomes; high orders find homology and do better."""
    from genomoe.training.compose import compose_config
    from genomoe.training.run import load_data

    data = load_data(compose_config("pretrain"))
    data.setup()
    train, test = (
        [encode(corpus.read(int(start), int(end)).tobytes()) for start, end, _ in zip(*corpus.segments, strict=True)]
        for corpus in (data.train_corpus, data.val_corpus)
    )
    fitted = MarkovModel.fit(train)
    assert np.nanmean(fitted.truncated(5).bits(test)[0]) < 1.960
    assert np.nanmean(fitted.bits(test)[0]) < 1.89
    assert 10 <= fitted.order <= 16


def test_bits_per_base_weighs_and_shares_bases() -> None:
    bits = [np.array([np.nan, 1.0, 3.0, 2.0])]
    weights = [np.array([1.0, 1.0, 0.1, 0.0])]
    result = bits_per_base(bits, weights)
    assert result.bases == 2
    assert result.bits_per_base == 2.0
    assert result.bits_per_base_weighted == pytest.approx(1.3 / 1.1)
    masks = scored(bits, weights)
    assert bits_per_base([np.full(4, 2.0)], weights, masks).bases == 2
    with pytest.raises(ValueError, match="no finite score"):
        bits_per_base([np.full(4, np.nan)], weights, masks)
    with pytest.raises(ValueError, match="no base to score"):
        bits_per_base([np.full(4, np.nan)], weights)
