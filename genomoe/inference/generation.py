"""Sampling sequences base by base, the keys and values of what is already there being kept.

Axis legend: B samples, L longest sequence, H query heads, G key/value heads, C head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from genomoe.genome.alphabet import Tokenizer, to_bytes
from genomoe.genome.errors import GenoMoEError
from genomoe.inference.engine import log_probabilities
from genomoe.model.transformer import GenoMoEModel
from genomoe.ops.attention import attention

__all__ = ["DecodeCache", "generate"]


class DecodeCache:
    """Attention for growing sequences: a prompt [1, S] first, then one token of each sample at a time."""

    def __init__(self, samples: int, longest: int):
        self.samples, self.longest, self.length = samples, longest, 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if q.dim() == 4:  # the prompt, shared by all samples
            for store, new in ((self._keys, k), (self._values, v)):
                kept = new.new_zeros(self.samples, self.longest, *new.shape[2:])
                kept[:, : new.shape[1]] = new
                store.append(kept)
            return attention(q, k, v, window=window)
        self._keys[layer][:, self.length] = k
        self._values[layer][:, self.length] = v
        first = 0 if window is None else max(0, self.length + 1 - window)
        keys, values = (x[layer][:, first : self.length + 1].transpose(1, 2) for x in (self._keys, self._values))
        out = F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=q.shape[1] != keys.shape[1])
        return out[:, :, 0]


def generate(
    model: GenoMoEModel,
    tokenizer: Tokenizer,
    prompt: str | bytes,
    *,
    n: int,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[str]:
    """`samples` continuations of a prompt, each of `n` tokens of bases (A, C, G, T only), without the prompt.

    Args:
        prompt: at least one base.
        temperature: 0 takes the likeliest base always; 1 is the model's distribution.
        top_k: only the k likeliest tokens.
        top_p: only the likeliest tokens that together have at least this probability.
        seed: of a generator of its own; the global random state is left alone.

    Raises GenoMoEError for an empty prompt, bad numbers, or prompt and continuation longer than the context.
    """
    ids = tokenizer.encode(to_bytes(prompt))
    if not len(ids):
        raise GenoMoEError("The prompt is empty: the model predicts a base from those before it, so give at least one.")
    for name, value, allowed, words in (
        ("n", n, n >= 1, "at least 1"),
        ("samples", samples, samples >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "at least 0"),
        ("top_k", top_k, top_k is None or top_k >= 1, "at least 1"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
    ):
        if not allowed:
            raise GenoMoEError(f"{name} is {value}; it must be {words}.")
    if len(ids) + n > model.config.max_context:
        raise GenoMoEError(
            f"Prompt and continuation are {len(ids) + n} tokens, more than the model's context of "
            f"{model.config.max_context}."
        )
    device = model.embed.weight.device
    allowed_V = torch.full((model.config.vocab_size,), float("-inf"), device=device)
    allowed_V[_base_tokens(tokenizer)] = 0.0
    random = torch.Generator(device=device).manual_seed(seed)
    cache = DecodeCache(samples, len(ids) + n)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            tokens = torch.as_tensor(ids.astype("int64"), device=device)[None]
            hidden = model(tokens, compute_logits=False, attend=cache).hidden[:, -1].expand(samples, -1)
            cache.length = len(ids)
            steps = []
            bounds = torch.arange(samples + 1, dtype=torch.int32, device=device)
            for step in range(n):
                log_p_BV = log_probabilities(hidden, model.lm_head.weight) + allowed_V
                chosen_B = _sample(log_p_BV, temperature, top_k, top_p, random)
                steps.append(chosen_B)
                if step == n - 1:
                    break
                hidden = model(
                    chosen_B,
                    cu_seqlens=bounds,
                    max_seqlen=cache.length + 1,
                    position_ids=torch.full_like(chosen_B, cache.length),
                    compute_logits=False,
                    attend=cache,
                ).hidden
                cache.length += 1
    finally:
        model.train(training)
    return [tokenizer.decode(row) for row in torch.stack(steps, dim=1).cpu().numpy()]


def _sample(log_p_BV: Tensor, temperature: float, top_k: int | None, top_p: float, random: torch.Generator) -> Tensor:
    if temperature == 0:
        return log_p_BV.argmax(-1)
    p_BV = (log_p_BV / temperature).softmax(-1)
    if top_k is not None or top_p < 1:
        sorted_BV, order_BV = p_BV.sort(-1, descending=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        keep_BV = before_BV < top_p
        if top_k is not None:
            keep_BV[:, top_k:] = False
        p_BV = torch.zeros_like(p_BV).scatter(-1, order_BV, sorted_BV * keep_BV)
    return torch.multinomial(p_BV, 1, generator=random)[:, 0]


def _base_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens that spell A, C, G and T only."""
    if tokenizer.bases_per_token == 1:
        return list(tokenizer.base_ids)
    import itertools

    words = ("".join(letters) for letters in itertools.product("ACGT", repeat=tokenizer.bases_per_token))
    return [int(tokenizer.encode(word)[0]) for word in words]
