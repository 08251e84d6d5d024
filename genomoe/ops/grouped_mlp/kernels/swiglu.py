"""SwiGLU and the router's score between the products, with every copy that the next products need.

One program holds whole rows, so that a row's e4m3 scale is exact. Rows too long for the registers (WHOLE false) are
read twice: once for their largest magnitude, then, from the cache, for the values.

Axes: S slots, I expert width.
"""

import triton
import triton.language as tl

from .tile import dequantize_mx, e4m3_exponent, power_of_two, quantize_mx, silu_and_slope, to_e4m3


@triton.jit
def _load_h(h, h_scale, rows, columns, I, MX: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr):
    """Gate and up as float32 [ROWS, BLOCK_I]."""
    at = h + rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
    inside = (columns < I)[None, :]
    gate = tl.load(at, mask=inside, other=0.0)
    up = tl.load(at + I, mask=inside, other=0.0)
    if MX:
        blocks = tl.min(columns, axis=0) // 32 + tl.arange(0, BLOCK_I // 32)
        scale_at = h_scale + rows[:, None].to(tl.int64) * (2 * I // 32) + blocks[None, :]
        real = (blocks < I // 32)[None, :]
        gate = dequantize_mx(gate, tl.load(scale_at, mask=real, other=127), ROWS, BLOCK_I)
        up = dequantize_mx(up, tl.load(scale_at + I // 32, mask=real, other=127), ROWS, BLOCK_I)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _store_mx(h8, h8_scale, x, rows, column, half, I, ROWS: tl.constexpr, BLOCK_I: tl.constexpr):
    """MXFP8 of gate (half 0) or up (half 1)."""
    elements, scales = quantize_mx(x, ROWS, BLOCK_I)
    columns = column + tl.arange(0, BLOCK_I)
    at = rows[:, None].to(tl.int64) * (2 * I) + half * I + columns[None, :]
    tl.store(h8 + at, elements, mask=(columns < I)[None, :])
    blocks = column // 32 + tl.arange(0, BLOCK_I // 32)
    at = rows[:, None].to(tl.int64) * (2 * I // 32) + half * (I // 32) + blocks[None, :]
    tl.store(h8_scale + at, scales, mask=(blocks < I // 32)[None, :])


@triton.jit(do_not_specialize=["num_experts"])
def swiglu_kernel(
    h_S2I,  # bf16
    score_S,
    ends_E,
    a_SI,  # out: silu(gate) up score, bf16 or e4m3 (FP8)
    a_scale_S,  # out float32 power of two per row (FP8)
    h8_S2I,  # out e4m3: MXFP8 copy of h (SAVE_MX)
    h8_scale,  # out uint8 [S, 2, I / 32] (SAVE_MX)
    num_experts,
    I,
    FP8: tl.constexpr,
    SAVE_MX: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        score = tl.load(score_S + rows)[:, None]
        exponent = rows * 0
        if FP8 and not WHOLE:
            largest = tl.zeros((ROWS,), tl.float32)
            for column in range(0, I, BLOCK_I):
                gate, up = _load_h(h_S2I, None, rows, column + tl.arange(0, BLOCK_I), I, False, ROWS, BLOCK_I)
                silu, _ = silu_and_slope(gate)
                largest = tl.maximum(largest, tl.max(tl.abs(silu * up * score), axis=1))
            exponent = e4m3_exponent(largest)
        for column in range(0, BLOCK_I if WHOLE else I, BLOCK_I):
            columns = column + tl.arange(0, BLOCK_I)
            gate, up = _load_h(h_S2I, None, rows, columns, I, False, ROWS, BLOCK_I)
            if SAVE_MX:
                _store_mx(h8_S2I, h8_scale, gate, rows, column, 0, I, ROWS, BLOCK_I)
                _store_mx(h8_S2I, h8_scale, up, rows, column, 1, I, ROWS, BLOCK_I)
            silu, _ = silu_and_slope(gate)
            a = silu * up * score
            at = a_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
            inside = (columns < I)[None, :]
            if FP8:
                if WHOLE:
                    exponent = e4m3_exponent(tl.max(tl.abs(a), axis=1))
                tl.store(at, to_e4m3(a * power_of_two(-exponent)[:, None]), mask=inside)
            else:
                tl.store(at, a.to(tl.bfloat16), mask=inside)
        if FP8:
            tl.store(a_scale_S + rows, power_of_two(exponent))


@triton.jit
def _gradients(
    da_SI, h_S2I, h_scale, score, rows, column, I, MX: tl.constexpr, ROWS: tl.constexpr, BLOCK_I: tl.constexpr
):
    """d_gate, d_up, the activation, and its share of the score's gradient."""
    columns = column + tl.arange(0, BLOCK_I)
    at = da_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
    da = tl.load(at, mask=(columns < I)[None, :], other=0.0).to(tl.float32)
    gate, up = _load_h(h_S2I, h_scale, rows, columns, I, MX, ROWS, BLOCK_I)
    silu, slope = silu_and_slope(gate)
    a = silu * up
    dscore = tl.sum(da * a, axis=1)
    da *= score
    return da * up * slope, da * silu, a * score, dscore


@triton.jit(do_not_specialize=["num_experts"])
def swiglu_backward_kernel(
    da_SI,  # bf16: gradient of the activation after the score
    h_S2I,  # bf16 or MXFP8 elements
    h_scale,  # uint8 [S, 2, I / 32] (SAVED_MX)
    score_S,
    ends_E,
    dh_S2I,  # out bf16 or e4m3
    dh_scale_S,  # out float32 power of two per row (FP8)
    a_SI,  # out bf16 or e4m3: silu(gate) up score
    a_scale_S,  # out float32 power of two per row (FP8)
    dscore_S,  # out float32
    num_experts,
    I,
    FP8: tl.constexpr,
    SAVED_MX: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The score's gradient is <da, silu(gate) up>, so that expert outputs are never needed (SonicMoE)."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        score = tl.load(score_S + rows)[:, None]
        h_exponent = rows * 0
        a_exponent = rows * 0
        if FP8 and not WHOLE:
            largest_h = tl.zeros((ROWS,), tl.float32)
            largest_a = tl.zeros((ROWS,), tl.float32)
            for column in range(0, I, BLOCK_I):
                d_gate, d_up, a, _ = _gradients(da_SI, h_S2I, h_scale, score, rows, column, I, SAVED_MX, ROWS, BLOCK_I)
                largest_h = tl.maximum(largest_h, tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=1))
                largest_a = tl.maximum(largest_a, tl.max(tl.abs(a), axis=1))
            h_exponent = e4m3_exponent(largest_h)
            a_exponent = e4m3_exponent(largest_a)
        dscore = tl.zeros((ROWS,), tl.float32)
        for column in range(0, BLOCK_I if WHOLE else I, BLOCK_I):
            d_gate, d_up, a, part = _gradients(da_SI, h_S2I, h_scale, score, rows, column, I, SAVED_MX, ROWS, BLOCK_I)
            dscore += part
            columns = column + tl.arange(0, BLOCK_I)
            inside = (columns < I)[None, :]
            dh_at = dh_S2I + rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
            a_at = a_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
            if FP8:
                if WHOLE:
                    h_exponent = e4m3_exponent(tl.max(tl.maximum(tl.abs(d_gate), tl.abs(d_up)), axis=1))
                    a_exponent = e4m3_exponent(tl.max(tl.abs(a), axis=1))
                shrink = power_of_two(-h_exponent)[:, None]
                tl.store(dh_at, to_e4m3(d_gate * shrink), mask=inside)
                tl.store(dh_at + I, to_e4m3(d_up * shrink), mask=inside)
                tl.store(a_at, to_e4m3(a * power_of_two(-a_exponent)[:, None]), mask=inside)
            else:
                tl.store(dh_at, d_gate.to(tl.bfloat16), mask=inside)
                tl.store(dh_at + I, d_up.to(tl.bfloat16), mask=inside)
                tl.store(a_at, a.to(tl.bfloat16), mask=inside)
        tl.store(dscore_S + rows, dscore)
        if FP8:
            tl.store(dh_scale_S + rows, power_of_two(h_exponent))
            tl.store(a_scale_S + rows, power_of_two(a_exponent))
