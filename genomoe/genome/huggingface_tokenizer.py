"""Our tokenizers in Hugging Face's terms, so that `AutoTokenizer` gives an exported model the ids it was trained on."""

from __future__ import annotations

import itertools
from typing import Any

from genomoe.genome.alphabet import IUPAC, Tokenizer


def huggingface_tokenizer(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """The files `tokenizer.json` and `tokenizer_config.json` of a Hugging Face folder, as plain dicts by name.

    Ids are those of `tokenizer` for every nucleotide code in either case, and no special token is added. What is no
    nucleotide code becomes N, where `tokenizer` itself raises.
    """
    k = tokenizer.bases_per_token
    vocabulary = {}
    for letter in IUPAC.decode().replace("U", ""):
        token = int(tokenizer.encode(letter)[0])
        if letter == "N" or token != tokenizer.unk_id:
            vocabulary[letter] = token
    own = "".join(vocabulary)
    unknown = "N"
    if k > 1:
        vocabulary |= {
            "".join(kmer): int(tokenizer.encode("".join(kmer))[0]) for kmer in itertools.product("ACGT", repeat=k)
        }
        unknown = "N" * k
        vocabulary[unknown] = int(tokenizer.encode(unknown)[0])
    special = {tokenizer.pad_id: "<pad>", tokenizer.bos_id: "<bos>", tokenizer.eos_id: "<eos>"}
    vocabulary |= {text: token for token, text in special.items()}
    replace = [*((letter.lower(), letter) for letter in own), ("[uU]", "T"), (f"[^{own}]", "N")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text, **flags} for token, text in sorted(special.items())],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"Regex": old}, "content": new} for old, new in replace],
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": f".{{{k}}}|." if k > 1 else "."},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "pad_token": special[tokenizer.pad_id],
        "bos_token": special[tokenizer.bos_id],
        "eos_token": special[tokenizer.eos_id],
    }
    return {"tokenizer.json": document, "tokenizer_config.json": config}
