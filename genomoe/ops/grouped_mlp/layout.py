"""Where each (token, choice) pair stands once tokens are grouped by expert, computed on the device.

Every expert's segment is padded to whole tiles of 128 rows and has at least one tile. So no kernel needs a mask at a
segment's end, an expert without tokens is an ordinary segment of zero rows whose weight gradient comes out as exact
zeros, and the buffer's size depends on the shapes alone: nothing waits for the host.

Axes: T tokens, K choices, E experts, S slots (rows of the grouped layout), M tiles (S / 128).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
from jaxtyping import Float32, Int, Int32
from torch import Tensor

from .kernels import layout as kernels

TILE = 128


class ExpertLayout(NamedTuple):
    slot_TK: Int32[Tensor, "T K"]
    """Slot of each choice of each token."""
    token_S: Int32[Tensor, " S"]
    """Token that stands in each slot; -1 where a slot is padding."""
    score_S: Float32[Tensor, " S"]
    """The router's score for the slot's token and expert; 0 where a slot is padding."""
    ends_E: Int32[Tensor, " E"]
    """One past the last slot of each expert's padded segment; the last entry is the number of slots in use."""
    tile_expert_M: Int32[Tensor, " M"]
    """Expert of each tile; E for the tiles past the last segment."""

    @property
    def slots(self) -> int:
        return self.token_S.shape[0]

    @property
    def num_experts(self) -> int:
        return self.ends_E.shape[0]

    def by_slot(self, value_E: Float32[Tensor, " E"]) -> Float32[Tensor, " S"]:
        """The value of each slot's expert; 0 past the last segment."""
        return F.pad(value_E, (0, 1))[self.tile_expert_M].repeat_interleave(TILE)


def slot_bound(choices: int, num_experts: int) -> int:
    """Slots that suffice for any routing of ``choices`` = T K pairs: a multiple of 128."""
    return (choices // TILE + num_experts) * TILE


def expert_layout(index_TK: Int[Tensor, "T K"], scores_TK: Float32[Tensor, "T K"], num_experts: int) -> ExpertLayout:
    """Group the choices by expert, in token order within an expert (so every sum has one fixed order)."""
    K, choices, device = index_TK.shape[1], index_TK.numel(), index_TK.device
    index_C, score_C = index_TK.reshape(-1), scores_TK.reshape(-1)
    slots = slot_bound(choices, num_experts)
    experts = triton.next_power_of_2(num_experts)
    block = max(16, min(256, 8192 // experts))
    blocks = triton.cdiv(choices, block)
    sizes = {"BLOCK": block, "EXPERTS": experts}

    count_EB = torch.empty(num_experts, blocks, dtype=torch.int32, device=device)
    kernels.count_kernel[(blocks,)](index_C, count_EB, choices, blocks, num_experts, **sizes)
    kernels.running_count_kernel[(num_experts,)](count_EB, blocks, CHUNK=1024)
    token_S = torch.empty(slots, dtype=torch.int32, device=device)
    score_S = torch.empty(slots, dtype=torch.float32, device=device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    tile_expert_M = torch.empty(slots // TILE, dtype=torch.int32, device=device)
    kernels.segments_kernel[(slots // TILE,)](
        count_EB, token_S, score_S, ends_E, tile_expert_M, blocks, num_experts, TILE=TILE, EXPERTS=experts
    )
    slot_TK = torch.empty(index_TK.shape, dtype=torch.int32, device=device)
    kernels.place_kernel[(blocks,)](
        index_C, score_C, count_EB, slot_TK, token_S, score_S, choices, blocks, num_experts, K=K, TILE=TILE, **sizes
    )
    return ExpertLayout(slot_TK, token_S, score_S, ends_E, tile_expert_M)


def expert_layout_reference(
    index_TK: Int[Tensor, "T K"], scores_TK: Float32[Tensor, "T K"], num_experts: int
) -> ExpertLayout:
    """The same by a stable sort, on any device."""
    choices_per_token = index_TK.shape[1]
    experts = torch.arange(num_experts, device=index_TK.device)
    expert_sorted, order = torch.sort(index_TK.reshape(-1), stable=True)
    ends = torch.searchsorted(expert_sorted, experts, right=True)
    starts = F.pad(ends[:-1], (1, 0))
    tiles = ((ends - starts + TILE - 1) // TILE).clamp(min=1)
    padded_ends = tiles.cumsum(0) * TILE
    shift = padded_ends - tiles * TILE - starts
    slot_sorted = torch.arange(order.numel(), device=order.device) + shift[expert_sorted]

    slots = slot_bound(order.numel(), num_experts)
    slot_TK = torch.empty_like(order, dtype=torch.int32)
    slot_TK[order] = slot_sorted.int()
    token_S = order.new_full((slots,), -1, dtype=torch.int32)
    token_S[slot_sorted] = (order // choices_per_token).int()
    score_S = scores_TK.new_zeros(slots, dtype=torch.float32)
    score_S[slot_sorted] = scores_TK.reshape(-1).float()[order]
    first_rows = torch.arange(0, slots, TILE, device=order.device)
    tile_expert_M = torch.searchsorted(padded_ends, first_rows, right=True)
    return ExpertLayout(slot_TK.view(index_TK.shape), token_S, score_S, padded_ends.int(), tile_expert_M.int())
