"""The up-projection in bfloat16: gather in front; SwiGLU, score and the copy for backward behind, in one kernel.

Axes: T tokens, S slots, D model, I expert width, E experts, M tiles of rows, N tiles of columns.
"""

import triton
import triton.language as tl

from .tile import quantize_mx, silu_and_slope, tile_position


@triton.jit
def _finish(
    gate, up, row, column, score, a_desc, h_desc, h_scale, I,
    SAVE: tl.constexpr, SAVE_MX: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the activation, and gate and up as backward wants them. Half a tile, to stay within the registers."""
    if SAVE_MX:
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
    elif SAVE:
        h_desc.store([row, 0, column], gate.to(tl.bfloat16).reshape(BM, 1, BN))
        h_desc.store([row, 1, column], up.to(tl.bfloat16).reshape(BM, 1, BN))
    silu, _ = silu_and_slope(gate)
    a_desc.store([row, column], (silu * up * score).to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_experts"])
def up_swiglu_kernel(
    x_TD,  # bf16
    token_S,
    w_desc,  # [E, 2, I, D] bf16: gate and up
    score_S,
    ends_E,
    tile_expert_M,
    a_desc,  # out [S, I] bf16: silu(gate) up score
    h_desc,  # out [S, 2, I] bf16, or MXFP8 elements (SAVE_MX); None: nothing is kept
    h_scale,  # out uint8 [S, 2, I / 32] (SAVE_MX)
    num_experts,
    D,
    I,
    SAVE: tl.constexpr,
    SAVE_MX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tiles_m = tl.load(ends_E + num_experts - 1) // BM
    tiles_n = tl.cdiv(I, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        m, n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_M + m)
        row = m * BM
        column = n * BN
        rows = row + tl.arange(0, BM)
        token = tl.load(token_S + rows)
        x_at = x_TD + token[:, None].to(tl.int64) * D + tl.arange(0, BK)[None, :]
        real = (token >= 0)[:, None]
        h = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, D, BK):
            x = tl.load(x_at + k, mask=real & (k + tl.arange(0, BK) < D)[None, :], other=0.0)
            w = w_desc.load([expert, 0, column, k]).reshape(2 * BN, BK)
            h = tl.dot(x, w.T, h)

        gate, up = tl.split(tl.permute(tl.reshape(h, (BM, 2, BN)), (0, 2, 1)))
        gates = tl.split(tl.permute(tl.reshape(gate, (BM, 2, BN // 2)), (0, 2, 1)))
        ups = tl.split(tl.permute(tl.reshape(up, (BM, 2, BN // 2)), (0, 2, 1)))
        score = tl.load(score_S + rows)[:, None]
        for half in tl.static_range(2):
            _finish(
                gates[half], ups[half], row, column + half * (BN // 2), score, a_desc, h_desc, h_scale, I,
                SAVE, SAVE_MX, BM, BN // 2,
            )  # fmt: skip
