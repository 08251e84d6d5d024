"""Launching the Triton passes: grids, block sizes and output buffers.

Tensor descriptors are made on the host, so that no global Triton allocator has to be set. Rows past the last segment of
an `ExpertLayout` are neither read nor written.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Float32
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..mxfp8 import MXFP8, Rounding
from .kernels import passes, products, swiglu
from .layout import TILE, ExpertLayout
from .saved import Save, SavedUp

E4M3 = torch.float8_e4m3fn


class ScaledRows(NamedTuple):
    """Rows in e4m3, each with the power of two that it was divided by; or, with no scales, rows as they are."""

    values_SX: Tensor
    scales_S: Float32[Tensor, " S"] | None
    scale_T: Float32[Tensor, " T"] | None = None
    """The same by token, where the rows are tokens."""

    @property
    def scale_S(self) -> Float32[Tensor, " S"]:
        assert self.scales_S is not None, "these rows are not scaled"
        return self.scales_S


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Block sizes of a persistent product kernel."""

    BM: int = TILE
    BN: int = 256
    BK: int = TILE
    GROUP_M: int = 8
    num_warps: int = 8
    num_stages: int = 3
    per_processor: int = 1

    def launch_options(self, device: torch.device) -> tuple[tuple[int], dict]:
        """Grid and keyword arguments of a persistent launch: as many programs as fit on the device at once."""
        programs = processor_count(device) * self.per_processor
        options = {name: getattr(self, name) for name in ("BM", "BN", "BK", "GROUP_M", "num_warps", "num_stages")}
        return (programs,), {**options, "PROGRAMS": programs}


@functools.cache
def processor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the CPU, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))


