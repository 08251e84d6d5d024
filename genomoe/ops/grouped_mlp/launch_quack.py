"""Launching QuACK's grouped products (quack-kernels, CuTe DSL): optional, for Hopper, imported on first use.

Unlike Triton's, their epilogues run under the next tile's product, so SwiGLU and its gradient cost little there; and
their rows can be gathered as they are loaded. On an H200 at its power limit, milliseconds in bfloat16 (every kernel
alone for 0.1 s with its best tile and QuACK's own epilogues, commit eaa1655), gathered / copied into place without the
copy / Triton with its passes:

| | genos-1.2b | olmoe | fine-64x8 |
|---|---|---|---|
| gate and up, SwiGLU | 3.89 / 3.56 / 4.11 | 3.94 / 3.48 / 3.69 | 2.08 / 1.93 / 2.14 |
| down | - / 1.67 / 1.73 | - / 1.73 / 1.80 | - / 0.99 / 1.02 |
| gradient of SwiGLU | 3.03 / 2.88 / 3.14 | 2.44 / 2.25 / 2.40 | 1.57 / 1.54 / 1.63 |
| dw_down | 1.77 / 1.61 / 1.56 | 1.80 / 1.73 / 1.78 | 0.92 / 0.87 / 0.96 |
| dw_up | 3.38 / 3.20 / 3.31 | 3.67 / 3.35 / 3.34 | 1.88 / 1.72 / 1.70 |
| dx | - / 3.24 / 3.30 | - / 3.42 / 3.44 | - / 1.79 / 1.84 |
| the copy of x or dy | 0.11 | 0.34 | 0.33 |

Kernels are compiled at their first call, in 2 to 4 s each.

Axes: T tokens, S slots, D model, I expert width, E experts, N and K a product's columns and contraction. Gate and up
lie side by side here: [S, I, 2].
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int32
from torch import Tensor

from ..optional import package_unusable

if TYPE_CHECKING:  # it imports Triton, and whether this path can run is asked where there is none
    from .layout import ExpertLayout


class Tile(NamedTuple):
    """Rows and columns of a tile; whether two groups of warps take turns at product and epilogue; and the rows and
    columns of tiles whose blocks share what they load."""

    rows: int
    columns: int
    pingpong: bool = False
    cluster: tuple[int, int] = (2, 1)


@functools.cache
def quack_missing() -> str | None:
    """Why QuACK's products cannot run here, or None."""
    if not torch.cuda.is_available():
        return "quack needs an NVIDIA GPU"
    if torch.cuda.get_device_capability()[0] != 9:
        return "QuACK's products are used on Hopper (compute capability 9.0), where they were measured"
    return package_unusable("quack-kernels", "quack", _load)


def _load() -> None:
    from quack import gemm, gemm_dact  # noqa: F401

    from .kernels import products_cute  # noqa: F401


def gated_product(
    x_XD: Float[Tensor, "X D"],
    w_up_E2ID: Float[Tensor, "E I2 D"],
    layout: ExpertLayout,
    tile: Tile,
    *,
    row_scale_S: Float32[Tensor, " S"] | None = None,
    gather: bool = False,
    keep: bool,
) -> tuple[Float[Tensor, "S I"], Float[Tensor, "S I 2"] | None]:
    """silu(gate) up score in bfloat16, and, to keep, gate and up.

    Args:
        x_XD: bfloat16 or, as the weight, e4m3; rows by slot, or with `gather` by token.
        row_scale_S: the factor of every row of gate and up, for operands in e4m3.
    """
    S, I = layout.slots, w_up_E2ID.shape[1] // 2
    a_SI = torch.empty(S, I, dtype=torch.bfloat16, device=x_XD.device)
    h_SI2 = torch.empty(S, I, 2, dtype=torch.bfloat16, device=x_XD.device) if keep else None
    kernel = compiled_product(tile, gated=True, e4m3=row_scale_S is not None, keep=keep, gather=gather)
    h_SH = None if h_SI2 is None else h_SI2.flatten(1)
    kernel(x_XD, w_up_E2ID, h_SH, layout, (a_SI, layout.score_S, row_scale_S))
    return a_SI, h_SI2


def scaled_product(
    a_SK: Tensor, row_scale_S: Float32[Tensor, " S"], w_ENK: Tensor, layout: ExpertLayout, tile: Tile
) -> Float[Tensor, "S N"]:
    """a @ w[expert of the row]^T times the row's factor in bfloat16; operands in e4m3."""
    out = torch.empty(layout.slots, w_ENK.shape[1], dtype=torch.bfloat16, device=a_SK.device)
    kernel = compiled_product(tile, gated=False, e4m3=True, keep=True, gather=False)
    kernel(a_SK, w_ENK, out, layout, (row_scale_S,))
    return out


