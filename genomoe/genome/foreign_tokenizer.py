"""Read which token id each base has from another project's checkpoint folder, so that no id is ever guessed.

Genos, for example, publishes its ids only in the ``tokenizer.json`` beside its weights: nothing else says them, so
GenoMoE holds no built-in map and reads that file. It must give every base a token of its own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from genomoe.genome.alphabet import IUPAC, MappedTokenizer
from genomoe.genome.errors import GenoMoEError

_SPACE = "\u2581"  # SentencePiece's mark of a word's start


def tokenizer_from_folder(folder: str | os.PathLike[str]) -> MappedTokenizer:
    """The tokenizer of a Hugging Face folder whose bases are single tokens.

    Reads the vocabulary of ``tokenizer.json`` (or ``vocab.json``), the special tokens of ``tokenizer_config.json`` or
    ``special_tokens_map.json`` (or the ids in ``config.json``) and the vocabulary size of ``config.json``. A folder
    without a padding token pads with its end-of-sequence token, whose weight is 0 anyway.

    Raises GenoMoEError when the folder holds no vocabulary, a base has no token of its own, or the vocabulary has
    tokens of several bases, which this reader would not reproduce.
    """
    place = Path(folder)
    vocabulary = _vocabulary(place)
    ids = {}
    for letter in IUPAC.decode():
        for text in (letter, letter.lower(), _SPACE + letter):
            if text in vocabulary:
                ids[letter] = vocabulary[text]
                break
    missing = [letter for letter in "ACGT" if letter not in ids]
    if missing:
        raise GenoMoEError(f"The vocabulary of {place} has no token for {', '.join(missing)}.")
    long = [text for text in vocabulary if len(text) > 1 and set(text.upper()) <= set("ACGTN")]
    if long:
        raise GenoMoEError(
            f"The vocabulary of {place} has tokens of several bases, such as {sorted(long)[0]!r}; only "
            "one-base-a-token checkpoints can be read this way."
        )
    special = _special_ids(place, vocabulary)
    if "N" not in ids:
        if special.get("unk") is None:
            raise GenoMoEError(f"The vocabulary of {place} has neither a token for N nor an unknown token.")
        ids["N"] = special["unk"]
    ids.pop("U", None)
    eos = special.get("eos")
    if eos is None:
        raise GenoMoEError(f"{place} names no end-of-sequence token.")
    size = _read(place / "config.json").get("vocab_size") or max(vocabulary.values()) + 1
    return MappedTokenizer(
        ids=ids,
        special={
            "pad": eos if special.get("pad") is None else special["pad"],
            "bos": eos if special.get("bos") is None else special["bos"],
            "eos": eos,
        },
        vocab_size=int(size),
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GenoMoEError(f"{path} is not valid JSON ({error}).") from None
    return content if isinstance(content, dict) else {}


def _vocabulary(folder: Path) -> dict[str, int]:
    document = _read(folder / "tokenizer.json")
    vocabulary = (document.get("model") or {}).get("vocab") or _read(folder / "vocab.json")
    if isinstance(vocabulary, list):  # Unigram: [[text, score], ...] in order of ids
        vocabulary = {row[0]: number for number, row in enumerate(vocabulary)}
    for added in document.get("added_tokens") or []:
        vocabulary.setdefault(added["content"], added["id"])
    if not vocabulary:
        raise GenoMoEError(
            f"{folder} holds no tokenizer.json or vocab.json, so it does not say which id each base has; "
            "give --tokenizer (or tokenizer=), a name or a map of ids as MappedTokenizer takes it."
        )
    return {str(text): int(number) for text, number in vocabulary.items()}


def _special_ids(folder: Path, vocabulary: dict[str, int]) -> dict[str, int]:
    config = _read(folder / "config.json")
    named = {**_read(folder / "special_tokens_map.json"), **_read(folder / "tokenizer_config.json")}
    found: dict[str, int] = {}
    for role in ("pad", "bos", "eos", "unk"):
        token = named.get(f"{role}_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text in vocabulary:
            found[role] = vocabulary[text]
        elif isinstance(config.get(f"{role}_token_id"), int):
            found[role] = config[f"{role}_token_id"]
    return found
