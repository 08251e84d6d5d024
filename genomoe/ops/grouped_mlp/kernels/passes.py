"""Memory-bound passes around the products: gather, combine, quantise. Each reads and writes every byte once.

Axes: T tokens, K choices, S slots, D model (any row length), E experts.
"""

import triton
import triton.language as tl

from .tile import exponent_for_e4m3, power_of_two, quantize_mx, to_e4m3


@triton.jit(do_not_specialize=["num_experts"])
def gather_kernel(
    x_TD,
    token_S,
    ends_E,
    out_SD,  # x's dtype, or e4m3 (FP8)
    scale_S,  # out float32 power of two (FP8)
    norm_S,  # out float32: Euclidean norm of the row (FP8 and NORM)
    num_experts,
    D,
    FP8: tl.constexpr,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[s] = x[token of slot s], zeros for padding; with FP8 each row is divided by its own power of two."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(0) * ROWS < tl.load(ends_E + num_experts - 1):
        token = tl.load(token_S + rows)
        columns = tl.arange(0, BLOCK_D)
        inside = (columns < D)[None, :]
        x = tl.load(
            x_TD + token[:, None].to(tl.int64) * D + columns[None, :], mask=inside & (token >= 0)[:, None], other=0.0
        )
        at = rows[:, None].to(tl.int64) * D + columns[None, :]
        if FP8:
            x = x.to(tl.float32)
            exponent = exponent_for_e4m3(tl.max(tl.abs(x), axis=1))
            tl.store(scale_S + rows, power_of_two(exponent))
            if NORM:
                tl.store(norm_S + rows, tl.sqrt(tl.sum(x * x, axis=1)))
            tl.store(out_SD + at, to_e4m3(x * power_of_two(-exponent)[:, None]), mask=inside)
        else:
            tl.store(out_SD + at, x, mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def gather_transposed_kernel(
    x_TD,
    token_S,
    factor_S,  # float32: what each slot's row is multiplied with before rounding
    ends_E,
    out_MDB,  # out e4m3 [S / BS, D, BS]
    num_experts,
    D,
    BS: tl.constexpr,
    BD: tl.constexpr,
):
    """out[:, s] = e4m3(x[token of slot s] * factor[s]): the operand of a weight gradient, slots contiguous."""
    first = tl.program_id(0) * BS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, BS)
        columns = tl.program_id(1) * BD + tl.arange(0, BD)
        token = tl.load(token_S + rows)
        factor = tl.load(factor_S + rows)
        x = tl.load(
            x_TD + token[:, None].to(tl.int64) * D + columns[None, :],
            mask=(columns < D)[None, :] & (token >= 0)[:, None],
            other=0.0,
        )
        x8 = to_e4m3(x.to(tl.float32) * factor[:, None])
        at = out_MDB + tl.program_id(0).to(tl.int64) * D * BS + columns[:, None] * BS + tl.arange(0, BS)[None, :]
        tl.store(at, x8.T, mask=(columns < D)[:, None])


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y_SD,
    slot_TK,
    out_TD,
    T,
    D,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t] = sum over k, in order, of y[slot of (t, k)], in float32."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (tokens < T)[:, None] & (columns < D)[None, :]
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_TK + tokens * K + k, mask=tokens < T, other=0)
        total += tl.load(y_SD + slot[:, None].to(tl.int64) * D + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    at = tokens[:, None].to(tl.int64) * D + columns[None, :]
    tl.store(out_TD + at, total.to(out_TD.dtype.element_ty), mask=inside)


@triton.jit
def quantize_weight_kernel(
    w_ERC,  # [E, R, C]
    scale_E,
    out_ERC,  # out e4m3 (PLAIN)
    out_ECR,  # out e4m3, transposed (TRANSPOSED)
    R,
    C,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """e4m3(w / scale of the expert), as it stands and/or with its two last dimensions swapped: the same numbers."""
    expert = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = expert * R * C + r[:, None].to(tl.int64) * C + c[None, :]
    w = tl.load(w_ERC + at, mask=inside, other=0.0).to(tl.float32)
    w8 = to_e4m3(w / tl.load(scale_E + expert))
    if PLAIN:
        tl.store(out_ERC + at, w8, mask=inside)
    if TRANSPOSED:
        at_t = expert * R * C + c[:, None].to(tl.int64) * R + r[None, :]
        tl.store(out_ECR + at_t, w8.T, mask=(c < C)[:, None] & (r < R)[None, :])


@triton.jit
def quantize_mx_kernel(
    x_RC, elements_RC, scales, R, C, CEIL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """MXFP8 along the last dimension."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = r[:, None].to(tl.int64) * C + c[None, :]
    x = tl.load(x_RC + at, mask=inside, other=0.0).to(tl.float32)
    elements, scale = quantize_mx(x, BR, BC, CEIL)
    tl.store(elements_RC + at, elements, mask=inside)
    block = tl.program_id(1) * (BC // 32) + tl.arange(0, BC // 32)
    scale_at = scales + r[:, None].to(tl.int64) * (C // 32) + block[None, :]
    tl.store(scale_at, scale, mask=(r < R)[:, None] & (block < C // 32)[None, :])
