"""What a head sees: hidden states of one or both strands, of ALT alone or of REF and ALT, position by
position.

Axis legend: N rows, B batch, S positions that are the row's own, D hidden size, F features of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from genomoe.genome.alphabet import Tokenizer, reverse_complement
from genomoe.genome.errors import GenoMoEError
from genomoe.model.transformer import GenoMoEModel
from genomoe.training.tasks import TaskInputs

__all__ = ["FeatureModel", "TokenTable", "cache_features", "one_hot_features"]


class TokenTable:
    """Token ids of every view of every row, padded at the end: strands by haplotypes.

    `ids` is [N, views, S'] and `own` marks each view's own positions; the view order is (+ALT, +REF, -ALT,
    -REF), those that the task does not have left out.
    """

    def __init__(self, data: TaskInputs, tokenizer: Tokenizer, *, both_strands: bool):
        if tokenizer.bases_per_token != 1 and data.centre != slice(None):
            raise GenoMoEError("A locus with flanks needs a tokenizer of one token a base.")
        haplotypes = [data.alt] if data.ref is None else [data.alt, data.ref]
        views: list[tuple[Sequence[bytes], bool]] = [(h, False) for h in haplotypes]
        if both_strands:
            views += [([reverse_complement(s) for s in h], True) for h in haplotypes]
        self.haplotypes, self.strands = len(haplotypes), 2 if both_strands else 1
        encoded = [[tokenizer.encode(sequence) for sequence in sequences] for sequences, _ in views]
        spans = [
            [_span(data.centre, len(ids), flipped=flipped) for ids in view]
            for view, (_, flipped) in zip(encoded, views, strict=True)
        ]
        # what comes after the last own position is never read by a causal model
        encoded = [
            [ids[:high] for ids, (_, high) in zip(*both, strict=True)] for both in zip(encoded, spans, strict=True)
        ]
        lengths = np.array([[len(ids) for ids in view] for view in encoded])
        self.longest = int(lengths.max())
        shape = (len(data.alt), len(views), self.longest)
        self.ids = np.full(shape, tokenizer.pad_id, dtype=np.int32)
        self.own = np.zeros(shape, dtype=bool)
        for v, view in enumerate(encoded):
            for n, ids in enumerate(view):
                low, high = spans[v][n]
                self.ids[n, v, : len(ids)] = ids
                self.own[n, v, low:high] = True
        counts = self.own.sum(-1)
        self.positions = int(counts[0, 0]) if (counts == counts[0, 0]).all() else None
        """Own positions of every view, if all rows agree."""


class FeatureModel(nn.Module):
    """Backbone to features [B, S, F] of the rows' own positions, or [B, S', F] and a mask if lengths differ.

    Args:
        strands: "fwd"; "concat", both side by side (the other strand's turned back to this one's order);
            "average", stacked as twice as many rows for the head, whose predictions are averaged.
        layer: -1 the last after its norm, 0 the embedding, n after layer n.
        pair: REF and ALT: features are ALT - REF and REF side by side.
        pad_id: of the tokenizer.
    """

    def __init__(self, backbone: GenoMoEModel, *, layer: int, strands: str, pair: bool, pad_id: int):
        super().__init__()
        self.backbone, self.layer, self.strands, self.pair, self.pad_id = (
            backbone,
            layer,
            strands,
            pair,
            pad_id,
        )

    @property
    def features(self) -> int:
        size = self.backbone.config.hidden_size * (2 if self.pair else 1)
        return size * (2 if self.strands == "concat" else 1)

    def forward(self, ids_BVS: Tensor, own_BVS: Tensor) -> tuple[Tensor, Tensor]:
        """Features and mask; with strands "average" the second half of the rows are the minus strand's."""
        B, V, S = ids_BVS.shape
        valid = ids_BVS.flatten(0, 1) != self.pad_id
        hidden = self._hidden(ids_BVS.flatten(0, 1), valid).view(B, V, S, -1)
        strands = 1 if self.strands == "fwd" else 2
        per_strand = []
        for strand in range(strands):
            views = range(strand * (V // strands), (strand + 1) * (V // strands))
            taken = [self._own(hidden[:, v], own_BVS[:, v], flip=strand == 1) for v in views]
            features, mask = taken[0]
            if self.pair:
                ref, ref_mask = taken[1]
                mask = mask & ref_mask
                features = torch.cat([features - ref, ref], dim=-1)
            per_strand.append((features, mask))
        if strands == 1:
            return per_strand[0]
        joined = -1 if self.strands == "concat" else 0
        features = torch.cat([features for features, _ in per_strand], dim=joined)
        masks = [mask for _, mask in per_strand]
        return features, masks[0] if self.strands == "concat" else torch.cat(masks)

    def _hidden(self, tokens: Tensor, valid: Tensor) -> Tensor:
        """Hidden states of the chosen layer; those above it are not run."""
        if self.layer == -1:
            return self.backbone(tokens, valid=valid, compute_logits=False).hidden
        model = self.backbone if isinstance(self.backbone, GenoMoEModel) else self.backbone.model  # inside an adapter
        usual = model.run_layer

        def run(index, layer, x_TD, *rest):
            return usual(index, layer, x_TD, *rest) if index < self.layer else (x_TD, None)

        model.run_layer = run
        try:
            output = self.backbone(tokens, valid=valid, compute_logits=False, output_hidden_states=True)
        finally:
            model.run_layer = usual
        return output.hidden_states[self.layer]

    @staticmethod
    def _own(hidden_BSD: Tensor, own_BS: Tensor, *, flip: bool) -> tuple[Tensor, Tensor]:
        """The marked positions pushed to the front, in the plus strand's order."""
        count_B = own_BS.sum(1)
        longest = int(count_B.max())
        index_BS = torch.arange(longest, device=own_BS.device).expand(len(own_BS), -1)
        mask_BS = index_BS < count_B[:, None]
        first_B = own_BS.int().argmax(1)
        if flip:
            index_BS = count_B[:, None] - 1 - index_BS
        place_BS = (first_B[:, None] + index_BS).clamp(0, own_BS.shape[1] - 1)
        taken = hidden_BSD.gather(1, place_BS[..., None].expand(-1, -1, hidden_BSD.shape[-1]))
        return taken, mask_BS


def _span(centre: slice, length: int, *, flipped: bool) -> tuple[int, int]:
    """First own position and one past the last, as read on the strand."""
    low, high, _ = centre.indices(length)
    return (length - high, length - low) if flipped else (low, high)


def cache_features(
    model: FeatureModel, table: TokenTable, *, batch: int, progress: Callable[[int], None] | None = None
) -> tuple[Tensor, Tensor]:
    """Features of all rows as float16 [N, strands, S, F] and their mask [N, strands, S], on the CPU."""
    device = model.backbone.embed.weight.device
    rows = len(table.ids)
    copies = 2 if model.strands == "average" else 1
    longest = int(table.own.sum(-1).max())
    features = torch.zeros(rows, copies, longest, model.features, dtype=torch.float16)
    masks = torch.zeros(rows, copies, longest, dtype=torch.bool)
    model.eval()
    with torch.inference_mode():
        for start in range(0, rows, batch):
            ids, own = (torch.from_numpy(x[start : start + batch]).to(device) for x in (table.ids, table.own))
            found, mask = model(ids.long(), own)
            size = len(ids)
            for copy in range(copies):
                part = slice(copy * size, (copy + 1) * size)
                features[start : start + size, copy, : found.shape[1]] = found[part].half().cpu()
                masks[start : start + size, copy, : found.shape[1]] = mask[part].cpu()
            if progress is not None:
                progress(min(rows, start + size))
    return features, masks


def one_hot_features(table: TokenTable, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """The same shape from bases alone, [N, 1, S, 4] of ALT: what a head learns without any model."""
    own = table.own[:, 0]
    longest = int(own.sum(1).max())
    ids = np.full((len(own), longest), tokenizer.pad_id)
    mask = np.arange(longest) < own.sum(1)[:, None]
    ids[mask] = table.ids[:, 0][own]
    hot = np.stack([ids == base for base in tokenizer.base_ids], axis=-1)
    return torch.from_numpy(hot[:, None]).half(), torch.from_numpy(mask[:, None])
