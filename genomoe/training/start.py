"""Starting a run from the weights of an earlier one, for example at a longer context."""

from pathlib import Path
from typing import Any

import torch

from genomoe.genome.alphabet import make_tokenizer
from genomoe.genome.foreign_tokenizer import tokenizer_from_folder
from genomoe.model.pretrained import from_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.options import ConfigError

MAY_DIFFER = {
    "max_context", "rope_theta", "rope_scaling", "window", "global_every", "aux_loss_coef", "z_loss_coef",
    "router_bias_rate", "initializer_std",
}  # fmt: skip
"""Fields of `ModelConfig` that no weight depends on, so that a later stage may change them."""


@torch.no_grad()
def start_from(model: GenoMoEModel, tokenizer: dict[str, Any], folder: str | Path) -> None:
    """Copy the weights of a run, a model folder or a Hugging Face Mixtral folder into `model`, in its own dtype.

    Args:
        tokenizer: of the new run, as a dict; must give every base the id that the weights' folder says.

    Raises:
        ConfigError: the weights belong to another architecture or tokenizer.
        GenoMoEError: a Mixtral folder that does not say its ids.
        FileNotFoundError: there is no model.
    """
    folder = Path(folder)
    place = folder / "model" if (folder / "model" / "config.json").is_file() else folder
    source, spec = from_pretrained(place)
    ours, theirs = model.config.to_dict(), source.config.to_dict()
    for field in ours:
        if field not in MAY_DIFFER and ours[field] != theirs[field]:
            raise ConfigError(
                f"start_from={folder}: its model has {field}={theirs[field]}, this run model.{field}={ours[field]}; "
                f"only {', '.join(sorted(MAY_DIFFER))} may differ."
            )
    saved = make_tokenizer(spec) if spec is not None else tokenizer_from_folder(place)
    if any(saved.to_dict()[key] != tokenizer[key] for key in ("bases_per_token", "base_ids", "unk_id")):
        raise ConfigError(
            f"start_from={folder}: its tokenizer is {saved.name} with other ids than {tokenizer['name']}, that of "
            "data.tokenizer: give the tokenizer.json of that folder as data.tokenizer (of a Hugging Face folder, the "
            "one that `genomoe import` writes)."
        )
    state = source.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])
