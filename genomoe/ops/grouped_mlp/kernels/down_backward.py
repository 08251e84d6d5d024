"""Backward, first product: da = dys @ w_down per expert, with SwiGLU's and the score's gradients in the epilogue.

The router's gradient is <da, silu(gate) up> row by row, so that the expert outputs are never needed (SonicMoE,
arXiv 2512.14080, section 3).

Axes: S slots, D model, I expert width, E experts, M tiles of rows, N tiles of columns.
"""

import triton
import triton.language as tl

from .tile import dequantize_mx, halves, silu_and_slope, tile_position, to_e4m3


@triton.jit
def _swiglu_backward(
    da, row, column, score, dh_scale, a_scale, h_desc, h_scale, dh_desc, dh_t_desc, a_desc, I,
    FP8: tl.constexpr, SAVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up, the activation once more, and each row's share of the score's gradient."""
    gate_saved = h_desc.load([row, 0, column]).reshape(BM, BN)
    up_saved = h_desc.load([row, 1, column]).reshape(BM, BN)
    if SAVE == "mxfp8":
        rows = row + tl.arange(0, BM)
        blocks = column // 32 + tl.arange(0, BN // 32)
        scale_at = h_scale + rows[:, None].to(tl.int64) * (2 * I // 32) + blocks[None, :]
        inside = (blocks < I // 32)[None, :]
        gate = dequantize_mx(gate_saved, tl.load(scale_at, mask=inside, other=127), BM, BN)
        up = dequantize_mx(up_saved, tl.load(scale_at + I // 32, mask=inside, other=127), BM, BN)
    else:
        gate = gate_saved.to(tl.float32)
        up = up_saved.to(tl.float32)
    silu, slope = silu_and_slope(gate)
    a = silu * up
    dscore = tl.sum(da * a, axis=1)
    a *= score[:, None]
    da *= score[:, None]
    d_gate = da * up * slope
    d_up = da * silu
    if FP8:
        a_desc.store([column, row], to_e4m3(a / a_scale[:, None]).T)
        d_gate_8 = to_e4m3(d_gate / dh_scale[:, None])
        dh_desc.store([row, 0, column], d_gate_8.reshape(BM, 1, BN))
        dh_t_desc.store([0, column, row], d_gate_8.T.reshape(1, BN, BM))
        d_up_8 = to_e4m3(d_up / dh_scale[:, None])
        dh_desc.store([row, 1, column], d_up_8.reshape(BM, 1, BN))
        dh_t_desc.store([1, column, row], d_up_8.T.reshape(1, BN, BM))
    else:
        a_desc.store([row, column], a.to(tl.bfloat16))
        dh_desc.store([row, 0, column], d_gate.to(tl.bfloat16).reshape(BM, 1, BN))
        dh_desc.store([row, 1, column], d_up.to(tl.bfloat16).reshape(BM, 1, BN))
    return dscore


@triton.jit(do_not_specialize=["num_experts"])
def down_backward_kernel(
    dy_desc,  # [S, D] bf16 or e4m3
    dy_scale_S,  # float32 power of two per slot (FP8)
    w_desc,  # bf16: w_down [E, D, I]; e4m3: its transpose [E, I, D]
    w_scale_E,  # float32 power of two per expert (FP8)
    score_S,
    ends_E,
    tile_expert_M,
    h_desc,  # [S, 2, I] bf16 or MXFP8 elements
    h_scale,  # [S, 2, I // 32] bytes (SAVE == "mxfp8")
    dh_desc,  # out [S, 2, I] bf16 or e4m3
    dh_scale_S,  # float32 power of two per slot, a bound known beforehand (FP8)
    dh_t_desc,  # out [2, I, S] e4m3, the same numbers transposed (FP8)
    a_desc,  # out bf16: silu(gate) up score [S, I]; e4m3: its transpose [I, S]
    a_scale_S,  # float32 power of two per slot (FP8)
    dscore_NS,  # out [N, S] float32: partial sums of the score's gradient
    num_experts,
    slots,
    D,
    I,
    FP8: tl.constexpr,
    SAVE: tl.constexpr,
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
        da = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            dy = dy_desc.load([row, k])
            if FP8:
                da = tl.dot(dy, w_desc.load([expert, column, k]).reshape(BN, BK).T, da)
            else:
                da = tl.dot(dy, w_desc.load([expert, k, column]).reshape(BK, BN), da)

        rows = row + tl.arange(0, BM)
        score = tl.load(score_S + rows)
        dh_scale = score
        a_scale = score
        if FP8:
            da *= (tl.load(dy_scale_S + rows) * tl.load(w_scale_E + expert))[:, None]
            dh_scale = tl.load(dh_scale_S + rows)
            a_scale = tl.load(a_scale_S + rows)
        left, right = halves(da, BM, BN)
        dscore = _swiglu_backward(
            left, row, column, score, dh_scale, a_scale, h_desc, h_scale, dh_desc, dh_t_desc, a_desc, I,
            FP8, SAVE, BM, BN // 2,
        )  # fmt: skip
        dscore += _swiglu_backward(
            right, row, column + BN // 2, score, dh_scale, a_scale, h_desc, h_scale, dh_desc, dh_t_desc, a_desc, I,
            FP8, SAVE, BM, BN // 2,
        )  # fmt: skip
        tl.store(dscore_NS + n * slots + rows, dscore)
