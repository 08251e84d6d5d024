"""Grouped products in bfloat16 and e4m3 (Hopper) and in MXFP8 (Blackwell tensor cores), float32 accumulation.

Axes: S slots, E experts, M and N rows and columns of the output, K the contracted dimension.
"""

import triton
import triton.language as tl

from .tile import tile_position


@triton.jit(do_not_specialize=["num_experts", "slots"])
def product_kernel(
    a_desc,  # [S, K] bf16 or e4m3
    a_scale,  # e4m3: float32 power of two [S]; MX: scale bytes [S, K / 32]; bf16: None
    w_desc,  # [E, N, K], or [E, K, N] (KN)
    w_scale,  # e4m3: float32 power of two [E]; MX: scale bytes [E, N, K / 32]; bf16: None
    ends_E,
    tile_expert_M,
    out_desc,  # out [S, N] bf16
    largest_NS,  # out float32: largest magnitude of each row in each tile of columns; None: not wanted
    num_experts,
    slots,
    N,
    K,
    MX: tl.constexpr,
    KN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out = a @ w[expert of the row]^T, or a @ w[expert of the row] (KN).

    The two loops are flattened into one, so that a tile's first loads are under way while the tile before is stored.
    """
    tiles_m = tl.load(ends_E + num_experts - 1) // BM
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=not MX):
        m, n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_M + m)
        rows = m * BM + tl.arange(0, BM)
        accumulator = tl.zeros((BM, BN), tl.float32)
        if MX:
            columns = n * BN + tl.arange(0, BN)
            blocks = tl.arange(0, BK // 32)
            a_scale_at = a_scale + rows[:, None].to(tl.int64) * (K // 32) + blocks[None, :]
            w_scale_at = w_scale + (expert * N + columns)[:, None].to(tl.int64) * (K // 32) + blocks[None, :]
        for k in range(0, K, BK):
            a = a_desc.load([m * BM, k])
            if KN:
                w = w_desc.load([expert, k, n * BN]).reshape(BK, BN)
            else:
                w = w_desc.load([expert, n * BN, k]).reshape(BN, BK).T
            if MX:
                inside = (k // 32 + blocks < K // 32)[None, :]
                a_bytes = tl.load(a_scale_at + k // 32, mask=inside, other=127)
                w_bytes = tl.load(w_scale_at + k // 32, mask=inside & (columns < N)[:, None], other=127)
                accumulator = tl.dot_scaled(a, a_bytes, "e4m3", w, w_bytes, "e4m3", accumulator)
            else:
                accumulator = tl.dot(a, w, accumulator)
        if not MX and a_scale is not None:
            accumulator *= (tl.load(a_scale + rows) * tl.load(w_scale + expert))[:, None]
        if largest_NS is not None:
            tl.store(largest_NS + n.to(tl.int64) * slots + rows, tl.max(tl.abs(accumulator), axis=1))
        out_desc.store([m * BM, n * BN], accumulator.to(out_desc.dtype))


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradient_kernel(
    left_desc,  # e4m3 [S / BK, M, BK]: slots contiguous, in tiles of the contraction; MX: [M, S]
    left_scale,  # MX: scale bytes [M, S / 32]
    right_desc,  # e4m3 [S / BK, N, BK]; MX: [N, S]
    right_scale,  # MX: scale bytes [N, S / 32]
    unit_E,  # float32: what one unit of the product is worth, per expert; MX: None
    ends_E,
    out_desc,  # out [E, M, N]
    num_experts,
    slots,
    M,
    N,
    MX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """out[e] = left[:, slots of e] @ right[:, slots of e]^T."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    for tile in range(tl.program_id(0), num_experts * per_expert, PROGRAMS):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, tiles_m, tiles_n, GROUP_M)
        start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_E + expert)
        accumulator = tl.zeros((BM, BN), tl.float32)
        if MX:
            rows = m * BM + tl.arange(0, BM)
            columns = n * BN + tl.arange(0, BN)
            blocks = tl.arange(0, BK // 32)
            left_scale_at = left_scale + rows[:, None].to(tl.int64) * (slots // 32) + blocks[None, :]
            right_scale_at = right_scale + columns[:, None].to(tl.int64) * (slots // 32) + blocks[None, :]
        for k in range(start, end, BK):
            if MX:
                left = left_desc.load([m * BM, k])
                right = right_desc.load([n * BN, k])
                left_bytes = tl.load(left_scale_at + k // 32, mask=(rows < M)[:, None], other=127)
                right_bytes = tl.load(right_scale_at + k // 32, mask=(columns < N)[:, None], other=127)
                accumulator = tl.dot_scaled(left, left_bytes, "e4m3", right.T, right_bytes, "e4m3", accumulator)
            else:
                left = left_desc.load([k // BK, m * BM, 0]).reshape(BM, BK)
                right = right_desc.load([k // BK, n * BN, 0]).reshape(BN, BK)
                accumulator = tl.dot(left, right.T, accumulator)
        if not MX:
            accumulator *= tl.load(unit_E + expert)
        out_desc.store([expert, m * BM, n * BN], accumulator.to(out_desc.dtype).reshape(1, BM, BN))


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradient_bf16_kernel(
    left_desc,  # [S, M] bf16
    right_desc,  # [S, N] bf16
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
):
    """out[e] = left[slots of e]^T @ right[slots of e]: bfloat16 tensor cores take both with slots in rows."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    per_expert = tiles_m * tiles_n
    for tile in tl.range(tl.program_id(0), num_experts * per_expert, PROGRAMS, flatten=True):
        expert = tile // per_expert
        m, n = tile_position(tile % per_expert, tiles_m, tiles_n, GROUP_M)
        start = tl.load(ends_E + expert - 1, mask=expert > 0, other=0)
        accumulator = tl.zeros((BM, BN), tl.float32)
        for k in range(start, tl.load(ends_E + expert), BK):
            accumulator = tl.dot(left_desc.load([k, m * BM]).T, right_desc.load([k, n * BN]), accumulator)
        out_desc.store([expert, m * BM, n * BN], accumulator.to(out_desc.dtype).reshape(1, BM, BN))
