"""Which expert fired where: the router's choices base by base, and what each expert prefers.

Axis legend: L layers, E experts, K choices, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

from genomoe.genome.alphabet import Tokenizer, to_bytes
from genomoe.inference.embedding import batches_by_length, encode_checked
from genomoe.model.transformer import GenoMoEModel

__all__ = ["expert_enrichment", "expert_load", "route_sequences"]


def route_sequences(
    model: GenoMoEModel,
    tokenizer: Tokenizer,
    sequences: Sequence[str | bytes],
    *,
    batch_tokens: int = 16384,
) -> pd.DataFrame:
    """One row for each token and layer.

    Columns: sequence (number from 0), position (first base of the token, 0-based), token (its letters),
    layer (from 0), expert_1 ... expert_K (best first) and score_1 ... score_K (their weights, summing to 1).
    """
    letters = [to_bytes(sequence) for sequence in sequences]
    ids = [encode_checked(model, tokenizer, sequence, number) for number, sequence in enumerate(letters)]
    per, choices = tokenizer.bases_per_token, model.config.top_k
    frames = []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            device = model.embed.weight.device
            for members, tokens_BS, valid_BS in batches_by_length(ids, tokenizer.pad_id, batch_tokens, device):
                output = model(tokens_BS, valid=valid_BS, compute_logits=False)
                row_T, place_T = (axis.cpu().numpy() for axis in valid_BS.nonzero(as_tuple=True))
                keep_T = valid_BS.reshape(-1).cpu().numpy()
                base = {
                    "sequence": np.asarray(members)[row_T],
                    "position": place_T * per,
                    "token": [
                        letters[members[row]][place * per : (place + 1) * per].decode("ascii").upper()
                        for row, place in zip(row_T, place_T, strict=True)
                    ],
                }
                for layer, routing in enumerate(output.routing):
                    expert_TK = routing.expert_index_TK.cpu().numpy()[keep_T]
                    score_TK = routing.scores_TK.float().cpu().numpy()[keep_T]
                    frame = pd.DataFrame(base | {"layer": layer})
                    for k in range(choices):
                        frame[f"expert_{k + 1}"] = expert_TK[:, k]
                    for k in range(choices):
                        frame[f"score_{k + 1}"] = score_TK[:, k]
                    frames.append(frame)
    finally:
        model.train(training)
    table = pd.concat(frames, ignore_index=True)
    return table.sort_values(["sequence", "layer", "position"], ignore_index=True)


def expert_load(table: pd.DataFrame) -> pd.DataFrame:
    """Share of the tokens whose choices include each expert, layers by experts; a row sums to K."""
    return _per_label(table, pd.Series("all", index=table.index)).droplevel("label")


def expert_enrichment(table: pd.DataFrame, labels: pd.Series) -> pd.DataFrame:
    """log2 of how much more often an expert fires on tokens of a label than on all tokens.

    Args:
        table: from `route_sequences`.
        labels: one value for each row of it: the token, a k-mer, a feature class.

    Returns rows (label, layer) and a column for each expert; 0 is no preference. Half a count is added to
    each cell, so an expert that never fires gives a finite number.
    """
    counts = _counts(table, labels)
    totals = counts.groupby(level="layer").transform("sum")
    label_tokens = labels.groupby([labels.rename("label"), table["layer"]]).size()
    layer_tokens = table.groupby("layer").size()
    shares = (counts + 0.5).div(label_tokens.reindex(counts.index) + 1, axis=0)
    overall = (totals + 0.5).div(layer_tokens.reindex(counts.index, level="layer") + 1, axis=0)
    return (shares / overall).apply(np.log2)


def _counts(table: pd.DataFrame, labels: pd.Series) -> pd.DataFrame:
    experts = [name for name in table.columns if name.startswith("expert_")]
    long = pd.concat(
        [pd.DataFrame({"label": labels, "layer": table["layer"], "expert": table[name]}) for name in experts]
    )
    return long.groupby(["label", "layer", "expert"]).size().unstack("expert", fill_value=0)


def _per_label(table: pd.DataFrame, labels: pd.Series) -> pd.DataFrame:
    counts = _counts(table, labels)
    sizes = labels.groupby([labels.rename("label"), table["layer"]]).size()
    return counts.div(sizes.reindex(counts.index), axis=0)
