"""Models on disk: our own folder, and Hugging Face Mixtral folders both ways.

A model folder holds `config.json` (architecture, format version, SHA-256 of the weights), `model.safetensors`,
`tokenizer.json` (the tokenizer as a plain dict: this module does not know what is in it) and `README.md` (the model
card). It is written under a temporary name and renamed, so a folder is whole or absent. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from genomoe.model.config import FORMAT_VERSION, ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.mixtral import from_mixtral_config, from_mixtral_state, to_mixtral_config, to_mixtral_state
from genomoe.model.transformer import GenoMoEModel

TOKENIZER_FILE = "tokenizer.json"
OUR_TOKENIZER_FILE = "genomoe_tokenizer.json"  # in a Mixtral folder, where tokenizer.json is the other library's
SHARD_BYTES = 5 * 10**9


def save_pretrained(
    model: GenoMoEModel,
    tokenizer: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    state: Mapping[str, Tensor] | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model folder; loading it gives bit-identical weights.

    Args:
        model: its weights may be of any floating dtype, which is kept.
        tokenizer: plain JSON-ready values.
        folder: made, or replaced if it is a model folder already.
        state: the model's weights, where its own are divided over processes; None: its own.
        card: what the model card says: key and value per line, for example what it was trained on.

    Raises:
        FileExistsError: the folder exists and is not a model folder.
    """
    with _new_folder(Path(folder)) as new:
        weights = new / "model.safetensors"
        state = model.state_dict() if state is None else state
        save_file(_own_tensors(state, model.config.tie_embeddings), weights, {"format": "pt"})
        config = {
            "format": "genomoe-model",
            "format_version": FORMAT_VERSION,
            "architecture": model.config.to_dict(),
            "weights_sha256": _sha256(weights),
        }
        _write_json(new / "config.json", config)
        _write_json(new / TOKENIZER_FILE, tokenizer)
        (new / "README.md").write_text(_card(model.config, card or {}), encoding="utf-8")
    return Path(folder)


def from_pretrained(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    kernels: KernelOptions | None = None,
    verify: bool = False,
) -> tuple[GenoMoEModel, dict[str, Any] | None]:
    """The model of a folder of ours, or of a Hugging Face Mixtral folder, in eval mode, and its tokenizer's dict.

    Args:
        folder: written by `save_pretrained`, `export_mixtral` or transformers.
        device: where the weights go.
        dtype: of the weights (the routers' stay float32); None: as saved.
        kernels: how the model is computed.
        verify: check the SHA-256 of the weights against config.json.

    Returns:
        The model and the tokenizer's dict, which is None for a Mixtral folder that we did not write.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: a configuration or tensors that do not fit.
    """
    folder = Path(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        inside = "it has no config.json" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"{folder} is not a model folder: {inside}; give the model/ folder of a run")
    fields = _read_json(config_file)
    if fields.get("format") != "genomoe-model":
        return import_mixtral(folder, device, dtype, kernels=kernels)
    version = fields.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{config_file} has format version {version!r}, this program reads {FORMAT_VERSION}: "
            "install the version of genomoe that wrote it"
        )
    weights = folder / "model.safetensors"
    if not weights.is_file():
        raise FileNotFoundError(f"{folder} is incomplete: it has no model.safetensors")
    if verify and _sha256(weights) != fields["weights_sha256"]:
        raise ValueError(f"{weights} does not match the SHA-256 in config.json: copy the folder again")
    config = ModelConfig.from_dict(fields["architecture"])
    model = _load(config, _read_tensors([weights]), device, dtype, kernels, str(weights))
    tokenizer_file = folder / TOKENIZER_FILE
    return model, _read_json(tokenizer_file) if tokenizer_file.is_file() else None


