"""MXFP8: blocks of 32 consecutive values share one power-of-two scale; elements are e4m3.

Format: OCP Microscaling Formats (MX) Specification v1.0, section 5 (MXFP8 with E4M3 elements, E8M0 scales).

* **Scale.** ``scale = 2**(byte - 127)``. ``rounding="ceil"``, the default, takes the smallest power of two for which
  nothing saturates (as NVIDIA's conversion instructions and Transformer Engine do). ``rounding="floor"`` is the
  conversion of the specification's section 6.3: the exponent of the block's largest magnitude less 8, e4m3's largest
  exponent. Magnitudes between 448 and 512 times the scale then saturate, which costs a fifth more error in a product.
* **Elements.** Divided by the scale, clamped to +-448, rounded to nearest, ties to even; small values become e4m3
  subnormals (multiples of 2**-9) or zero.
* **Specials.** A block that holds a NaN or an infinity gets the scale byte 255, which the format defines as NaN: the
  whole block comes back as NaN rather than as a plausible number. A block of zeros gets the smallest scale, 2**-127.

Dequantising to bfloat16 is exact: a 4-bit significand times a power of two. Only results below bfloat16's smallest
subnormal, 2**-133, are lost.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Float8e4m3fn, UInt8
from torch import Tensor

BLOCK = 32
E4M3_MAX = 448.0
NAN_SCALE = 255
_INFINITY_BITS = 0x7F800000  # also the mask of a float32's exponent field
_MANTISSA_OF_E4M3_MAX = 0x600000  # 448 = 1.75 * 2**8

Rounding = Literal["floor", "ceil"]


class MXFP8(NamedTuple):
    """Elements and scales of a tensor quantised along its last dimension."""

    elements: Float8e4m3fn[Tensor, "... N"]
    scales: UInt8[Tensor, "... N/32"]

    @property
    def nbytes(self) -> int:
        return self.elements.nbytes + self.scales.nbytes


def quantize_mxfp8(x: Float[Tensor, "... N"], *, rounding: Rounding = "ceil") -> MXFP8:
    """Quantise along the last dimension.

    Raises:
        ValueError: N is not a multiple of 32.
    """
    if x.shape[-1] % BLOCK:
        raise ValueError(f"MXFP8 needs a last dimension that is a multiple of {BLOCK}, but it is {x.shape[-1]}.")
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(-1)
    exponent = largest >> 23
    if rounding == "ceil":
        exponent = exponent + ((largest & 0x7FFFFF) > _MANTISSA_OF_E4M3_MAX).int()
    exponent = (exponent - 8).clamp(min=0)
    special = largest >= _INFINITY_BITS
    reciprocal = ((254 - exponent) << 23).view(torch.float32)
    elements = (blocks * reciprocal[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    elements = torch.where(special[..., None], 0.0, elements).to(torch.float8_e4m3fn).flatten(-2)
    return MXFP8(elements, torch.where(special, NAN_SCALE, exponent).to(torch.uint8))


def dequantize_mxfp8(quantized: MXFP8, dtype: torch.dtype = torch.bfloat16) -> Float[Tensor, "... N"]:
    """Exact inverse: elements times scales, in ``dtype``."""
    exponent = quantized.scales.int()
    # 2**-127 is a float32 subnormal: 1 << 22. Every other scale is a bare exponent field; byte 255 is NaN.
    scale = torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)
    scale = torch.where(exponent == NAN_SCALE, torch.nan, scale)
    blocks = quantized.elements.float().unflatten(-1, (-1, BLOCK))
    return (blocks * scale[..., None]).flatten(-2).to(dtype)


def round_mxfp8(x: Float[Tensor, ...], dim: int = -1, *, rounding: Rounding = "ceil") -> Float[Tensor, ...]:
    """The values ``x`` has after a trip through MXFP8 along ``dim``, in ``x``'s own dtype."""
    moved = x.movedim(dim, -1).contiguous()
    return dequantize_mxfp8(quantize_mxfp8(moved, rounding=rounding), x.dtype).movedim(-1, dim)
