"""`genomoe export` and `genomoe import`: Hugging Face Mixtral folders, both ways."""

from pathlib import Path

import torch

from genomoe.genome.alphabet import make_tokenizer
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.foreign_tokenizer import tokenizer_from_folder
from genomoe.genome.huggingface_tokenizer import huggingface_tokenizer
from genomoe.model.pretrained import export_mixtral, from_pretrained, import_mixtral, save_pretrained
from genomoe.training.precision import DTYPES


def export(model: Path, *, out: Path, dtype: str | None) -> None:
    """Write the model folder `model` (or that of a run) as a folder that transformers opens."""
    loaded, tokenizer = from_pretrained(_model_folder(model))
    if tokenizer is None:
        raise GenoMoEError(f"{model} is a Hugging Face folder already: there is nothing to export.")
    files = huggingface_tokenizer(make_tokenizer(tokenizer))
    export_mixtral(loaded, tokenizer, out, dtype=_dtype(dtype), files=files)
    print(f"{out}: transformers' AutoModelForCausalLM and AutoTokenizer open it")


def import_(folder: Path, *, out: Path, tokenizer: str | None, dtype: str | None) -> None:
    """Write the Hugging Face Mixtral folder `folder` as a model folder of ours."""
    loaded, known = import_mixtral(folder, dtype=_dtype(dtype))
    spec = tokenizer or known
    chosen = make_tokenizer(spec) if spec is not None else tokenizer_from_folder(folder)
    if chosen.vocab_size > loaded.config.vocab_size:
        raise GenoMoEError(
            f"the tokenizer {chosen.name} has {chosen.vocab_size} ids, the model's embedding only "
            f"{loaded.config.vocab_size} rows."
        )
    save_pretrained(loaded, chosen.to_dict(), out, card={"Converted from": str(folder)})
    print(f"{out}: genomoe.from_pretrained opens it")


def _model_folder(path: Path) -> Path:
    return path / "model" if (path / "model" / "config.json").exists() else path


def _dtype(name: str | None) -> torch.dtype | None:
    return DTYPES[name] if name else None
