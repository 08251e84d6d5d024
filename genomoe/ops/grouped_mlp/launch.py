"""Launching the Triton passes: grids, block sizes and output buffers.

Tensor descriptors are made on the host, so that no global Triton allocator has to be set.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from jaxtyping import Float, Float32
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..mxfp8 import MXFP8, Rounding
from .kernels import passes
from .kernels import swiglu as swiglu_passes
from .layout import TILE, ExpertLayout


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """Block sizes of a persistent product kernel; the values in use were measured, see `genomoe bench layer`."""

    BM: int = TILE
    BN: int
    BK: int
    GROUP_M: int = 8
    FLATTEN: bool = False
    num_warps: int = 8
    per_processor: int = 1
    maxnreg: int | None = None
    num_stages: int = 3

    def launch_options(self, device: torch.device) -> tuple[tuple[int], dict]:
        """Grid and keyword arguments of a persistent launch."""
        programs = processor_count(device) * self.per_processor
        options = {name: getattr(self, name) for name in ("BM", "BN", "BK", "GROUP_M", "FLATTEN")}
        return (programs,), {
            **options, "PROGRAMS": programs, "num_warps": self.num_warps, "num_stages": self.num_stages, **({"maxnreg": self.maxnreg} if self.maxnreg else {})
        }  # fmt: skip


@functools.cache
def processor_count(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 1 for the CPU, where Triton's interpreter runs the kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def descriptor(tensor: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, list(block))


def gather_rows(x_TD: Float[Tensor, "T D"], layout: ExpertLayout) -> Float[Tensor, "S D"]:
    """Rows of ``x`` in slot order; zeros where a slot is padding; rows past the last segment are left unwritten."""
    D = x_TD.shape[1]
    out = x_TD.new_empty(layout.slots, D)
    block = triton.next_power_of_2(D)
    rows = max(1, min(TILE, 8192 // block))
    passes.gather_kernel[(layout.slots // rows,)](
        x_TD, layout.token_S, layout.ends_E, out, None, None, layout.ends_E.numel(), D,
        FP8=False, NORM=False, ROWS=rows, BLOCK_D=block, num_warps=8,
    )  # fmt: skip
    return out


@dataclass(frozen=True, kw_only=True)
class GatheredE4M3:
    """Gathered rows in e4m3, each divided by its own power of two."""

    values_SD: Tensor
    scale_S: Float32[Tensor, " S"]
    norm_S: Float32[Tensor, " S"] | None


def gather_rows_e4m3(x_TD: Float[Tensor, "T D"], layout: ExpertLayout, *, norm: bool = False) -> GatheredE4M3:
    D = x_TD.shape[1]
    out = torch.empty(layout.slots, D, dtype=torch.float8_e4m3fn, device=x_TD.device)
    scale = torch.empty(layout.slots, dtype=torch.float32, device=x_TD.device)
    norms = torch.empty_like(scale) if norm else None
    block = triton.next_power_of_2(D)
    rows = max(1, min(TILE, 8192 // block))
    passes.gather_kernel[(layout.slots // rows,)](
        x_TD, layout.token_S, layout.ends_E, out, scale, norms, layout.ends_E.numel(), D,
        FP8=True, NORM=norm, ROWS=rows, BLOCK_D=block, num_warps=8,
    )  # fmt: skip
    return GatheredE4M3(values_SD=out, scale_S=scale, norm_S=norms)


def gather_transposed_e4m3(
    x_TD: Float[Tensor, "T D"], factor_S: Float32[Tensor, " S"], layout: ExpertLayout
) -> Tensor:
    """e4m3 [S / 128, D, 128]: rows of ``x`` in slot order, times ``factor``, slots contiguous within a tile."""
    D = x_TD.shape[1]
    out = torch.empty(layout.slots // TILE, D, TILE, dtype=torch.float8_e4m3fn, device=x_TD.device)
    passes.gather_transposed_kernel[(layout.slots // TILE, triton.cdiv(D, 64))](
        x_TD, layout.token_S, factor_S, layout.ends_E, out, layout.ends_E.numel(), D,
        BS=TILE, BD=64, num_warps=8,
    )  # fmt: skip
    return out


def combine_rows(y_SD: Float[Tensor, "S D"], layout: ExpertLayout, *, out: Float[Tensor, "T D"]) -> None:
    """Sum of each token's K rows, in float32, rounded once into ``out``."""
    T, K = layout.slot_TK.shape
    D = y_SD.shape[1]
    block = min(triton.next_power_of_2(D), 1024)
    rows = max(1, 4096 // block)
    passes.combine_kernel[(triton.cdiv(T, rows), triton.cdiv(D, block))](
        y_SD, layout.slot_TK, out, T, D, K=K, ROWS=rows, BLOCK_D=block, num_warps=8
    )


def e4m3_scale(largest: Float32[Tensor, ...]) -> Float32[Tensor, ...]:
    """Smallest power of two p >= 2**-126 with largest <= 448 p."""
    bits = largest.float().view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).int() - 8
    return (exponent.clamp(min=1) << 23).view(torch.float32)


