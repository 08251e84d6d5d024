"""Markov baselines: by hand on toy sequences, against known truths, and on the bundled yeasts."""

import dataclasses

import numpy as np
import pytest

from genomoe.evaluation.baselines import (
    CONCENTRATIONS,
    MAX_ORDER,
    Counts,
    MarkovModel,
    composition,
    encode,
    reverse_complement,
    words_of,
)
from genomoe.evaluation.metrics import BitsSum, scored
from genomoe.genome.alphabet import reverse_complement as bio_reverse_complement


def model(*sequences: str, concentrations: tuple[float, ...]) -> MarkovModel:
    return MarkovModel(
        counts=Counts.of(encode(sequence) for sequence in sequences),
        concentrations=concentrations,
        selection_bits=(),
    )


def test_encode_and_reverse_complement() -> None:
    assert encode("ACGTUacgtuNR-").tolist() == [0, 1, 2, 3, 3, 0, 1, 2, 3, 3, -1, -1, -1]
    assert reverse_complement(encode("AACGN")).tolist() == encode("NCGTT").tolist()


def test_order_0_by_hand() -> None:
    # AAAC and its reverse complement GTTT: A 3, C 1, G 1, T 3 of 8; with concentration 8, p(A) = (3 + 2) / 16
    bits = model("AAAC", concentrations=(8.0,)).bits(encode("ACNT"))[-1]
    np.testing.assert_allclose(bits, -np.log2([5 / 16, 3 / 16, np.nan, 5 / 16]))


def test_order_1_by_hand() -> None:
    # Words of AAAC: AA 2, AC 1; of GTTT: GT 1, TT 2. n(A.) = 3, n(C.) = 0.
    bits = model("AAAC", concentrations=(8.0, 1.0)).bits(encode("AACG"))[-1]
    p_a, p_c, p_g = 5 / 16, 3 / 16, 3 / 16
    # A: no context yet; A after A: 2 of 3; C after A: 1 of 3; G after C: context never seen, order 0 as it is
    np.testing.assert_allclose(bits, -np.log2([p_a, (2 + p_a) / 4, (1 + p_c) / 4, p_g]))


def test_probabilities_sum_to_one_in_every_context() -> None:
    rng = np.random.default_rng(0)
    text = "".join(rng.choice(list("ACGT"), 400))
    markov = model(text, concentrations=(1.0, 2.0, 3.0, 0.5, 4.0))
    for context in ("ACGT", "TTTT", text[100:104], "NACG"):
        total = sum(2.0 ** -markov.bits(encode(context + base))[-1][-1] for base in "ACGT")
        assert total == pytest.approx(1.0)


def test_a_contexts_count_does_not_cross_an_ambiguous_base_or_a_sequence_end() -> None:
    split = model("AANAC", "CCA", concentrations=(1.0, 1e-9)).bits(encode("NAC"))[-1]
    # AC occurs once on this strand, AA once; the reverse complements GTNTT and TGG add none that start with A
    assert split[2] == pytest.approx(1.0, abs=1e-6)


def test_both_strands_score_alike() -> None:
    rng = np.random.default_rng(1)
    text = "".join(rng.choice(list("ACGT"), 3000, p=[0.4, 0.1, 0.2, 0.3]))
    query = encode("".join(rng.choice(list("ACGT"), 50)))
    forward = model(text, concentrations=(1.0, 1.0, 1.0)).bits(query)[-1]
    other = MarkovModel(
        counts=Counts.of([reverse_complement(encode(text))]), concentrations=(1.0, 1.0, 1.0), selection_bits=()
    )
    np.testing.assert_allclose(other.bits(query)[-1], forward)


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
    assert np.mean(fitted.bits(fresh)[-1]) == pytest.approx(2.0, abs=1e-3)
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
    assert np.nanmean(fitted.bits(test[0])[5]) < 1.960
    assert np.nanmean(fitted.bits(test[0])[-1]) < 1.89
    assert 10 <= fitted.order <= 16


def test_counts_are_those_of_a_search_through_both_strands() -> None:
    rng = np.random.default_rng(5)
    texts = ["".join(rng.choice(list("ACGTN"), n, p=[0.3, 0.2, 0.2, 0.25, 0.05])) for n in (1, 3, 40, 200)]
    query = texts[-1][50:120] + "NA" + texts[2]
    strands = [strand for text in texts for strand in (text, bio_reverse_complement(text.encode()).decode())]
    counts, words = Counts.of(map(encode, texts)), words_of(encode(query))
    for order in (0, 1, 2, 7, MAX_ORDER):
        of_word, of_context = counts.at(words, order)
        for end in range(order + 1, len(query) + 1):
            word = query[end - order - 1 : end]
            found = [strand[i : i + order + 1] for strand in strands for i in range(len(strand) - order)]
            same = [w for w in found if w[:-1] == word[:-1] and "N" not in w] if "N" not in word else []
            assert (of_word[end - 1], of_context[end - 1]) == (same.count(word), len(same))
        assert not of_context[:order].any()


def test_a_piece_scores_as_it_does_in_its_sequence() -> None:
    rng = np.random.default_rng(6)
    codes = encode("".join(rng.choice(list("ACGTN"), 500, p=[0.3, 0.2, 0.2, 0.29, 0.01])))
    repeats = MarkovModel(counts=Counts.of([codes]), concentrations=(1.0,) * (MAX_ORDER + 1), selection_bits=())
    for piece, whole in zip(repeats.bits(codes[200 - MAX_ORDER : 300]), repeats.bits(codes), strict=True):
        np.testing.assert_array_equal(piece[MAX_ORDER:], whole[200:300])


def test_bits_of_every_order_are_those_of_models_cut_there() -> None:
    whole = model("AAACGTTGCAAC", concentrations=(8.0, 1.0, 2.0))
    for order, bits in enumerate(whole.bits(encode("GCAAAC"))):
        cut = dataclasses.replace(whole, concentrations=whole.concentrations[: order + 1])
        np.testing.assert_array_equal(bits, cut.bits(encode("GCAAAC"))[-1])


def test_composition_counts_every_sequence() -> None:
    bits = composition(iter([encode("AAN"), encode("ACCC")]))(encode("ACNT"))
    np.testing.assert_array_equal(bits, [1.0, 1.0, np.nan, 0.0])


def test_bits_per_base_weighs_and_shares_bases() -> None:
    bits, weights = np.array([np.nan, 1.0, 3.0, 2.0]), np.array([1.0, 1.0, 0.1, 0.0])
    mask = scored(bits, weights)
    whole, pieces, uniform = BitsSum(), BitsSum(), BitsSum()
    whole.add(bits, weights, mask)
    for piece in (slice(0, 2), slice(2, 4)):
        pieces.add(bits[piece], weights[piece], mask[piece])
    result = whole.mean()
    assert result == pieces.mean()
    assert result.bases == 2
    assert result.bits_per_base == 2.0
    assert result.bits_per_base_weighted == pytest.approx(1.3 / 1.1)
    uniform.add(np.full(4, 2.0), weights, mask)
    assert uniform.mean() == (2.0, 2.0, 2)
    with pytest.raises(ValueError, match="no finite score"):
        uniform.add(np.full(4, np.nan), weights, mask)
    with pytest.raises(ValueError, match="no base to score"):
        BitsSum().mean()
