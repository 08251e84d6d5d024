"""-log2 probability of every base of a long sequence under a model with a shorter context.

Axes: B windows, S tokens of a window.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from genomoe.genome.alphabet import Tokenizer
from genomoe.model.transformer import GenoMoEModel

LN2 = float(np.log(2.0))


@torch.inference_mode()
def token_bits(
    model: GenoMoEModel,
    tokens: NDArray[np.integer],
    *,
    context: int,
    stride: int,
    batch_tokens: int = 16_384,
    progress: Callable[[float], None] | None = None,
) -> Iterator[NDArray[np.float64]]:
    """-log2 p of every token given those before it, in pieces, each of one batch; that of the first token is NaN.

    Windows of `context` tokens start every `stride`. Each token is scored once, in the first window that
    reaches it, so that it sees at least `context - stride` tokens (all of them near the start).

    Raises:
        ValueError: a stride outside 1 .. context - 1.
    """
    if not 1 <= stride < context:
        raise ValueError(f"stride={stride} is not allowed: it must be from 1 to the context less one, {context - 1}.")
    device = next(model.parameters()).device
    if len(tokens) < 2:
        yield np.full(len(tokens), np.nan)
        return
    last = max(0, len(tokens) - context)
    starts = np.unique(np.minimum(np.arange(0, last + stride, stride), last))
    per_batch = max(1, batch_tokens // context)
    new, scored_to = [np.full(1, np.nan)], 1
    for first in range(0, len(starts), per_batch):
        part = starts[first : first + per_batch]
        windows = np.stack([tokens[start : start + context] for start in part]).astype(np.int64)
        windows_BS = torch.from_numpy(windows).to(device)
        logits = model(windows_BS).logits
        log_p = torch.log_softmax(logits[:, :-1].float(), dim=-1)
        nats_BS = -log_p.gather(-1, windows_BS[:, 1:, None])[..., 0].double().cpu().numpy()
        for start, nats_S in zip(part, nats_BS, strict=True):
            new.append(nats_S[scored_to - start - 1 :] / LN2)
            scored_to = start + len(nats_S) + 1
        if progress:
            progress(min(first + per_batch, len(starts)) / len(starts))
        yield np.concatenate(new)
        new = []


def base_bits(
    model: GenoMoEModel, tokenizer: Tokenizer, letters: NDArray[np.uint8], **windows: object
) -> Iterator[NDArray[np.float64]]:
    """`token_bits` spread evenly over the bases of each token, in pieces; NaN for the first token's bases."""
    whole = len(letters) // tokenizer.bases_per_token  # the rest is one token a base
    place = 0
    for bits in token_bits(model, tokenizer.encode(letters), **windows):  # type: ignore[arg-type]
        bases = np.where(np.arange(place, place + len(bits)) < whole, tokenizer.bases_per_token, 1)
        yield np.repeat(bits / bases, bases)
        place += len(bits)
