"""Memory-bound passes around the products: spread, combine, scale, transpose, quantise; every byte is moved once.

Axes: T tokens, K choices, S slots, M tiles of 128 slots, D model (any row length), E experts, R rows, C columns.
"""

import triton
import triton.language as tl

from .tile import dequantize_mx, e4m3_exponent, power_of_two, quantize_mx, to_e4m3


@triton.jit(do_not_specialize=["T", "num_experts", "token_programs"])
def spread_kernel(
    x_TD,
    slot_TK,
    token_S,
    ends_E,
    out_SD,  # x's dtype, or e4m3 (FP8)
    scale_S,  # out float32 power of two of each slot's row (FP8)
    scale_T,  # out, the same by token (FP8)
    T,
    D,
    num_experts,
    token_programs,
    K: tl.constexpr,
    FP8: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Each token's row is read once and written to its K slots; further programs write zeros to the padding slots.

    With FP8 each row is divided by its own power of two.
    """
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK_D)
    inside = (columns < D)[None, :]
    if program < token_programs:
        token = program * ROWS + tl.arange(0, ROWS)
        real = token < T
        x = tl.load(x_TD + token[:, None].to(tl.int64) * D + columns[None, :], mask=real[:, None] & inside, other=0.0)
        exponent = token * 0
        if FP8:
            x = x.to(tl.float32)
            exponent = e4m3_exponent(tl.max(tl.abs(x), axis=1))
            row = to_e4m3(x * power_of_two(-exponent)[:, None])
            tl.store(scale_T + token, power_of_two(exponent), mask=real)
        else:
            row = x
        for k in tl.static_range(K):
            slot = tl.load(slot_TK + token * K + k, mask=real, other=0)
            tl.store(out_SD + slot[:, None].to(tl.int64) * D + columns[None, :], row, mask=real[:, None] & inside)
            if FP8:
                tl.store(scale_S + slot, power_of_two(exponent), mask=real)
    else:
        first = (program - token_programs) * TILE
        used = first < tl.load(ends_E + num_experts - 1)
        if used and tl.min(tl.load(token_S + first + tl.arange(0, TILE)), axis=0) < 0:
            for start in range(0, TILE, ROWS):
                slot = first + start + tl.arange(0, ROWS)
                padding = tl.load(token_S + slot) < 0
                zeros = tl.zeros((ROWS, BLOCK_D), out_SD.dtype.element_ty)
                at = out_SD + slot[:, None].to(tl.int64) * D + columns[None, :]
                tl.store(at, zeros, mask=padding[:, None] & inside)
                if FP8:
                    tl.store(scale_S + slot, power_of_two(slot * 0 - 126), mask=padding)


@triton.jit(do_not_specialize=["num_experts"])
def scale_rows_kernel(
    a_SI,
    ends_E,
    out_SI,  # out e4m3
    scale_S,  # out float32 power of two per row
    num_experts,
    I,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Each row divided by its own power of two."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_I)
        at = rows[:, None].to(tl.int64) * I + columns[None, :]
        inside = (columns < I)[None, :]
        a = tl.load(a_SI + at, mask=inside, other=0.0).to(tl.float32)
        exponent = e4m3_exponent(tl.max(tl.abs(a), axis=1))
        tl.store(out_SI + at, to_e4m3(a * power_of_two(-exponent)[:, None]), mask=inside)
        tl.store(scale_S + rows, power_of_two(exponent))


@triton.jit(do_not_specialize=["T"])
def combine_kernel(
    y_SD,
    slot_TK,
    residual_TD,  # or None
    out_TD,
    T,
    D,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """out[t] = sum over k, in order, of y[slot of (t, k)], then residual[t], in float32."""
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = (tokens < T)[:, None] & (columns < D)[None, :]
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        slot = tl.load(slot_TK + tokens * K + k, mask=tokens < T, other=0)
        total += tl.load(y_SD + slot[:, None].to(tl.int64) * D + columns[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    at = tokens[:, None].to(tl.int64) * D + columns[None, :]
    if residual_TD is not None:
        total += tl.load(residual_TD + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_TD + at, total.to(out_TD.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def gather_transposed_kernel(
    x_TD,
    token_S,
    scale_S,  # float32: row scales of the other operand
    unit_E,
    ends_E,
    tile_expert_M,
    out_MDB,  # out e4m3
    D,
    num_experts,
    TILE: tl.constexpr,
    BD: tl.constexpr,
):
    """out[:, s] = e4m3(x[token of slot s] * scale[s] / unit of its expert): slots contiguous within a tile."""
    m = tl.program_id(0)
    if m * TILE < tl.load(ends_E + num_experts - 1):
        slot = m * TILE + tl.arange(0, TILE)
        columns = tl.program_id(1) * BD + tl.arange(0, BD)
        token = tl.load(token_S + slot)
        factor = tl.load(scale_S + slot) / tl.load(unit_E + tl.load(tile_expert_M + m))
        x = tl.load(
            x_TD + token[:, None].to(tl.int64) * D + columns[None, :],
            mask=(columns < D)[None, :] & (token >= 0)[:, None],
            other=0.0,
        )
        x8 = to_e4m3(x.to(tl.float32) * factor[:, None])
        at = out_MDB + m.to(tl.int64) * D * TILE + columns[:, None] * TILE + tl.arange(0, TILE)[None, :]
        tl.store(at, x8.T, mask=(columns < D)[:, None])


@triton.jit
def weight_kernel(
    w_ERC,
    largest_E,  # float32: largest magnitude of each expert's matrix
    scale_E,  # out float32 power of two
    out,  # out e4m3 [E, R, C], or [E, C, R] (TRANSPOSED)
    R,
    C,
    TRANSPOSED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """e4m3(w / a power of two of the expert), as it stands or with its last two dimensions swapped."""
    expert = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = expert * R * C + r[:, None].to(tl.int64) * C + c[None, :]
    exponent = e4m3_exponent(tl.load(largest_E + expert))
    w = to_e4m3(tl.load(w_ERC + at, mask=inside, other=0.0).to(tl.float32) * power_of_two(-exponent))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(scale_E + expert, power_of_two(exponent))
    if TRANSPOSED:
        at = expert * R * C + c[:, None].to(tl.int64) * R + r[None, :]
        tl.store(out + at, w.T, mask=(c < C)[:, None] & (r < R)[None, :])
    else:
        tl.store(out + at, w, mask=inside)


@triton.jit
def quantize_mx_kernel(
    x_NRC,
    elements,  # out e4m3 [N, R, C], or [N, C, R] (TRANSPOSED)
    scales,  # out uint8 [N, R, C / 32], or [N, C, R / 32] (TRANSPOSED)
    R,
    C,
    TRANSPOSED: tl.constexpr,
    CEIL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """MXFP8 of N matrices along their last dimension, or along the one before it with the two swapped."""
    n = tl.program_id(2).to(tl.int64)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    x = tl.load(
        x_NRC + n * R * C + r[:, None].to(tl.int64) * C + c[None, :],
        mask=(r < R)[:, None] & (c < C)[None, :],
        other=0.0,
    ).to(tl.float32)
    if TRANSPOSED:
        element, scale = quantize_mx(x.T, BC, BR, CEIL)
        block = tl.program_id(0) * (BR // 32) + tl.arange(0, BR // 32)
        at = c[:, None].to(tl.int64) * R + r[None, :]
        tl.store(elements + n * R * C + at, element, mask=(c < C)[:, None] & (r < R)[None, :])
        at = c[:, None].to(tl.int64) * (R // 32) + block[None, :]
        tl.store(scales + n * C * (R // 32) + at, scale, mask=(c < C)[:, None] & (block < R // 32)[None, :])
    else:
        element, scale = quantize_mx(x, BR, BC, CEIL)
        block = tl.program_id(1) * (BC // 32) + tl.arange(0, BC // 32)
        at = r[:, None].to(tl.int64) * C + c[None, :]
        tl.store(elements + n * R * C + at, element, mask=(r < R)[:, None] & (c < C)[None, :])
        at = r[:, None].to(tl.int64) * (C // 32) + block[None, :]
        tl.store(scales + n * R * (C // 32) + at, scale, mask=(r < R)[:, None] & (block < C // 32)[None, :])


@triton.jit
def dequantize_mx_kernel(elements_RC, scales, out_RC, R, C, BR: tl.constexpr, BC: tl.constexpr):
    """Exact bfloat16 values of MXFP8 blocks along the last dimension."""
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    block = tl.program_id(1) * (BC // 32) + tl.arange(0, BC // 32)
    inside = (r < R)[:, None] & (c < C)[None, :]
    at = r[:, None].to(tl.int64) * C + c[None, :]
    scale_at = r[:, None].to(tl.int64) * (C // 32) + block[None, :]
    scale = tl.load(scales + scale_at, mask=(r < R)[:, None] & (block < C // 32)[None, :], other=127)
    values = dequantize_mx(tl.load(elements_RC + at, mask=inside, other=0.0), scale, BR, BC)
    tl.store(out_RC + at, values.to(tl.bfloat16), mask=inside)
