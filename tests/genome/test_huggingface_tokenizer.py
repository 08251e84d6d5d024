"""An exported tokenizer gives the ids and the letters of ours."""

import json

import numpy as np
import pytest

from genomoe.genome.alphabet import MappedTokenizer, make_tokenizer
from genomoe.genome.huggingface_tokenizer import huggingface_tokenizer

MAPPED = MappedTokenizer(
    ids={"A": 8, "T": 9, "C": 10, "G": 11, "N": 12, "R": 13}, special={"pad": 2, "bos": 1, "eos": 2}, vocab_size=128
)


@pytest.mark.parametrize("spec", ["nucleotide", "byte", "kmer2", "kmer6", MAPPED], ids=str)
def test_auto_tokenizer_gives_our_ids(spec, tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = make_tokenizer(spec)
    for name, content in huggingface_tokenizer(ours).items():
        (tmp_path / name).write_text(json.dumps(content))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (ours.pad_id, ours.bos_id, ours.eos_id)
    letters = np.frombuffer(b"ACGT" * 40 + b"ACGTURYSWKMBDHVNacgturyswkmbdhvn", dtype=np.uint8)
    rng = np.random.default_rng(0)
    for length in (0, 1, 2, 5, 6, 7, 40, 200):
        text = rng.choice(letters, length).tobytes().decode()
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode(text).tolist()
        assert theirs.decode(ids) == ours.decode(np.array(ids, dtype=int))