def export_mixtral(
    model: GenoMoEModel,
    tokenizer: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    files: Mapping[str, Mapping[str, Any]] | None = None,
) -> Path:
    """Write a folder that `transformers.MixtralForCausalLM.from_pretrained` opens.

    Args:
        files: further JSON files of the folder by name, such as the tokenizer's.
        dtype: of all tensors, the routers' too; None: that of the model's embedding.

    Raises:
        ValueError: the model uses an option that Mixtral's arithmetic lacks (the message names it).
    """
    dtype = dtype or model.embed.weight.dtype
    fields = to_mixtral_config(model.config)
    for name in ("pad", "bos", "eos"):
        fields[f"{name}_token_id"] = tokenizer.get(f"{name}_id")
    with _new_folder(Path(folder)) as new:
        state = to_mixtral_state(model.state_dict(), model.config)
        shards: list[dict[str, Tensor]] = [{}]
        size = 0
        for name, tensor in state.items():
            tensor = tensor.detach().to(dtype).cpu().contiguous().clone()
            if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
        names = ["model.safetensors"]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
            index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            total = sum(t.nbytes for shard in shards for t in shard.values())
            _write_json(new / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, new / name, {"format": "pt"})
        config = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **fields}
        _write_json(new / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
        _write_json(new / OUR_TOKENIZER_FILE, tokenizer)
        for name, content in (files or {}).items():
            _write_json(new / name, content)
    return Path(folder)


def import_mixtral(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    kernels: KernelOptions | None = None,
) -> tuple[GenoMoEModel, dict[str, Any] | None]:
    """The model of a Hugging Face Mixtral folder (safetensors), and our tokenizer's dict if we wrote the folder.

    Raises:
        FileNotFoundError: the folder or its weights are missing.
        ValueError: not a Mixtral checkpoint, tensors missing or left over, or weights only as pickles.
    """
    folder = Path(folder)
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: give a Hugging Face Mixtral folder")
    config = from_mixtral_config(_read_json(config_file))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(_read_json(index)["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            pickled = next(folder.glob("*.bin"), None)
            hint = f"; {pickled.name} is a pickle, which is never loaded: convert it" if pickled else ""
            raise FileNotFoundError(f"{folder} lacks {file.name}{hint}")
    state = from_mixtral_state(_read_tensors(files), config)
    model = _load(config, state, device, dtype, kernels, str(folder))
    tokenizer_file = folder / OUR_TOKENIZER_FILE
    return model, _read_json(tokenizer_file) if tokenizer_file.is_file() else None


# ---- helpers -------------------------------------------------------------------------------------------------


def _load(
    config: ModelConfig,
    state: dict[str, Tensor],
    device: torch.device | str,
    dtype: torch.dtype | None,
    kernels: KernelOptions | None,
    where: str,
) -> GenoMoEModel:
    model = GenoMoEModel(config, device="meta", kernels=kernels)
    for name, value in model.state_dict().items():
        if name not in state:
            if config.tie_embeddings and name == "lm_head.weight":
                continue
            raise ValueError(f"{where} has no tensor {name!r}: it is incomplete or of another architecture")
        if state[name].shape != value.shape:
            raise ValueError(
                f"{where}: tensor {name!r} has shape {tuple(state[name].shape)}, "
                f"but the architecture in config.json says {tuple(value.shape)}"
            )
    extra = sorted(state.keys() - model.state_dict().keys())
    if extra:
        raise ValueError(f"{where} has a tensor that the architecture in config.json lacks: {extra[0]!r}")

    def placed(name: str, tensor: Tensor) -> Tensor:
        keep = ".router." in name or not tensor.is_floating_point() or dtype is None
        return tensor.to(device=device, dtype=None if keep else dtype)

    model.load_state_dict({n: placed(n, t) for n, t in state.items()}, strict=False, assign=True)
    if config.tie_embeddings:
        model.lm_head.weight = model.embed.weight
    return model.eval()


def _own_tensors(state: Mapping[str, Tensor], tied: bool) -> dict[str, Tensor]:
    names = [name for name in state if not (tied and name == "lm_head.weight")]
    return {name: state[name].detach().cpu().contiguous().clone() for name in names}


def _read_tensors(files: list[Path]) -> dict[str, Tensor]:
    state = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    state[name] = tensors.get_tensor(name)
        except OSError:
            raise
        except Exception as error:
            raise ValueError(f"{file} is not a whole safetensors file ({error}): copy it again") from error
    return state


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name beside `folder`, which it replaces when the block ends without error."""
    if folder.exists() and not (folder.is_dir() and (not any(folder.iterdir()) or (folder / "config.json").is_file())):
        raise FileExistsError(f"{folder} exists and is not a model folder: choose another place or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        new.chmod(0o755)
        yield new
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            os.rename(folder, old / "model")
            os.rename(new, folder)
            shutil.rmtree(old)
        else:
            os.rename(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, but an object was expected")
    return value


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _card(config: ModelConfig, facts: Mapping[str, Any]) -> str:
    lines = [
        "# DNA language model",
        "",
        f"A mixture-of-experts decoder trained with GenoMoE: {config.num_parameters():,} parameters, "
        f"{config.num_active_parameters():,} active per token; {config.num_layers} layers of width "
        f"{config.hidden_size}, {config.num_experts} experts of which {config.top_k} per token; "
        f"context {config.max_context:,} tokens.",
        "",
        "```python",
        "import genomoe",
        'model = genomoe.from_pretrained("path/to/this/folder")',
        "```",
    ]
    if facts:
        lines += ["", "| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    return "\n".join(lines) + "\n"
