"""Ids read from another project's folder, never guessed."""

import json

import pytest

from genomoe.genome.errors import GenoMoEError
from genomoe.genome.foreign_tokenizer import tokenizer_from_folder

VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": 2, "A": 8, "T": 9, "C": 10, "G": 11, "N": 12}


def write(folder, vocabulary=None, *, added=(), config=None, tokens=None):
    document = {"model": {"type": "BPE", "vocab": VOCABULARY if vocabulary is None else vocabulary}}
    document["added_tokens"] = [{"id": number, "content": text} for text, number in added]
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 128, **(config or {})}))
    names = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "unk_token": "<unk>"} if tokens is None else tokens
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_ids_are_those_of_the_file(tmp_path):
    tokenizer = tokenizer_from_folder(write(tmp_path))
    assert tokenizer.base_ids == (8, 10, 11, 9)
    assert (tokenizer.unk_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (12, 1, 2, 2)
    assert tokenizer.vocab_size == 128
    assert tokenizer.encode("ACGTNryu").tolist() == [8, 10, 11, 9, 12, 12, 12, 9]


def test_unigram_lists_word_marks_and_added_tokens(tmp_path):
    pieces = [["<unk>", 0.0], ["\u2581A", -1.0], ["\u2581C", -1.0], ["\u2581G", -1.0], ["\u2581T", -1.0]]
    tokens = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    folder = write(tmp_path, pieces, added=[("<pad>", 7), ("</s>", 6)], tokens=tokens)
    tokenizer = tokenizer_from_folder(folder)
    assert tokenizer.base_ids == (1, 2, 3, 4)
    assert (tokenizer.unk_id, tokenizer.pad_id, tokenizer.eos_id) == (0, 7, 6)


def test_ids_of_special_tokens_may_stand_in_config(tmp_path):
    folder = write(tmp_path, config={"pad_token_id": 3, "eos_token_id": 2}, tokens={})
    assert tokenizer_from_folder(folder).pad_id == 3


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "words"),
    [
        ({"A": 1, "C": 2, "G": 3, "</s>": 0}, None, "no token for T"),
        ({**VOCABULARY, "AC": 13}, None, "several bases"),
        ({key: value for key, value in VOCABULARY.items() if key not in ("N", "<unk>")}, None, "neither a token for N"),
        (VOCABULARY, {}, "end-of-sequence"),
        ({}, None, "does not say which id"),
    ],
)
def test_what_can_not_be_read_is_refused(tmp_path, vocabulary, tokens, words):
    with pytest.raises(GenoMoEError, match=words):
        tokenizer_from_folder(write(tmp_path, vocabulary, tokens=tokens))
