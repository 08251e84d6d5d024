"""Vectors for sequences: hidden states of any layer, pooled or one for each token.

Axis legend: N sequences, B batch, S longest of the batch, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from genomoe.genome.alphabet import Tokenizer, reverse_complement, to_bytes
from genomoe.genome.errors import GenoMoEError
from genomoe.model.heads import pool as pool_hidden
from genomoe.model.transformer import GenoMoEModel

__all__ = ["batches_by_length", "embed", "hidden_states"]

Pool = Literal["mean", "max", "last", "none"]


def embed(
    model: GenoMoEModel,
    tokenizer: Tokenizer,
    sequences: Sequence[str | bytes],
    *,
    layer: int = -1,
    pool: Pool = "mean",
    strands: Literal["fwd", "both"] = "fwd",
    batch_tokens: int = 16384,
) -> np.ndarray | list[np.ndarray]:
    """One float32 vector for each sequence, [N, D], or with `pool="none"` a list of [tokens, D].

    Padding follows a sequence and a causal model never looks ahead, so batch mates do not change a vector.

    Args:
        sequences: of any lengths up to the model's context; upper and lower case are the same.
        layer: -1 the last layer after its final norm; 0 the embedding; n the residual stream after layer n.
        pool: over the tokens; "last" alone has seen the whole sequence.
        strands: both: the mean with the reverse complement's, whose token order is turned back under "none".

    Raises GenoMoEError for an empty sequence, one longer than the context, or a layer the model lacks.
    """
    if not -1 <= layer <= model.config.num_layers:
        raise GenoMoEError(f"There is no layer {layer}: give -1 or 0 to {model.config.num_layers}.")
    if pool not in ("mean", "max", "last", "none"):
        raise GenoMoEError(f"Unknown pooling '{pool}': it is mean, max, last or none.")
    if strands == "both" and pool == "none" and tokenizer.bases_per_token > 1:
        raise GenoMoEError("Tokens of several bases have no partner on the other strand: pool, or use strands=fwd.")
    letters = [to_bytes(sequence) for sequence in sequences]
    found = _one_strand(model, tokenizer, letters, layer, pool, batch_tokens)
    if strands == "both":
        other = _one_strand(model, tokenizer, [reverse_complement(x) for x in letters], layer, pool, batch_tokens)
        if pool == "none":
            other = [x[::-1] for x in other]
        found = [(a + b) / 2 for a, b in zip(found, other, strict=True)]
    return found if pool == "none" else np.stack(found) if found else np.zeros((0, model.config.hidden_size))


def _one_strand(
    model: GenoMoEModel, tokenizer: Tokenizer, letters: list[bytes], layer: int, pool: Pool, batch_tokens: int
) -> list[np.ndarray]:
    ids = [encode_checked(model, tokenizer, sequence, number) for number, sequence in enumerate(letters)]
    out: list[np.ndarray] = [np.zeros(0)] * len(ids)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for members, tokens_BS, valid_BS in batches_by_length(
                ids, tokenizer.pad_id, batch_tokens, model.embed.weight.device
            ):
                hidden_BSD = hidden_states(model, tokens_BS, valid_BS, layer)
                if pool == "none":
                    for row, index in enumerate(members):
                        out[index] = hidden_BSD[row, : len(ids[index])].float().cpu().numpy()
                else:
                    pooled = pool_hidden(hidden_BSD, valid_BS, pool).cpu().numpy()
                    for row, index in enumerate(members):
                        out[index] = pooled[row]
    finally:
        model.train(training)
    return out


def hidden_states(model: GenoMoEModel, tokens_BS: Tensor, valid_BS: Tensor, layer: int) -> Tensor:
    """[B, S, D] of one layer; see `embed` for the numbering."""
    output = model(tokens_BS, valid=valid_BS, compute_logits=False, output_hidden_states=layer != -1)
    if layer == -1:
        return output.hidden
    assert output.hidden_states is not None
    return output.hidden_states[layer]


def encode_checked(model: GenoMoEModel, tokenizer: Tokenizer, sequence: bytes, number: int) -> np.ndarray:
    """Token ids, or an error that names the sequence by its number from 1."""
    if not sequence:
        raise GenoMoEError(f"Sequence {number + 1} is empty.")
    ids = tokenizer.encode(sequence)
    if len(ids) > model.config.max_context:
        raise GenoMoEError(
            f"Sequence {number + 1} has {len(ids)} tokens, more than the model's context of "
            f"{model.config.max_context}: cut it into windows."
        )
    return ids


def batches_by_length(
    ids: Sequence[np.ndarray], pad_id: int, batch_tokens: int, device: torch.device
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Batches of sequences of near lengths: their indices, tokens [B, S] padded at the end, and what is no
    padding.
    """
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and (end + 1 - start) * len(ids[order[end]]) <= batch_tokens:
            end += 1
        members = order[start:end]
        longest = len(ids[members[-1]])
        tokens = np.full((len(members), longest), pad_id, dtype=np.int64)
        valid = np.zeros((len(members), longest), dtype=bool)
        for row, index in enumerate(members):
            tokens[row, : len(ids[index])] = ids[index]
            valid[row, : len(ids[index])] = True
        yield members, torch.from_numpy(tokens).to(device), torch.from_numpy(valid).to(device)
        start = end
