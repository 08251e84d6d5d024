"""SwiGLU and the router's score between the products, with every copy that the next products need.

Forward, one program holds whole rows, so that a row's e4m3 scale is exact. Rows too long for the registers (WHOLE
false) are read twice: once for their largest magnitude, then, from the cache, for the values. Backward with e4m3
operands works on blocks of rows and columns, since every value is also written transposed; there a row's scale comes
from a bound.

Axes: S slots, I expert width, M tiles of 128 slots, B the 128 slots of a tile, E experts.
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


@triton.jit(do_not_specialize=["num_experts", "slots"])
def swiglu_kernel(
    h_S2I,  # bf16
    score_S,
    ends_E,
    a_SI,  # out: silu(gate) up score, bf16 or e4m3 (FP8)
    a_scale_S,  # out float32 power of two per row (FP8)
    h8_S2I,  # out e4m3: MXFP8 copy of h (SAVE_MX)
    h8_scale,  # out uint8 [S, 2, I / 32] (SAVE_MX)
    largest_2S,  # out float32: each row's largest |silu(gate)| and |up|; None: not wanted
    num_experts,
    slots,
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
        largest_silu = tl.zeros((ROWS,), tl.float32)
        largest_up = tl.zeros((ROWS,), tl.float32)
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
            if largest_2S is not None:
                largest_silu = tl.maximum(largest_silu, tl.max(tl.abs(silu), axis=1))
                largest_up = tl.maximum(largest_up, tl.max(tl.abs(up), axis=1))
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
        if largest_2S is not None:
            tl.store(largest_2S + rows, largest_silu)
            tl.store(largest_2S + slots + rows, largest_up)


@triton.jit
def _gradients(
    da_SI, h_S2I, h_scale, h_factor, a_factor, rows, column, I, MX: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):  # fmt: skip
    """d_gate and d_up times ``h_factor`` of their row, the activation times ``a_factor``, and its share of dscore."""
    columns = column + tl.arange(0, BLOCK_I)
    at = da_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
    da = tl.load(at, mask=(columns < I)[None, :], other=0.0).to(tl.float32)
    gate, up = _load_h(h_S2I, h_scale, rows, columns, I, MX, ROWS, BLOCK_I)
    silu, slope = silu_and_slope(gate)
    a = silu * up
    dscore = tl.sum(da * a, axis=1)
    da *= h_factor[:, None]
    return da * up * slope, da * silu, a * a_factor[:, None], dscore


@triton.jit(do_not_specialize=["num_experts"])
def swiglu_backward_kernel(
    da_SI,  # bf16: gradient of the activation after the score
    h_S2I,  # bf16 or MXFP8 elements
    h_scale,  # uint8 [S, 2, I / 32] (SAVED_MX)
    score_S,
    ends_E,
    dh_S2I,  # out bf16
    a_SI,  # out bf16: silu(gate) up score
    dscore_S,  # out float32
    num_experts,
    I,
    SAVED_MX: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The score's gradient is <da, silu(gate) up>, so that expert outputs are never needed (SonicMoE)."""
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        score = tl.load(score_S + rows)
        dscore = tl.zeros((ROWS,), tl.float32)
        for column in range(0, BLOCK_I if WHOLE else I, BLOCK_I):
            d_gate, d_up, a, part = _gradients(
                da_SI, h_S2I, h_scale, score, score, rows, column, I, SAVED_MX, ROWS, BLOCK_I
            )
            dscore += part
            columns = column + tl.arange(0, BLOCK_I)
            inside = (columns < I)[None, :]
            dh_at = dh_S2I + rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
            tl.store(dh_at, d_gate.to(tl.bfloat16), mask=inside)
            tl.store(dh_at + I, d_up.to(tl.bfloat16), mask=inside)
            tl.store(a_SI + rows[:, None].to(tl.int64) * I + columns[None, :], a.to(tl.bfloat16), mask=inside)
        tl.store(dscore_S + rows, dscore)


