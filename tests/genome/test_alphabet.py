"""Tokenizers and complement: ids as documented, round trips, errors."""

import json
import pickle

import numpy as np
import pytest
from Bio.Seq import Seq
from hypothesis import given
from hypothesis import strategies as st

from genomoe.genome.alphabet import (
    IUPAC,
    ByteTokenizer,
    KmerTokenizer,
    MappedTokenizer,
    NucleotideTokenizer,
    Tokenizer,
    make_tokenizer,
    reverse_complement,
)
from genomoe.genome.errors import GenoMoEError

MAP = {
    "name": "mapped",
    "ids": {"A": 7, "C": 9, "G": 8, "T": 6, "N": 5},
    "special": {"pad": 0, "bos": 1, "eos": 2},
    "vocab_size": 128,
}
SINGLE = [NucleotideTokenizer(), ByteTokenizer(), make_tokenizer(MAP)]
ALL = [*SINGLE, KmerTokenizer(2), KmerTokenizer(3), KmerTokenizer(6)]
dna = st.text("ACGTNacgtn", max_size=80)
iupac = st.text("ACGTRYSWKMBDHVNacgtryswkmbdhvn", max_size=80)


@given(iupac)
def test_reverse_complement_is_biopython_s(text):
    assert reverse_complement(text.encode()).decode() == str(Seq(text).reverse_complement())
    assert reverse_complement(reverse_complement(text.encode())) == text.encode()


def test_u_pairs_with_a():
    assert reverse_complement(b"ACGUu") == b"aACGT"


def test_nucleotide_ids_are_the_documented_ones():
    tokenizer = NucleotideTokenizer()
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id) == (0, 1, 2, 3)
    assert tokenizer.encode("ACGTNacgtnUuRy").tolist() == [4, 5, 6, 7, 8, 4, 5, 6, 7, 8, 7, 7, 8, 8]
    assert tokenizer.vocab_size == 16
    assert tokenizer.base_ids == (4, 5, 6, 7)


def test_byte_ids_are_ascii_as_in_evo_2():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("ACGTNacgtRu").tolist() == [65, 67, 71, 84, 78, 65, 67, 71, 84, 82, 84]
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, 512)
    assert tokenizer.decode(np.array([65, 82, 0, 1])) == "AR"


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
@given(text=dna)
def test_decode_undoes_encode_and_case_is_no_matter(tokenizer, text):
    ids = tokenizer.encode(text)
    decoded = tokenizer.decode(ids)
    assert len(decoded) == len(text)
    k = tokenizer.bases_per_token
    for start in range(0, len(text), k):
        kmer = text[start : start + k].upper()
        whole = len(kmer) == k and k > 1
        assert decoded[start : start + k] == ("N" * k if whole and "N" in kmer else kmer)
    assert np.array_equal(tokenizer.encode(text.lower()), ids)
    assert len(ids) == len(text) // k + len(text) % k
    assert (ids < tokenizer.vocab_size).all()


@pytest.mark.parametrize("tokenizer", SINGLE, ids=repr)
@given(text=iupac)
def test_complement_ids_flip_strands_on_ids(tokenizer, text):
    flipped = tokenizer.complement_ids[tokenizer.encode(text)][::-1]
    assert np.array_equal(flipped, tokenizer.encode(reverse_complement(text.encode())))


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_dict_and_pickle_round_trip(tokenizer):
    again = make_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    assert again == tokenizer
    assert pickle.loads(pickle.dumps(tokenizer)) == tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert make_tokenizer(tokenizer) is tokenizer
    assert hash(again) == hash(tokenizer)


@pytest.mark.parametrize("tokenizer", ALL, ids=repr)
def test_anything_that_is_no_nucleotide_code_is_refused(tokenizer):
    for byte in range(256):
        letter = bytes([byte])
        if letter.upper() in IUPAC and byte < 128:
            assert len(tokenizer.encode(b"A" + letter)) == len(tokenizer.encode(b"AA"))
        else:
            with pytest.raises(GenoMoEError, match="position 1"):
                tokenizer.encode(b"A" + letter)
    with pytest.raises(GenoMoEError, match="ASCII"):
        tokenizer.encode("ACé")
    with pytest.raises(GenoMoEError, match="uint8"):
        tokenizer.encode(np.zeros(3))
    with pytest.raises(GenoMoEError, match="must lie in"):
        tokenizer.decode(np.array([tokenizer.vocab_size]))


def test_kmer_values_are_base_four():
    tokenizer = KmerTokenizer(3)
    assert tokenizer.encode("AAAACGTTTNCAGC").tolist() == [16, 16 + 6, 16 + 63, 9, 6, 5]
    assert tokenizer.vocab_size == 16 + 64
    assert tokenizer.complement_ids is None


def test_a_map_must_be_complete():
    with pytest.raises(GenoMoEError, match="missing"):
        MappedTokenizer(ids={"A": 1}, special={"pad": 0, "bos": 0, "eos": 0}, vocab_size=8)
    with pytest.raises(GenoMoEError, match="must lie in"):
        MappedTokenizer(ids={**MAP["ids"], "A": 200}, special=MAP["special"], vocab_size=128)


@pytest.mark.parametrize("name", ["dna", "kmer1", "kmer9", "kmerx", "", None])
def test_unknown_names_are_refused(name):
    with pytest.raises(GenoMoEError):
        make_tokenizer({"name": name})


def test_a_description_says_its_ids_and_they_must_be_right():
    described = NucleotideTokenizer().to_dict()
    assert described["base_ids"] == [4, 5, 6, 7]
    assert described["pad_id"] == 0
    with pytest.raises(GenoMoEError, match="says pad_id 3"):
        make_tokenizer({**described, "pad_id": 3})
    assert make_tokenizer({"name": "nucleotide"}) == NucleotideTokenizer()


def test_a_tokenizer_is_read_from_its_description_in_a_file(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(make_tokenizer("kmer3").to_dict()))
    assert make_tokenizer(str(path)) == make_tokenizer("kmer3")
    for text in ("{}", "[1]", "not json"):
        path.write_text(text)
        with pytest.raises(GenoMoEError, match="does not describe a tokenizer"):
            make_tokenizer(str(path))
