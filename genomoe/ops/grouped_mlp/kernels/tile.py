"""Pieces that several kernels share: tile order, SwiGLU, and quantisation of a tile in registers."""

import triton
import triton.language as tl


@triton.jit
def tile_position(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the index-th tile: GROUP_M rows of tiles are walked column by column, for the L2 cache."""
    per_group = GROUP_M * tiles_n
    first_m = index // per_group * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    within = index % per_group
    return first_m + within % rows, within // rows


@triton.jit
def power_of_two(exponent):
    """2**exponent as float32, for int32 exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_exponent(largest):
    """Smallest exponent e >= -126 with largest <= 448 * 2**e, for non-negative float32 values up to 2**127."""
    bits = largest.to(tl.int32, bitcast=True)
    return tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32) - 8 - 127, -126)


@triton.jit
def to_e4m3(x):
    """Saturating conversion, round to nearest even."""
    return tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv)


@triton.jit
def quantize_mx(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CEIL: tl.constexpr = True):
    """MXFP8 along the columns, exactly as `genomoe.ops.mxfp8.quantize_mxfp8`: elements and scale bytes."""
    blocks = tl.reshape(x, (ROWS, COLUMNS // 32, 32))
    largest = tl.max(blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)
    exponent = largest >> 23
    if CEIL:
        exponent += ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent - 8, 0)
    special = largest >= 0x7F800000
    reciprocal = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(special[:, :, None], 0.0, blocks * reciprocal[:, :, None])
    elements = tl.reshape(to_e4m3(scaled), (ROWS, COLUMNS))
    return elements, tl.where(special, 255, exponent).to(tl.uint8)


@triton.jit
def dequantize_mx(elements, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 tile of MXFP8 elements [ROWS, COLUMNS] and scale bytes [ROWS, COLUMNS // 32]."""
    exponent = scales.to(tl.int32)
    bits = tl.where(exponent == 0, 1 << 22, exponent << 23)
    scale = tl.where(exponent == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    blocks = tl.reshape(elements.to(tl.float32), (ROWS, COLUMNS // 32, 32))
    return tl.reshape(blocks * scale[:, :, None], (ROWS, COLUMNS))


@triton.jit
def silu_and_slope(g):
    """silu(g) and its derivative."""
    s = tl.sigmoid(g)
    silu = g * s
    return silu, s + silu * (1.0 - s)