def quantize_weight(
    w_ERC: Float[Tensor, "E R C"], scale_E: Float32[Tensor, " E"], *, transposed: bool
) -> Tensor:
    """e4m3 of w / scale: [E, R, C], or [E, C, R] with ``transposed``. Both hold the same numbers."""
    E, R, C = w_ERC.shape
    shape = (E, C, R) if transposed else (E, R, C)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=w_ERC.device)
    passes.quantize_weight_kernel[(triton.cdiv(R, 64), triton.cdiv(C, 128), E)](
        w_ERC, scale_E, out, out, R, C, PLAIN=not transposed, TRANSPOSED=transposed, BR=64, BC=128, num_warps=8
    )
    return out


def quantize_mxfp8_triton(x: Float[Tensor, "... N"], *, rounding: Rounding = "floor") -> MXFP8:
    """`genomoe.ops.mxfp8.quantize_mxfp8` in one pass over contiguous ``x``, bit for bit."""
    C = x.shape[-1]
    rows = x.numel() // C
    elements = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(*x.shape[:-1], C // 32, dtype=torch.uint8, device=x.device)
    block = min(triton.next_power_of_2(C), 256)
    passes.quantize_mx_kernel[(triton.cdiv(rows, 32), triton.cdiv(C, block))](
        x, elements, scales, rows, C, CEIL=rounding == "ceil", BR=32, BC=block, num_warps=4
    )
    return MXFP8(elements, scales)


def swiglu(h_S2I, layout: ExpertLayout, *, fp8: bool, save_mx: bool):
    """Returns a [S, I], its row scales, the rows' largest |h| (fp8 only), and h in MXFP8 (save_mx only)."""
    S, _, I = h_S2I.shape
    device = h_S2I.device
    a = torch.empty(S, I, dtype=torch.float8_e4m3fn if fp8 else h_S2I.dtype, device=device)
    a_scale = torch.empty(S, dtype=torch.float32, device=device) if fp8 else None
    h_max = torch.empty(S, dtype=torch.float32, device=device) if fp8 else None
    h8 = torch.empty(S, 2, I, dtype=torch.float8_e4m3fn, device=device) if save_mx else None
    h8_scale = torch.empty(S, 2, I // 32, dtype=torch.uint8, device=device) if save_mx else None
    block = triton.next_power_of_2(I)
    rows = max(1, min(TILE, 4096 // block))
    warps = 4 if block * rows <= 4096 else (8 if block <= 8192 else 16)
    swiglu_passes.swiglu_kernel[(S // rows,)](
        h_S2I, layout.score_S, layout.ends_E, a, a_scale, h_max, h8, h8_scale, layout.ends_E.numel(), I,
        FP8=fp8, SAVE_MX=save_mx, ROWS=rows, BLOCK_I=block, num_warps=warps,
    )  # fmt: skip
    return a, a_scale, h_max, h8, h8_scale


def swiglu_backward(da_SI, h_S2I, h_scale, layout: ExpertLayout, *, dh_scale_S=None, a_scale_S=None, BLOCK_I=64, num_warps=8):
    """Returns dh, dh transposed (fp8 only), a, dscore."""
    S, I = da_SI.shape
    device = da_SI.device
    fp8 = dh_scale_S is not None
    dtype = torch.float8_e4m3fn if fp8 else da_SI.dtype
    dh = torch.empty(S, 2, I, dtype=dtype, device=device)
    dh_t = torch.empty(S // TILE, 2 * I, TILE, dtype=dtype, device=device) if fp8 else None
    a = torch.empty((S // TILE, I, TILE) if fp8 else (S, I), dtype=dtype, device=device)
    tiles = triton.cdiv(I, BLOCK_I)
    dscore = torch.empty(tiles, S, dtype=torch.float32, device=device)
    swiglu_passes.swiglu_backward_kernel[(tiles, S // TILE)](
        da_SI, h_S2I, h_scale, layout.score_S, dh_scale_S, a_scale_S, layout.ends_E, dh, dh_t, a, dscore,
        layout.ends_E.numel(), S, I,
        FP8=fp8, SAVED_MX=h_scale is not None, ROWS=TILE, BLOCK_I=BLOCK_I, num_warps=num_warps,
    )  # fmt: skip
    return dh, dh_t, a, dscore.sum(0)