@functools.cache
def compiled_product(tile: Tile, *, gated: bool, e4m3: bool, keep: bool, gather: bool) -> Callable[..., None]:
    """One of our own epilogues' kernels for any sizes: of x, w, out, the layout and what the epilogue takes.

    Products in e4m3 are scaled by row.
    """
    import cutlass
    import cutlass.cute as cute
    from quack.compile_utils import make_fake_tensor
    from quack.gemm_tvm_ffi_utils import (
        compile_gemm_kernel,
        make_fake_gemm_tensors,
        make_fake_scheduler_args,
        make_fake_varlen_args,
        make_scheduler_args,
        make_varlen_args,
    )

    from .kernels.products_cute import GatedProductSm90, ScaledProductSm90

    dtype = cutlass.Float8E4M3FN if e4m3 else cutlass.BFloat16
    a, w, d, c, rows, _, _, experts = make_fake_gemm_tensors(
        dtype, dtype, cutlass.BFloat16 if keep else None, None, "k", "k", "n", "n", varlen_m=True, gather_A=gather
    )
    factor = make_fake_tensor(cutlass.Float32, (rows,), leading_dim=0, divisibility=4)
    taken: tuple[Any, ...] = (factor,)
    if gated:
        out = make_fake_tensor(cutlass.BFloat16, (rows, cute.sym_int()), leading_dim=1, divisibility=8)
        taken = (out, factor, factor if e4m3 else None)
    product: Any = GatedProductSm90 if gated else ScaledProductSm90
    compiled = compile_gemm_kernel(
        product, dtype, (tile.rows, tile.columns), (*tile.cluster, 1), tile.pingpong,
        persistent=True, gather_A=gather, is_dynamic_persistent=False, device_capacity=(9, 0),
        mA=a, mB=w, mD=d, mC=c, epi_args=product.EpilogueArguments(*taken),
        scheduler_args=make_fake_scheduler_args(False, False, experts),
        varlen_args=make_fake_varlen_args(True, False, gather, rows),
        concat_layout=("B",) if gated else None,
    )  # fmt: skip

    def run(x: Tensor, w: Tensor, out: Tensor | None, layout: ExpertLayout, taken: tuple) -> None:
        compiled(
            x, w.permute(1, 2, 0), out, None, product.EpilogueArguments(*taken, rounding_mode=None),
            make_scheduler_args(_active_clusters(tile), 8, None),
            make_varlen_args(_starts(layout), None, _token_of_slot(layout) if gather else None), None,
        )  # fmt: skip

    return run


def gated_product_gradient(
    dy_XD: Float[Tensor, "X D"],
    w_down_EDI: Float[Tensor, "E D I"],
    h_SI2: Float[Tensor, "S I 2"],
    layout: ExpertLayout,
    tile: Tile,
    *,
    gather: bool,
) -> tuple[Float[Tensor, "S I 2"], Float[Tensor, "S I"], Float32[Tensor, " S"]]:
    """Gradient of gate and up, the activation once more, and the score's gradient; rows of dy as of `gated_product`."""
    from quack.gemm_dact import gemm_dgated

    S, I = layout.slots, w_down_EDI.shape[2]
    dh, a = torch.empty_like(h_SI2), torch.empty(S, I, dtype=h_SI2.dtype, device=h_SI2.device)
    dscore = torch.empty(S, -(-I // tile.columns), dtype=torch.float32, device=h_SI2.device)
    gemm_dgated(
        dy_XD, w_down_EDI.transpose(1, 2), dh.flatten(1), h_SI2.flatten(1), a, None, "swiglu", **_options(tile),
        colvec_scale=layout.score_S, colvec_reduce=dscore, cu_seqlens_m=_starts(layout),
        A_idx=_token_of_slot(layout) if gather else None,
    )  # fmt: skip
    return dh, a, dscore.sum(1)


def product(
    a_SK: Float[Tensor, "S K"], w_ENK: Float[Tensor, "E N K"], layout: ExpertLayout, tile: Tile, *, pairs: bool = False
) -> Float[Tensor, "S N"]:
    """a @ w[expert of the row]^T; with `pairs` the first and second half of w's K alternate, as a's columns do."""
    from quack.gemm import gemm

    out = torch.empty(layout.slots, w_ENK.shape[1], dtype=a_SK.dtype, device=a_SK.device)
    concat = ("B",) if pairs else None
    gemm(a_SK, w_ENK, out, None, None, **_options(tile), cu_seqlens_m=_starts(layout), concat_layout=concat)
    return out


def weight_gradient(
    rows_XD: Float[Tensor, "X D"],
    right_SY: Float[Tensor, "S Y"],
    layout: ExpertLayout,
    out_EDY: Float[Tensor, "E D Y"],
    tile: Tile,
    *,
    gather: bool,
    pairs: bool = False,
) -> None:
    """Per expert, rows[slots of e]^T @ right[slots of e] into `out`, of which either of the last two strides is 1.

    Args:
        gather: rows are by token, not by slot.
        pairs: the columns of right alternate between the first and second half of those of `out`.
    """
    from quack.gemm import gemm

    gemm(
        rows_XD.t(), right_SY.t(), out_EDY, None, None, **_options(tile), cu_seqlens_k=_starts(layout),
        A_idx=_token_of_slot(layout) if gather else None, concat_layout=("out",) if pairs else None,
    )  # fmt: skip


def _options(tile: Tile) -> dict[str, Any]:
    return {
        "tile_M": tile.rows, "tile_N": tile.columns, "pingpong": tile.pingpong,
        "cluster_M": tile.cluster[0], "cluster_N": tile.cluster[1],
    }  # fmt: skip


def _starts(layout: ExpertLayout) -> Int32[Tensor, " E1"]:
    """First slot of each expert's segment, and the end of the last."""
    return F.pad(layout.ends_E, (1, 0))


def _token_of_slot(layout: ExpertLayout) -> Int32[Tensor, " S"]:
    """A row to load for every slot: for padding any, since its score is 0 and no token's choice."""
    return layout.token_S.clamp(min=0)


def _active_clusters(tile: Tile) -> int:
    from quack.cute_dsl_utils import get_max_active_clusters

    return get_max_active_clusters(tile.cluster[0] * tile.cluster[1])