def row_blocks(width: int, elements: int) -> tuple[int, int]:
    """Rows per program and the power of two that holds a row, for programs of about ``elements`` elements."""
    block = triton.next_power_of_2(width)
    return max(1, min(TILE, elements // block)), block


def spread_rows(x_TD: Float[Tensor, "T D"], layout: ExpertLayout, *, fp8: bool) -> ScaledRows:
    """Rows of ``x`` in slot order, zeros where a slot is padding."""
    T, D = x_TD.shape
    device = x_TD.device
    out = torch.empty(layout.slots, D, dtype=E4M3 if fp8 else x_TD.dtype, device=device)
    scale_S = torch.empty(layout.slots, dtype=torch.float32, device=device) if fp8 else None
    scale_T = torch.empty(T, dtype=torch.float32, device=device) if fp8 else None
    rows, block = row_blocks(D, 4096)
    token_programs = triton.cdiv(T, rows)
    passes.spread_kernel[(token_programs + layout.slots // TILE,)](
        x_TD, layout.slot_TK, layout.token_S, layout.ends_E, out, scale_S, scale_T,
        T, D, layout.num_experts, token_programs,
        K=layout.slot_TK.shape[1], FP8=fp8, TILE=TILE, ROWS=rows, BLOCK_D=block, num_warps=4,
    )  # fmt: skip
    return ScaledRows(out, scale_S, scale_T)


def combine_rows(
    y_SD: Float[Tensor, "S D"],
    layout: ExpertLayout,
    *,
    residual: Float[Tensor, "T D"] | None = None,
    out: Float[Tensor, "T D"],
) -> None:
    """Sum of each token's K rows and its row of contiguous ``residual``, in float32, rounded once into ``out``."""
    T, K = layout.slot_TK.shape
    D = y_SD.shape[1]
    block = min(triton.next_power_of_2(D), 1024)
    rows = max(1, 4096 // block)
    passes.combine_kernel[(triton.cdiv(T, rows), triton.cdiv(D, block))](
        y_SD, layout.slot_TK, residual, out, T, D, K=K, ROWS=rows, BLOCK_D=block, num_warps=8
    )


def scale_rows(a_SI: Float[Tensor, "S I"], layout: ExpertLayout) -> ScaledRows:
    """Rows in e4m3, each divided by its own power of two."""
    S, I = a_SI.shape
    out = torch.empty(S, I, dtype=E4M3, device=a_SI.device)
    scale_S = torch.empty(S, dtype=torch.float32, device=a_SI.device)
    rows, block = row_blocks(I, 4096)
    passes.scale_rows_kernel[(S // rows,)](
        a_SI, layout.ends_E, out, scale_S, layout.num_experts, I, ROWS=rows, BLOCK_I=block, num_warps=4
    )
    return ScaledRows(out, scale_S)


def swiglu_rows(
    h_S2I: Float[Tensor, "S 2 I"], layout: ExpertLayout, *, fp8: bool, save: Save | None
) -> tuple[ScaledRows, SavedUp]:
    """silu(gate) up score, and ``h`` as it is to be kept for backward: itself, or its MXFP8 copy; None: not at all."""
    S, _, I = h_S2I.shape
    device, save_mx = h_S2I.device, save == "mxfp8"
    a = torch.empty(S, I, dtype=E4M3 if fp8 else h_S2I.dtype, device=device)
    a_scale = torch.empty(S, dtype=torch.float32, device=device) if fp8 else None
    h8 = torch.empty(S, 2, I, dtype=E4M3, device=device) if save_mx else None
    h8_scale = torch.empty(S, 2, I // 32, dtype=torch.uint8, device=device) if save_mx else None
    largest_2S = torch.empty(2, S, dtype=torch.float32, device=device) if fp8 and save else None
    rows, block = row_blocks(min(I, 4096), 2048)
    swiglu.swiglu_kernel[(S // rows,)](
        h_S2I, layout.score_S, layout.ends_E, a, a_scale, h8, h8_scale, largest_2S, layout.num_experts, S, I,
        FP8=fp8, SAVE_MX=save_mx, WHOLE=block >= I, ROWS=rows, BLOCK_I=block,
        num_warps=8 if save and block > 2048 else 4,
    )  # fmt: skip
    return ScaledRows(a, a_scale), SavedUp(h_S2I if h8 is None else h8, h8_scale, largest_2S=largest_2S)


def swiglu_backward_rows(
    da_SI: Float[Tensor, "S I"], saved: SavedUp, layout: ExpertLayout
) -> tuple[Tensor, Tensor, Float32[Tensor, " S"]]:
    """Gradient of gate and up [S, 2I], the activation [S, I] once more, and the score's gradient."""
    S, I = da_SI.shape
    dh, a = da_SI.new_empty(S, 2 * I), torch.empty_like(da_SI)
    dscore = torch.empty(S, dtype=torch.float32, device=da_SI.device)
    rows, block = row_blocks(min(I, 4096), 2048)
    swiglu.swiglu_backward_kernel[(S // rows,)](
        da_SI, saved.h, saved.scales, layout.score_S, layout.ends_E, dh, a, dscore, layout.num_experts, I,
        SAVED_MX=saved.scales is not None, WHOLE=block >= I, ROWS=rows, BLOCK_I=block,
        num_warps=8 if block > 2048 else 4,
    )  # fmt: skip
    return dh, a, dscore


class SwigluGradients(NamedTuple):
    """What backward of SwiGLU gives the e4m3 products. Axes: S slots, I expert width, M tiles, B a tile's 128 slots."""

    dh: ScaledRows
    """Gradient of gate and up, e4m3 [S, 2I]."""
    dh_MCB: Tensor
    """The same [M, 2I, B], slots contiguous."""
    a_MCB: Tensor
    """The activation [M, I, B], slots contiguous."""
    a_scale_S: Float32[Tensor, " S"]
    dscore_S: Float32[Tensor, " S"]
    down_unit_E: Float32[Tensor, " E"]
    """Per expert, the largest product of a slot's scales of dy and the activation: what a unit of dw_down is worth."""
    up_unit_E: Float32[Tensor, " E"]
    """The same of x and dh, for dw_up."""


def swiglu_backward_e4m3(
    da_SI: Float[Tensor, "S I"],
    da_largest_NS: Float32[Tensor, "N S"],
    saved: SavedUp,
    dy_scale_S: Float32[Tensor, " S"],
    layout: ExpertLayout,
) -> SwigluGradients:
    """`swiglu_backward_rows` with e4m3 results, as rows and as transposed tiles.

    ``da_largest_NS`` holds the largest magnitudes of da's rows, each over one of N ranges of columns.
    """
    S, I = da_SI.shape
    E, device = layout.num_experts, da_SI.device
    dh_scale, a_scale = torch.empty(2, S, dtype=torch.float32, device=device)
    unit_2E = torch.full((2, E), torch.finfo(torch.float32).tiny, device=device)
    ranges = da_largest_NS.shape[0]
    swiglu.swiglu_backward_scales_kernel[(S // TILE,)](
        da_largest_NS, saved.largest_2S, layout.score_S, dy_scale_S, saved.x_scale_T, layout.token_S,
        layout.tile_expert_M, layout.ends_E, dh_scale, a_scale, unit_2E.view(torch.int32), E, S, ranges,
        TILE=TILE, BLOCK_N=triton.next_power_of_2(ranges), num_warps=4,
    )  # fmt: skip
    dh = torch.empty(S, 2 * I, dtype=E4M3, device=device)
    dh_MCB = torch.empty(S // TILE, 2 * I, TILE, dtype=E4M3, device=device)
    a_MCB = torch.empty(S // TILE, I, TILE, dtype=E4M3, device=device)
    rows, block = 32, 128
    dscore_CS = torch.empty(triton.cdiv(I, block), S, dtype=torch.float32, device=device)
    swiglu.swiglu_backward_e4m3_kernel[(S // rows, triton.cdiv(I, block))](
        da_SI, saved.h, saved.scales, layout.score_S, dh_scale, a_scale, layout.ends_E,
        dh, dh_MCB.view(torch.int32), a_MCB.view(torch.int32), dscore_CS, E, S, I,
        SAVED_MX=saved.scales is not None, TILE=TILE, ROWS=rows, BLOCK_I=block, num_warps=4,
    )  # fmt: skip
    return SwigluGradients(ScaledRows(dh, dh_scale), dh_MCB, a_MCB, a_scale, dscore_CS.sum(0), unit_2E[0], unit_2E[1])


def grouped_product(
    a_SK: Tensor,
    a_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    layout: ExpertLayout,
    c: TileConfig,
    *,
    mx: bool = False,
    kn: bool = False,
    largest_NS: Float32[Tensor, "N S"] | None = None,
) -> Float[Tensor, "S N"]:
    """a @ w[expert of the row]^T in bfloat16, with w [E, N, K]; with ``kn`` a @ w[expert of the row], w [E, K, N].

    Scales are none (bfloat16 operands), powers of two in float32, [S] and [E] (e4m3), or, with ``mx``, MXFP8's bytes
    along the contraction. ``largest_NS`` comes to hold each row's largest magnitude in each of the N tiles of ``c.BN``
    columns.
    """
    K, N = (w.shape[1], w.shape[2]) if kn else (w.shape[2], w.shape[1])
    out = torch.empty(layout.slots, N, dtype=torch.bfloat16, device=w.device)
    grid, options = c.launch_options(out.device)
    products.product_kernel[grid](
        descriptor(a_SK, c.BM, c.BK), a_scale, descriptor(w, 1, *((c.BK, c.BN) if kn else (c.BN, c.BK))), w_scale,
        layout.ends_E, layout.tile_expert_M, descriptor(out, c.BM, c.BN), largest_NS, layout.num_experts, layout.slots,
        N, K, MX=mx, KN=kn, **options,
    )  # fmt: skip
    return out


def weight_gradient_bf16(
    left_SX: Float[Tensor, "S X"], right_SY: Float[Tensor, "S Y"], layout: ExpertLayout, c: TileConfig
) -> Float[Tensor, "E X Y"]:
    """Per expert, left[slots of e]^T @ right[slots of e]."""
    E, X, Y = layout.num_experts, left_SX.shape[1], right_SY.shape[1]
    out = left_SX.new_empty(E, X, Y)
    grid, options = c.launch_options(out.device)
    products.weight_gradient_bf16_kernel[grid](
        descriptor(left_SX, c.BK, c.BM), descriptor(right_SY, c.BK, c.BN), layout.ends_E,
        descriptor(out, 1, c.BM, c.BN), E, X, Y, **options,
    )  # fmt: skip
    return out


def gather_transposed(
    x_TD: Float[Tensor, "T D"], scale_S: Float32[Tensor, " S"], unit_E: Float32[Tensor, " E"], layout: ExpertLayout
) -> Tensor:
    """e4m3 [S / 128, D, 128]: rows of ``x`` in slot order, times scale / unit, slots contiguous within a tile."""
    D = x_TD.shape[1]
    tiles = layout.slots // TILE
    out = torch.empty(tiles, D, TILE, dtype=E4M3, device=x_TD.device)
    passes.gather_transposed_kernel[(tiles, triton.cdiv(D, 64))](
        x_TD, layout.token_S, scale_S, unit_E, layout.ends_E, layout.tile_expert_M, out, D, layout.num_experts,
        TILE=TILE, BD=64, num_warps=4,
    )  # fmt: skip
    return out


def weight_e4m3(
    w_ERC: Float[Tensor, "E R C"], largest_E: Float32[Tensor, " E"], *, transposed: bool
) -> tuple[Tensor, Float32[Tensor, " E"]]:
    """e4m3 [E, R, C], or [E, C, R] with ``transposed``, and the power of two that each expert's was divided by.

    Both orientations hold the same numbers. ``largest_E`` is the largest magnitude of each expert's matrix.
    """
    E, R, C = w_ERC.shape
    out = torch.empty((E, C, R) if transposed else (E, R, C), dtype=E4M3, device=w_ERC.device)
    scale_E = torch.empty_like(largest_E)
    passes.weight_kernel[(triton.cdiv(R, 64), triton.cdiv(C, 128), E)](
        w_ERC, largest_E, scale_E, out, R, C, TRANSPOSED=transposed, BR=64, BC=128, num_warps=8
    )
    return out, scale_E


def quantize_mx(x_NRC: Float[Tensor, "... R C"], *, transposed: bool = False, rounding: Rounding = "ceil") -> MXFP8:
    """`genomoe.ops.mxfp8.quantize_mxfp8` in one pass over contiguous ``x``, bit for bit; or of its transpose."""
    *batch, R, C = x_NRC.shape
    rows, columns = (C, R) if transposed else (R, C)
    elements = torch.empty(*batch, rows, columns, dtype=E4M3, device=x_NRC.device)
    scales = torch.empty(*batch, rows, columns // 32, dtype=torch.uint8, device=x_NRC.device)
    N = x_NRC.numel() // max(R * C, 1)
    passes.quantize_mx_kernel[(triton.cdiv(R, 64), triton.cdiv(C, 64), N)](
        x_NRC, elements, scales, R, C, TRANSPOSED=transposed, CEIL=rounding == "ceil", BR=64, BC=64, num_warps=4
    )
    return MXFP8(elements, scales)


def dequantize_mx(quantized: MXFP8) -> Tensor:
    """`genomoe.ops.mxfp8.dequantize_mxfp8` to bfloat16 in one pass, bit for bit."""
    elements, scales = quantized
    C = elements.shape[-1]
    R = elements.numel() // C
    out = torch.empty(elements.shape, dtype=torch.bfloat16, device=elements.device)
    passes.dequantize_mx_kernel[(triton.cdiv(R, 32), triton.cdiv(C, 128))](
        elements, scales, out, R, C, BR=32, BC=128, num_warps=4
    )
    return out
