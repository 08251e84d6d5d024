"""Plain grouped products in e4m3 (Hopper tensor cores), float32 accumulation, scales applied outside the product.

Axes: S slots, E experts, M and N the rows and columns of the output, K the contracted dimension.
"""

import triton
import triton.language as tl

from .tile import tile_position


@triton.jit(do_not_specialize=["num_experts"])
def product_kernel(
    a_desc,  # [S, K] e4m3
    a_scale,  # float32 power of two: [S], or [K / SCALE_BLOCK, S] (SCALE_BLOCK > 0)
    w_desc,  # [E, N, K] e4m3
    w_scale_E,
    ends_E,
    tile_expert_M,
    out_desc,  # out [S, N] bf16
    num_experts,
    slots,
    N,
    K,
    SCALE_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out = a @ w[expert of the row]^T. With SCALE_BLOCK, every block of the contraction has its own row scales."""
    tiles_m = tl.load(ends_E + num_experts - 1) // BM
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=FLATTEN):
        m, n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_M + m)
        row = m * BM
        rows = row + tl.arange(0, BM)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            a = a_desc.load([row, k])
            w = w_desc.load([expert, n * BN, k]).reshape(BN, BK)
            if SCALE_BLOCK > 0:
                scale = tl.load(a_scale + k // SCALE_BLOCK * slots + rows)
                accumulator += tl.dot(a, w.T) * scale[:, None]
            else:
                accumulator = tl.dot(a, w.T, accumulator)
        scale = tl.load(w_scale_E + expert)
        if SCALE_BLOCK > 0:
            accumulator *= scale
        else:
            accumulator *= (tl.load(a_scale + rows) * scale)[:, None]
        out_desc.store([row, n * BN], accumulator.to(tl.bfloat16))


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradient_kernel(
    left_desc,  # [S / BK, M, BK] e4m3: slots contiguous, in tiles of the contraction
    right_desc,  # [S / BK, N, BK] e4m3
    scale_E,  # float32: what one unit of the product is worth, per expert
    ends_E,
    out_desc,  # out [E, M, N] bf16 or float32
    num_experts,
    M,
    N,
    ACCUMULATE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out[e] (+)= left[:, slots of e] @ right[:, slots of e]^T."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, PROGRAMS, flatten=FLATTEN):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, tiles_m, tiles_n, GROUP_M)
        start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_E + expert)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in range(start, end, BK):
            left = left_desc.load([k // BK, m * BM, 0]).reshape(BM, BK)
            right = right_desc.load([k // BK, n * BN, 0]).reshape(BN, BK)
            accumulator = tl.dot(left, right.T, accumulator)
        accumulator *= tl.load(scale_E + expert)
        if ACCUMULATE:
            accumulator += out_desc.load([expert, m * BM, n * BN]).reshape(BM, BN).to(tl.float32)
        out_desc.store([expert, m * BM, n * BN], accumulator.to(out_desc.dtype).reshape(1, BM, BN))


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradient_gather_kernel(
    left_desc,  # [S, M] bf16
    x_TN,  # bf16: ungathered rows
    token_S,
    ends_E,
    out_desc,  # out [E, M, N]
    num_experts,
    M,
    N,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out[e] = left[slots of e]^T @ x[tokens of the slots of e]."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, PROGRAMS, flatten=FLATTEN):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, tiles_m, tiles_n, GROUP_M)
        start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_E + expert)
        columns = n * BN + tl.arange(0, BN)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in range(start, end, BK):
            left = left_desc.load([k, m * BM])
            token = tl.load(token_S + k + tl.arange(0, BK))
            right = tl.load(x_TN + token[:, None].to(tl.int64) * N + columns[None, :], mask=(token >= 0)[:, None], other=0.0)
            accumulator = tl.dot(left.T, right, accumulator)
        out_desc.store([expert, m * BM, n * BN], accumulator.to(out_desc.dtype).reshape(1, BM, BN))
