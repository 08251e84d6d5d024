"""A fine-tuned model on disk, and predictions with it: the backbone, the head, and what lies between."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors.torch import load_file, save_file

from genomoe.genome.alphabet import Tokenizer, make_tokenizer
from genomoe.genome.errors import GenoMoEError
from genomoe.model.pretrained import from_pretrained, save_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.features import FeatureModel, TokenTable
from genomoe.training.finetune import FineTuneResult
from genomoe.training.finetune_module import FineTuneOptions, Scaled, predictions_of
from genomoe.training.heads import make_head
from genomoe.training.tasks import TaskConfig, read_inputs

__all__ = ["FineTuned", "load_finetuned", "save_finetuned"]

FORMAT_VERSION = 1


def save_finetuned(
    folder: str | os.PathLike[str],
    result: FineTuneResult,
    task: TaskConfig,
    options: FineTuneOptions,
    classes: tuple[str, ...],
    tokenizer: Tokenizer,
    *,
    card: dict[str, Any],
) -> None:
    """Writes model/ (the backbone), head.safetensors and head.json into a run directory."""
    assert result.model is not None
    run = Path(folder)
    save_pretrained(result.model, tokenizer.to_dict(), run / "model", card=card)
    state = {name: value.contiguous() for name, value in result.head.state_dict().items()}
    save_file(state, run / "head.safetensors", {"format": "pt"})
    described = {
        "format": "genomoe-finetuned",
        "format_version": FORMAT_VERSION,
        "task": dataclasses.asdict(task),
        "options": dataclasses.asdict(options),
        "classes": list(classes),
        "positions": result.positions,
        "label_scale": list(result.label_scale),
    }
    (run / "head.json").write_text(json.dumps(described, indent=2) + "\n")


class FineTuned:
    """Predicts what it was fine-tuned for; see `load_finetuned`."""

    def __init__(self, backbone: GenoMoEModel, tokenizer: Tokenizer, head: Scaled, described: dict[str, Any]):
        self.task = TaskConfig.from_config(described["task"], where="task")
        self.options = FineTuneOptions.from_config(described["options"], where="options")
        self.classes = tuple(described["classes"])
        self._mean, self._deviation = described["label_scale"]
        self._positions = described["positions"]
        self.tokenizer, self.head = tokenizer, head.eval()
        self.model = FeatureModel(
            backbone,
            layer=self.options.layer,
            strands=self.options.strands,
            pair=self.task.input == "pair",
            pad_id=tokenizer.pad_id,
        ).eval()

    def predict(self, table: pd.DataFrame) -> np.ndarray:
        """One value a row, or a probability for each class ([rows, classes]); NaN for rows without a sequence.

        Args:
            table: the task's columns, but for label and split.

        Raises GenoMoEError if the sequences have another length than a head for aligned ones was trained on.
        """
        inputs = read_inputs(self.task, table)
        tokens = TokenTable(inputs, self.tokenizer, both_strands=self.options.strands != "fwd")
        if self.options.pooling == "position" and tokens.positions != self._positions:
            raise GenoMoEError(f"This head reads sequences of {self._positions} bases, each position apart.")
        device = self.model.backbone.embed.weight.device
        copies = 2 if self.options.strands == "average" else 1
        found = []
        with torch.inference_mode():
            for start in range(0, len(tokens.ids), self.options.batch_size):
                part = slice(start, start + self.options.batch_size)
                ids, own = (torch.from_numpy(x[part]).to(device) for x in (tokens.ids, tokens.own))
                out = self.head(*self.model(ids.long(), own))
                found.append(out.unflatten(0, (copies, -1)).mean(0).cpu())
        predictions = predictions_of(torch.cat(found), len(self.classes))
        if not self.classes:
            predictions = predictions * self._deviation + self._mean
        whole = np.full((len(table), *predictions.shape[1:]), np.nan)
        whole[inputs.rows] = predictions
        return whole


def load_finetuned(folder: str | os.PathLike[str], device: str = "cpu") -> FineTuned:
    """Opens a run directory of `genomoe finetune`.

    Raises FileNotFoundError if it is none, GenoMoEError for another format version.
    """
    run = Path(folder)
    if not (run / "head.json").is_file():
        raise FileNotFoundError(f"{run} is not a run of genomoe finetune: it has no head.json.")
    described = json.loads((run / "head.json").read_text())
    if described.get("format_version") != FORMAT_VERSION:
        raise GenoMoEError(
            f"{run}/head.json has format version {described.get('format_version')}, not {FORMAT_VERSION}."
        )
    backbone, spec = from_pretrained(run / "model", device, torch.float32)
    if spec is None:
        raise GenoMoEError(f"{run}/model has no tokenizer.json: the run is incomplete.")
    state = load_file(run / "head.safetensors")
    options = FineTuneOptions.from_config(described["options"], where="options")
    head = make_head(
        options.pooling,
        features=len(state["mean"]),
        positions=described["positions"],
        outputs=max(1, len(described["classes"])),
        channels=options.channels,
        hidden=options.hidden,
        dropout=options.dropout,
    )
    scaled = Scaled(head, state["mean"], state["deviation"])
    scaled.load_state_dict(state)
    return FineTuned(backbone, make_tokenizer(spec), scaled.to(device), described)