@triton.jit(do_not_specialize=["num_experts", "slots"])
def swiglu_backward_scales_kernel(
    da_largest_NS,  # float32: largest magnitudes of da's rows, one for each of N ranges of columns
    largest_2S,  # float32: rows' largest |silu(gate)| and |up|
    score_S,
    dy_scale_S,  # float32 powers of two, the other factor of dw_down
    x_scale_T,  # float32 powers of two, the other factor of dw_up
    token_S,
    tile_expert_M,
    ends_E,
    dh_scale_S,  # out float32 power of two per row
    a_scale_S,  # out float32 power of two per row
    unit_2E,  # in and out, bits of float32: the largest product of scales in dw_down and in dw_up
    num_experts,
    slots,
    N,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Scales of the e4m3 results of backward, from bounds.

    |d_gate| <= 1.1 |da score| |up|, |d_up| <= |da score| |silu| and |a| = |score| |silu| |up|, so the largest of each
    factor bounds a row. Twice the bound leaves room for the rounding of what was kept. A scale that is a few powers of
    two too large costs e4m3 no precision but that of the row's smallest values.
    """
    tile = tl.program_id(0)
    if tile * TILE < tl.load(ends_E + num_experts - 1):
        rows = tile * TILE + tl.arange(0, TILE)
        ranges = tl.arange(0, BLOCK_N)
        at = da_largest_NS + ranges[:, None].to(tl.int64) * slots + rows[None, :]
        da = tl.max(tl.load(at, mask=(ranges < N)[:, None], other=0.0), axis=0)
        silu = tl.load(largest_2S + rows)
        up = tl.load(largest_2S + slots + rows)
        score = 2.0 * tl.abs(tl.load(score_S + rows))
        dh_scale = power_of_two(e4m3_exponent(da * score * tl.maximum(silu, up)))
        a_scale = power_of_two(e4m3_exponent(silu * up * score))
        tl.store(dh_scale_S + rows, dh_scale)
        tl.store(a_scale_S + rows, a_scale)
        expert = tl.load(tile_expert_M + tile)
        token = tl.load(token_S + rows)
        x_scale = tl.load(x_scale_T + token, mask=token >= 0, other=0.0)
        _raise_unit(unit_2E + expert, tl.load(dy_scale_S + rows) * a_scale)
        _raise_unit(unit_2E + num_experts + expert, x_scale * dh_scale)


@triton.jit
def _raise_unit(unit, scale):
    """The unit becomes at least the largest of these powers of two, whose order is that of their bits."""
    tl.atomic_max(unit, tl.max(scale.to(tl.int32, bitcast=True), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["num_experts", "slots"])
def swiglu_backward_e4m3_kernel(
    da_SI,  # bf16: gradient of the activation after the score
    h_S2I,  # bf16 or MXFP8 elements
    h_scale,  # uint8 [S, 2, I / 32] (SAVED_MX)
    score_S,
    dh_scale_S,  # float32 powers of two
    a_scale_S,  # float32 powers of two
    ends_E,
    dh_S2I,  # out e4m3
    dh_M2IQ,  # out: dh with slots contiguous within a tile, four e4m3 to a word
    a_MIQ,  # out: silu(gate) up score, likewise
    dscore_CS,  # out float32: parts of the score's gradient, one for each of C blocks of columns
    num_experts,
    slots,
    I,
    SAVED_MX: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """`swiglu_backward_kernel` with e4m3 results, each written as the products want it: rows, and transposed tiles.

    A thread computes four neighbouring slots, so that their transposed bytes make a word without leaving it.
    """
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        quads = tl.arange(0, ROWS // 4)
        column = tl.program_id(1) * BLOCK_I
        columns = column + tl.arange(0, BLOCK_I)
        inside = (columns < I)[None, :]
        gate_word = tl.zeros((ROWS // 4, BLOCK_I), tl.uint32)
        up_word = tl.zeros((ROWS // 4, BLOCK_I), tl.uint32)
        a_word = tl.zeros((ROWS // 4, BLOCK_I), tl.uint32)
        for i in tl.static_range(4):
            rows = first + 4 * quads + i
            score = tl.load(score_S + rows)
            h_factor = score * _inverse(tl.load(dh_scale_S + rows))
            a_factor = score * _inverse(tl.load(a_scale_S + rows))
            d_gate, d_up, a, dscore = _gradients(
                da_SI, h_S2I, h_scale, h_factor, a_factor, rows, column, I, SAVED_MX, ROWS // 4, BLOCK_I
            )
            tl.store(dscore_CS + tl.program_id(1).to(tl.int64) * slots + rows, dscore)
            at = dh_S2I + rows[:, None].to(tl.int64) * (2 * I) + columns[None, :]
            tl.store(at, to_e4m3(d_gate), mask=inside)
            tl.store(at + I, to_e4m3(d_up), mask=inside)
            gate_word |= _byte(d_gate) << (8 * i)
            up_word |= _byte(d_up) << (8 * i)
            a_word |= _byte(a) << (8 * i)
        WORDS: tl.constexpr = TILE // 4
        tile = (first // TILE).to(tl.int64)
        word = columns[:, None] * WORDS + first % TILE // 4 + quads[None, :]
        inside = (columns < I)[:, None]
        tl.store(dh_M2IQ + tile * (2 * I * WORDS) + word, gate_word.T, mask=inside)
        tl.store(dh_M2IQ + (tile * 2 + 1) * (I * WORDS) + word, up_word.T, mask=inside)
        tl.store(a_MIQ + tile * (I * WORDS) + word, a_word.T, mask=inside)


@triton.jit
def _inverse(scale):
    """1 / scale of a power of two from 2**-126 to 2**126, exactly."""
    return ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _byte(x):
    """e4m3 of values that are in its range, as integers.

    Not `to_e4m3(x)`, whose result would then be used both as it is and by the byte: ptxas 12.8, which Triton 3.6
    brings, makes wrong code of that. Two different conversions are two results.
    """
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.uint32)
