"""Counting sort of (token, choice) pairs by expert, for `genomoe.ops.grouped_mlp.layout`.

Axes: C choices (T K pairs, in order), B blocks of choices, E experts, S slots, M tiles of 128 slots.
"""

import triton
import triton.language as tl


@triton.jit
def _one_hot(index_C, block, choices, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """[BLOCK, EXPERTS] of 0 and 1: which expert each choice of the block goes to."""
    choice = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(index_C + choice, mask=choice < choices, other=-1).to(tl.int32)
    return (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def _segments(count_EB, blocks, num_experts, TILE: tl.constexpr, EXPERTS: tl.constexpr):
    """First slot and end of each expert's padded segment, from the running counts' last column."""
    expert = tl.arange(0, EXPERTS)
    real = expert < num_experts
    total = tl.load(count_EB + expert * blocks + blocks - 1, mask=real, other=0)
    padded = tl.where(real, tl.maximum((total + TILE - 1) // TILE, 1) * TILE, 0)
    end = tl.cumsum(padded, axis=0)
    return end - padded, end


@triton.jit(do_not_specialize=["choices", "blocks", "num_experts"])
def count_kernel(index_C, count_EB, choices, blocks, num_experts, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """How many choices of each block go to each expert."""
    block = tl.program_id(0)
    counts = tl.sum(_one_hot(index_C, block, choices, num_experts, BLOCK, EXPERTS), axis=0)
    expert = tl.arange(0, EXPERTS)
    tl.store(count_EB + expert * blocks + block, counts, mask=expert < num_experts)


@triton.jit(do_not_specialize=["blocks"])
def running_count_kernel(count_EB, blocks, CHUNK: tl.constexpr):
    """In place: the counts of a block and of all blocks before it, per expert."""
    row = count_EB + tl.program_id(0) * blocks
    before = 0
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        counts = tl.load(row + block, mask=block < blocks, other=0)
        tl.store(row + block, before + tl.cumsum(counts, axis=0), mask=block < blocks)
        before += tl.sum(counts, axis=0)


@triton.jit(do_not_specialize=["blocks", "num_experts"])
def segments_kernel(
    count_EB, token_S, score_S, ends_E, tile_expert_M, blocks, num_experts, TILE: tl.constexpr, EXPERTS: tl.constexpr
):
    """Ends of the segments and each tile's expert; every slot starts as padding."""
    _, end = _segments(count_EB, blocks, num_experts, TILE, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    m = tl.program_id(0)
    if m == 0:
        tl.store(ends_E + expert, end, mask=expert < num_experts)
    before = (end <= m * TILE) & (expert < num_experts)
    tl.store(tile_expert_M + m, tl.sum(before.to(tl.int32), axis=0))
    slot = m * TILE + tl.arange(0, TILE)
    tl.store(token_S + slot, tl.full((TILE,), -1, tl.int32))
    tl.store(score_S + slot, tl.zeros((TILE,), tl.float32))


@triton.jit(do_not_specialize=["choices", "blocks", "num_experts"])
def place_kernel(
    index_C,
    score_C,
    count_EB,  # running: choices of block b and of all before it, per expert
    slot_C,
    token_S,
    score_S,
    choices,
    blocks,
    num_experts,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each choice's slot: its segment's start, plus its rank among the choices of the same expert, in order."""
    block = tl.program_id(0)
    one_hot = _one_hot(index_C, block, choices, num_experts, BLOCK, EXPERTS)
    expert = tl.arange(0, EXPERTS)
    start, _ = _segments(count_EB, blocks, num_experts, TILE, EXPERTS)
    running = tl.load(count_EB + expert * blocks + block, mask=expert < num_experts, other=0)
    before_block = running - tl.sum(one_hot, axis=0)
    slot_if_chosen = (start + before_block)[None, :] + tl.cumsum(one_hot, axis=0) - 1
    slot = tl.sum(one_hot * slot_if_chosen, axis=1)
    choice = block * BLOCK + tl.arange(0, BLOCK)
    real = choice < choices
    tl.store(slot_C + choice, slot, mask=real)
    tl.store(token_S + slot, choice // K, mask=real)
    tl.store(score_S + slot, tl.load(score_C + choice, mask=real, other=0.0).to(tl.float32), mask=real)
