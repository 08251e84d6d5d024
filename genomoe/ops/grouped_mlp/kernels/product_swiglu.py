"""The up-projection with SwiGLU and the router's score in its epilogue, for when gate and up are not kept.

In e4m3 a row has one power of two, but a tile sees only some of its columns. So a row gets a floor from a sample of its
columns; a tile is divided by the floor or, should it hold a larger value, by its own power of two; and a last pass
settles the few rows whose tiles differ.

Axes: S slots, E experts, D model, I expert width, M tiles of 128 slots, N tiles of columns.
"""

import triton
import triton.language as tl

from .tile import e4m3_exponent, power_of_two, silu_and_slope, tile_position, to_e4m3


@triton.jit(do_not_specialize=["num_experts", "slots", "tiles_n"])
def product_swiglu_kernel(
    x_desc,  # [S, D] bf16 or e4m3
    x_scale_S,  # float32 powers of two; bf16: None
    w_desc,  # [E, 2I, D]: the gate's rows, then up's
    w_scale_E,  # float32 powers of two; bf16: None
    score_S,
    ends_E,
    tile_expert_M,
    a_desc,  # out [S, I] bf16 or e4m3; None: only the exponents are wanted
    sample_S,  # int8: exponent of each row in a sample of its columns; None: not known
    exponent_NS,  # out int8: exponent of each row in each tile of columns; bf16: None
    num_experts,
    slots,
    D,
    I,
    tiles_n,  # of BN columns: the first so many are computed
    HEADROOM: tl.constexpr,  # binades of a row's floor above its sample
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """a = silu(gate) up score, with gate and up = x @ w[expert of the row]^T in float32 and never stored.

    A tile reads the gate's and up's rows of the same columns. Where I is no multiple of BN, the last tile's gate runs
    on into up's rows, and its up into zeros past those; such columns are zeros and beyond ``a``, so are not stored.

    Factors of a row are gathered into one: nothing overlaps this epilogue, so it has to be short. Nothing in e4m3 is
    clamped, since no value exceeds the largest that its exponent allows.
    """
    tiles_m = tl.load(ends_E + num_experts - 1) // BM
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        m, n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        expert = tl.load(tile_expert_M + m)
        rows = m * BM + tl.arange(0, BM)
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, D, BK):
            x = x_desc.load([m * BM, k])
            gate = tl.dot(x, w_desc.load([expert, n * BN, k]).reshape(BN, BK).T, gate)
            up = tl.dot(x, w_desc.load([expert, I + n * BN, k]).reshape(BN, BK).T, up)
        factor = tl.load(score_S + rows)
        if exponent_NS is not None:
            scale = tl.load(x_scale_S + rows) * tl.load(w_scale_E + expert)
            gate *= scale[:, None]
            factor *= scale
        silu, _ = silu_and_slope(gate)
        a = silu * up
        if exponent_NS is not None:
            exponent = e4m3_exponent(tl.max(tl.abs(a), axis=1) * tl.abs(factor))
            if sample_S is not None:
                exponent = tl.maximum(exponent, tl.load(sample_S + rows).to(tl.int32) + HEADROOM)
            tl.store(exponent_NS + n.to(tl.int64) * slots + rows, exponent.to(tl.int8))
            factor = tl.clamp(factor * power_of_two(-exponent), -3e38, 3e38)  # zeros times a finite factor are zeros
        if a_desc is not None:
            a_desc.store([m * BM, n * BN], (a * factor[:, None]).to(a_desc.dtype))


@triton.jit(do_not_specialize=["num_experts", "slots", "tiles_n"])
def settle_kernel(
    a_SI,  # in and out: e4m3, each tile of columns divided by its own power of two
    exponent_NS,  # int8: exponents of those
    ends_E,
    scale_S,  # out float32: the power of two of the whole row
    num_experts,
    slots,
    I,
    tiles_n,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every row gets the largest of its tiles' powers of two; only tiles with a smaller one are read and rewritten.

    That is exact but for values that become subnormal.
    """
    first = tl.program_id(0) * ROWS
    if first < tl.load(ends_E + num_experts - 1):
        rows = first + tl.arange(0, ROWS)
        tiles = tl.arange(0, BLOCK_N)
        real = (tiles < tiles_n)[:, None]
        exponent_at = exponent_NS + tiles[:, None].to(tl.int64) * slots + rows[None, :]
        exponent = tl.max(tl.load(exponent_at, mask=real, other=-127), axis=0).to(tl.int32)
        least = tl.min(tl.load(exponent_at, mask=real, other=127), axis=0).to(tl.int32)
        tl.store(scale_S + rows, power_of_two(exponent))
        if tl.min(least - exponent, axis=0) < 0:
            tile_at = exponent_NS + rows
            for column in range(0, I, BN):
                change = tl.load(tile_at).to(tl.int32) - exponent
                tile_at += slots
                columns = column + tl.arange(0, BN)
                at = a_SI + rows[:, None].to(tl.int64) * I + columns[None, :]
                mask = (change < 0)[:, None] & (columns < I)[None, :]
                a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
                tl.store(at, to_e4m3(a * power_of_two(tl.maximum(change, -126))[:, None]), mask=mask)
