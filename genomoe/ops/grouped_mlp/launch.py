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
    num_stages: int = 3

    def launch_options(self, device: torch.device, per_processor: int = 1) -> tuple[tuple[int], dict]:
        """Grid and keyword arguments of a persistent launch."""
        programs = processor_count(device) * per_processor
        options = {name: getattr(self, name) for name in ("BM", "BN", "BK", "GROUP_M", "FLATTEN")}
        return (programs,), {
            **options, "PROGRAMS": programs, "num_warps": self.num_warps, "num_stages": self.num_stages
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
    """e4m3 [D, S]: rows of ``x`` in slot order, times ``factor``, transposed."""
    D = x_TD.shape[1]
    out = torch.empty(D, layout.slots, dtype=torch.float8_e4m3fn, device=x_TD.device)
    passes.gather_transposed_kernel[(layout.slots // TILE, triton.cdiv(D, 128))](
        x_TD, layout.token_S, factor_S, layout.ends_E, out, layout.ends_E.numel(), layout.slots, D,
        BS=TILE, BD=128, num_warps=8,
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
