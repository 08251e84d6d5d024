"""SwiGLU passes between the products.

Axes: S slots, I expert width, M tiles of 128 slots.
"""

import triton
import triton.language as tl

from .tile import dequantize_mx, exponent_for_e4m3, power_of_two, quantize_mx, silu_and_slope, to_e4m3


@triton.jit(do_not_specialize=["num_experts"])
def swiglu_kernel(
    h_S2I,  # bf16
    score_S,
    ends_E,
    a_SI,  # out: silu(gate) up score, bf16 or e4m3 (FP8)
    a_scale_S,  # out float32 power of two per row (FP8)
    h_max_S,  # out float32: largest |gate| or |up| of the row (FP8)
    h8_S2I,  # out e4m3: MXFP8 copy of h (SAVE_MX)
    h8_scale,  # out uint8 [S, 2, I / 32] (SAVE_MX)
    num_experts,
    I,
    FP8: tl.constexpr,
    SAVE_MX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """One program holds whole rows, so that a row's e4m3 scale is exact."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_I)
        inside = (columns < I)[None, :]
        gate_at = rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
        gate = tl.load(h_S2I + gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(h_S2I + gate_at + I, mask=inside, other=0.0).to(tl.float32)
        if SAVE_MX:
            blocks = tl.arange(0, BLOCK_I // 32)
            scale_at = rows[:, None].to(tl.int64) * (2 * I // 32) + blocks[None, :]
            elements, scales = quantize_mx(gate, ROWS, BLOCK_I)
            tl.store(h8_S2I + gate_at, elements, mask=inside)
            tl.store(h8_scale + scale_at, scales, mask=(blocks < I // 32)[None, :])
            elements, scales = quantize_mx(up, ROWS, BLOCK_I)
            tl.store(h8_S2I + gate_at + I, elements, mask=inside)
            tl.store(h8_scale + scale_at + I // 32, scales, mask=(blocks < I // 32)[None, :])
        silu, _ = silu_and_slope(gate)
        a = silu * up * tl.load(score_S + rows)[:, None]
        a_at = a_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
        if FP8:
            tl.store(h_max_S + rows, tl.max(tl.maximum(tl.abs(gate), tl.abs(up)), axis=1))
            exponent = exponent_for_e4m3(tl.max(tl.abs(a), axis=1))
            tl.store(a_scale_S + rows, power_of_two(exponent))
            tl.store(a_at, to_e4m3(a * power_of_two(-exponent)[:, None]), mask=inside)
        else:
            tl.store(a_at, a.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["num_experts"])
def swiglu_backward_kernel(
    da_SI,  # bf16: gradient of the activation before the score
    h_S2I,  # bf16 or MXFP8 elements
    h_scale,  # uint8 [S, 2, I / 32] (SAVED_MX)
    score_S,
    dh_scale_S,  # float32 power of two per row (FP8)
    a_scale_S,  # float32 power of two per row (FP8)
    ends_E,
    dh_S2I,  # out bf16 or e4m3
    dh_M2IB,  # out e4m3 [M, 2 I, ROWS]: the same numbers, slots contiguous (FP8)
    a_out,  # out: bf16 [S, I], or e4m3 [M, I, ROWS] (FP8): silu(gate) up score
    dscore_NS,  # out float32: partial sums of the score's gradient
    num_experts,
    slots,
    I,
    FP8: tl.constexpr,
    SAVED_MX: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The score's gradient is <da, silu(gate) up>, so that expert outputs are never needed (SonicMoE)."""
    m = tl.program_id(1)
    first = m * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        columns = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
        inside = (columns < I)[None, :]
        gate_at = rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
        a_at = rows[:, None].to(tl.int64) * I + columns[None, :]
        da = tl.load(da_SI + a_at, mask=inside, other=0.0).to(tl.float32)
        gate_saved = tl.load(h_S2I + gate_at, mask=inside, other=0.0)
        up_saved = tl.load(h_S2I + gate_at + I, mask=inside, other=0.0)
        if SAVED_MX:
            blocks = tl.program_id(0) * (BLOCK_I // 32) + tl.arange(0, BLOCK_I // 32)
            scale_at = h_scale + rows[:, None].to(tl.int64) * (2 * I // 32) + blocks[None, :]
            real = (blocks < I // 32)[None, :]
            gate = dequantize_mx(gate_saved, tl.load(scale_at, mask=real, other=127), ROWS, BLOCK_I)
            up = dequantize_mx(up_saved, tl.load(scale_at + I // 32, mask=real, other=127), ROWS, BLOCK_I)
        else:
            gate = gate_saved.to(tl.float32)
            up = up_saved.to(tl.float32)
        silu, slope = silu_and_slope(gate)
        a = silu * up
        tl.store(dscore_NS + tl.program_id(0) * slots + rows, tl.sum(da * a, axis=1))
        score = tl.load(score_S + rows)[:, None]
        a *= score
        da *= score
        d_gate = da * up * slope
        d_up = da * silu
        if FP8:
            shrink = 1.0 / tl.load(dh_scale_S + rows)[:, None]
            d_gate_8 = to_e4m3(d_gate * shrink)
            d_up_8 = to_e4m3(d_up * shrink)
            a_8 = to_e4m3(a / tl.load(a_scale_S + rows)[:, None])
            tl.store(dh_S2I + gate_at, d_gate_8, mask=inside)
            tl.store(dh_S2I + gate_at + I, d_up_8, mask=inside)
            within = columns[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
            inside_t = (columns < I)[:, None]
            tile = m.to(tl.int64) * I * ROWS
            tl.store(a_out + tile + within, a_8.T, mask=inside_t)
            tl.store(dh_M2IB + 2 * tile + within, d_gate_8.T, mask=inside_t)
            tl.store(dh_M2IB + 2 * tile + I * ROWS + within, d_up_8.T, mask=inside_t)
        else:
            tl.store(a_out + a_at, a.to(tl.bfloat16), mask=inside)
            tl.store(dh_S2I + gate_at, d_gate.to(tl.bfloat16), mask=inside)
            tl.store(dh_S2I + gate_at + I, d_up.to(tl.bfloat16), mask=inside)
