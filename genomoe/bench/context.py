"""How long a context trains in one step, and how fast: what `genomoe bench context` measures.

Genos-1.2B with fused AdamW, one sequence a step, ours and Hugging Face's with and without gradient checkpointing.
"""

from __future__ import annotations

from genomoe.bench.step import StepCase
from genomoe.model import ModelConfig

K = 1024
CHUNK = 32 * K


def context_cases() -> list[StepCase]:
    """From 32k to 4M tokens, the most telling first, so that a time budget cuts the least."""
    genos = ModelConfig.preset("genos-1.2b", aux_loss_coef=0.001)
    windowed = genos.replace(window=8 * K, max_context=4096 * K)

    def one(
        context: int, implementation: str, activation: str, seconds: float, *, model: ModelConfig = genos, **more
    ) -> StepCase:
        once = {"warmups": 0, "repeats": 1} if seconds > 15 else {"warmups": 1, "repeats": 1}
        size = f"{context // K}k" if context < K * K else f"{context // K // K}M"
        if implementation.startswith("genomoe"):
            more = {"chunk_tokens": min(CHUNK, context), "save": "recompute", **more}
        return StepCase(
            case=f"genos-1.2b 1x{size}" + (f" window {model.window // K}k" if model.window else ""),
            implementation=implementation,
            model=model,
            batch=1,
            context=context,
            activation=activation,
            seconds=seconds,
            **{**once, **more},
        )

    return [
        one(32 * K, "genomoe-fused", "mlp", 5),
        one(32 * K, "hf-grouped_mm", "none", 5),
        one(128 * K, "genomoe-fused", "mlp", 10),
        one(128 * K, "genomoe-fused", "mlp", 10, precision="fp8"),
        one(128 * K, "genomoe-fused", "layer+attention", 10),
        one(128 * K, "hf-grouped_mm", "layer", 14),
        one(256 * K, "genomoe-fused", "mlp", 18),
        one(512 * K, "genomoe-fused", "layer+attention+mxfp8+offload", 70),
        one(512 * K, "genomoe-fused", "layer+attention+mxfp8+offload", 65, precision="fp8"),
        one(512 * K, "hf-grouped_mm", "layer", 85),
        one(4096 * K, "genomoe-fused", "layer+mxfp8+offload", 90, model=windowed),
        one(256 * K, "hf-grouped_mm", "layer", 25),
        one(1024 * K, "genomoe-fused", "layer+attention+mxfp8+offload", 235),
    ]
