"""The loop that `genomoe bench scoring` compares with: `MixtralForCausalLM` over batches of whole windows.

Its expert implementation is the faster of two, under inference mode with SDPA, whose kernel PyTorch chooses by its
defaults; it sums float32 log-softmax.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from genomoe.bench.arbiter import in_float64
from genomoe.bench.attention_operations import AttentionOperations
from genomoe.bench.device import free
from genomoe.bench.interleaved import interleaved
from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.inference.engine import Pair
from genomoe.model.pretrained import export_mixtral
from genomoe.model.transformer import GenoMoEModel

__all__ = ["HuggingFaceLoop"]


class HuggingFaceLoop:
    """`MixtralForCausalLM` with a model's weights, scoring whole windows in batches."""

    def __init__(self, model: GenoMoEModel, device: str, dtype: torch.dtype):
        import transformers

        mixtral: Any = transformers.MixtralForCausalLM
        with tempfile.TemporaryDirectory() as folder:
            export_mixtral(model, NucleotideTokenizer().to_dict(), f"{folder}/mixtral")
            self.models = {
                name: mixtral.from_pretrained(
                    f"{folder}/mixtral", dtype=dtype, attn_implementation="sdpa", experts_implementation=name
                )
                .to(device)
                .eval()
                for name in ("grouped_mm", "eager")
            }
        self.choice: str | None = None
        self.attention = ""
        """The attention operations that it runs."""

    def choose_experts(self, pairs: Sequence[Pair], batch_tokens: int, device: str) -> str:
        """The expert implementation that is faster on half a batch; the other is dropped."""
        if self.choice is None:
            few = pairs[: max(1, batch_tokens // len(pairs[0].ref) // 4)]
            runs = {name: partial(self._scores, model, few, batch_tokens, False) for name, model in self.models.items()}
            seconds, _, _ = interleaved(runs, 2, device, float("inf"))
            self.choice = min(seconds, key=lambda name: seconds[name])
            self.models = {self.choice: self.models[self.choice]}
            free(device)
            with AttentionOperations() as attention:
                self._scores(self.models[self.choice], few[:1], batch_tokens, False)
            self.attention = ", ".join(sorted(attention.names))
        return self.choice

    def scores(self, pairs: Sequence[Pair], batch_tokens: int, *, ref_once: bool) -> np.ndarray:
        """ALT minus REF log-likelihoods of whole windows."""
        return self._scores(self.chosen, pairs, batch_tokens, ref_once)

    def float64_scores(self, pairs: Sequence[Pair], deadline: float) -> np.ndarray:
        """The scores of as many pairs as there is time for, with every step in float64."""
        model = in_float64(self.chosen)
        known: dict[bytes, float] = {}
        scores = []
        for pair in pairs:
            if time.monotonic() > deadline:
                break
            for window in (pair.ref, pair.alt):  # one at a time: all its attention scores exist at once
                if window.tobytes() not in known:
                    known[window.tobytes()] = float(_log_likelihoods(model, np.stack([window]))[0])
            scores.append(known[pair.alt.tobytes()] - known[pair.ref.tobytes()])
        return np.array(scores)

    def float32_scores(self, pairs: Sequence[Pair]) -> np.ndarray:
        """The scores of a copy that computes in float32."""
        model = copy.deepcopy(self.chosen).float()
        model.set_experts_implementation("eager")  # its grouped product is of bfloat16 only
        return self._scores(model, pairs, 32768, False)

    @property
    def chosen(self) -> Any:
        """The model with the faster experts."""
        assert self.choice is not None, "choose_experts comes first"
        return self.models[self.choice]

    def _scores(self, model: Any, pairs: Sequence[Pair], batch_tokens: int, ref_once: bool) -> np.ndarray:
        windows = [pair.alt for pair in pairs]
        place: dict[bytes, int] = {}
        ref_at = []
        for index, pair in enumerate(pairs):
            key = pair.ref.tobytes() if ref_once else str(index).encode()
            if key not in place:
                place[key] = len(windows)
                windows.append(pair.ref)
            ref_at.append(place[key])
        size = max(1, batch_tokens // len(windows[0]))
        batches = [np.stack(windows[start : start + size]) for start in range(0, len(windows), size)]
        likelihood = torch.cat([_log_likelihoods(model, batch) for batch in batches]).cpu().numpy()
        return likelihood[: len(pairs)] - likelihood[ref_at]


@torch.inference_mode()
def _log_likelihoods(model: Any, windows: np.ndarray) -> torch.Tensor:
    """log p of whole windows [B, L], summed in float64 over logits' softmax in float32, or float64 for such a model."""
    ids = torch.from_numpy(windows).to(model.device).long()
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.log_softmax(logits.to(wide), dim=-1).gather(-1, ids[:, 1:, None])[..., 0].double().sum(1)
