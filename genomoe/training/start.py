"""Starting a run from the weights of an earlier one, for example at a longer context."""

from pathlib import Path
from typing import Any

import torch

from genomoe.genome.alphabet import make_tokenizer
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
        tokenizer: of the new run, as a dict; must be that of the weights where their folder says which it is.

    Raises:
        ConfigError: the weights belong to another architecture or tokenizer.
        FileNotFoundError: there is no model.
    """
    folder = Path(folder)
    inside = folder / "model"
    source, spec = from_pretrained(inside if (inside / "config.json").is_file() else folder)
    ours, theirs = model.config.to_dict(), source.config.to_dict()
    for field in ours:
        if field not in MAY_DIFFER and ours[field] != theirs[field]:
            raise ConfigError(
                f"start_from={folder}: its model has {field}={theirs[field]}, this run model.{field}={ours[field]}; "
                f"only {', '.join(sorted(MAY_DIFFER))} may differ."
            )
    if spec is not None and make_tokenizer(spec).to_dict() != tokenizer:
        raise ConfigError(
            f"start_from={folder}: its tokenizer is {spec['name']} with other ids than {tokenizer['name']}, that of "
            "data.tokenizer: give the tokenizer.json of that folder as data.tokenizer."
        )
    state = source.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])
