"""Forward, first product: h = xs @ w_up^T per expert, with SwiGLU, the router's score and the copy for backward in the epilogue.

Axes: S slots, D model, I expert width, E experts, M tiles of rows, N tiles of columns.
"""

import triton
import triton.language as tl

from .tile import exponent_for_e4m3, halves, power_of_two, quantize_mx, silu_and_slope, tile_position, to_e4m3


@triton.jit
def _swiglu(
    gate, up, row, column, score, h_desc, h_scale, I, SAVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """silu(gate) up score; gate and up are written for backward on the way."""
    if SAVE == "bf16":
        h_desc.store([row, 0, column], gate.to(tl.bfloat16).reshape(BM, 1, BN))
        h_desc.store([row, 1, column], up.to(tl.bfloat16).reshape(BM, 1, BN))
    if SAVE == "mxfp8":
        rows = row + tl.arange(0, BM)
        blocks = column // 32 + tl.arange(0, BN // 32)
        scale_at = h_scale + rows[:, None].to(tl.int64) * (2 * I // 32) + blocks[None, :]
        inside = (blocks < I // 32)[None, :]
        elements, scales = quantize_mx(gate, BM, BN)
        h_desc.store([row, 0, column], elements.reshape(BM, 1, BN))
        tl.store(scale_at, scales, mask=inside)
        elements, scales = quantize_mx(up, BM, BN)
        h_desc.store([row, 1, column], elements.reshape(BM, 1, BN))
        tl.store(scale_at + I // 32, scales, mask=inside)
    silu, _ = silu_and_slope(gate)
    return silu * up * score[:, None]


@triton.jit(do_not_specialize=["num_experts"])
def up_swiglu_kernel(
    x_desc,  # [S, D] bf16 or e4m3
    x_TD,  # GATHER: the ungathered rows
    token_S,
    x_scale_S,  # float32 power of two per slot (FP8)
    w_desc,  # [2E, I, D]: gate and up of each expert, bf16 or e4m3
    w_scale_E,  # float32 power of two per expert (FP8)
    score_S,
    ends_E,
    tile_expert_M,
    a_desc,  # out [S, I]: silu(gate) up score, bf16 or e4m3
    a_scale_NS,  # out [N, S] float32 power of two per slot and column tile (FP8)
    h_desc,  # out [S, 2, I] bf16 or MXFP8 elements (SAVE)
    h_scale,  # out [S, 2, I // 32] bytes (SAVE == "mxfp8")
    h_max_NS,  # out [N, S] float32, largest |h| per slot and column tile (FP8)
    num_experts,
    slots,
    D,
    I,
    FP8: tl.constexpr,
    SAVE: tl.constexpr,
    GATHER: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    tiles_m = tl.load(ends_E + num_experts - 1) // BM
    tiles_n = tl.cdiv(I, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        m, n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_M + m)
        row = m * BM
        column = n * BN
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        if GATHER:
            token = tl.load(token_S + row + tl.arange(0, BM))
            x_at = x_TD + token[:, None].to(tl.int64) * D + tl.arange(0, BK)[None, :]
            real = (token >= 0)[:, None]
        for k in range(0, D, BK):
            if GATHER:
                x = tl.load(x_at + k, mask=real, other=0.0)
            else:
                x = x_desc.load([row, k])
            w_gate = w_desc.load([2 * expert, column, k]).reshape(BN, BK)
            w_up = w_desc.load([2 * expert + 1, column, k]).reshape(BN, BK)
            gate = tl.dot(x, w_gate.T, gate)
            up = tl.dot(x, w_up.T, up)

        rows = row + tl.arange(0, BM)
        score = tl.load(score_S + rows)
        if FP8:
            scale = tl.load(x_scale_S + rows) * tl.load(w_scale_E + expert)
            gate *= scale[:, None]
            up *= scale[:, None]
            tl.store(h_max_NS + n * slots + rows, tl.max(tl.maximum(tl.abs(gate), tl.abs(up)), axis=1))
        HALF: tl.constexpr = BN // 2
        gate_left, gate_right = halves(gate, BM, BN)
        up_left, up_right = halves(up, BM, BN)
        left = _swiglu(gate_left, up_left, row, column, score, h_desc, h_scale, I, SAVE, BM, HALF)
        right = _swiglu(gate_right, up_right, row, column + HALF, score, h_desc, h_scale, I, SAVE, BM, HALF)
        if FP8:
            largest = tl.maximum(tl.max(tl.abs(left), axis=1), tl.max(tl.abs(right), axis=1))
            exponent = exponent_for_e4m3(largest)
            tl.store(a_scale_NS + n * slots + rows, power_of_two(exponent))
            shrink = power_of_two(-exponent)[:, None]
            a_desc.store([row, column], to_e4m3(left * shrink))
            a_desc.store([row, column + HALF], to_e4m3(right * shrink))
        else:
            a_desc.store([row, column], left.to(tl.bfloat16))
            a_desc.store([row, column + HALF], right.to(tl.bfloat16))
