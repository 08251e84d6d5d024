"""QuACK's product for Hopper (CuTe DSL) with epilogues of ours, which run under the next tile's product.

Imported only where `launch_quack.quack_missing` finds nothing missing.
"""

from typing import NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.utils import LayoutEnum
from quack.activation import swiglu, swiglu_tanh
from quack.cute_dsl_utils import mlir_namedtuple
from quack.epi_composable import ComposableEpiMixin
from quack.epi_ops import ColVecLoad, Scalar, TileStore
from quack.gemm_act import GemmGatedMixin
from quack.gemm_sm90 import GemmSm90
from quack.rounding import RoundingMode


class _ProductSm90(GemmSm90):
    def __init__(self, *arguments, **options):
        # e4m3 sums stay in the tensor cores' accumulator, as Triton's do
        super().__init__(*arguments, fp8_fast_accum=True, **options)


class ScaledProductSm90(ComposableEpiMixin, _ProductSm90):
    """a @ w^T times a factor of its row."""

    _epi_ops = (Scalar("sr_seed", dtype=Int32), ColVecLoad("mRowScale"))

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        mRowScale: cute.Tensor
        rounding_mode: cutlass.Constexpr[int] = RoundingMode.RN
        sr_seed: Optional[Int32] = None  # noqa: UP045 (as the compiler's own tuples have it)

    def epi_to_underlying_arguments(self, args, *, loc=None, ip=None):
        self.rounding_mode = args.rounding_mode
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        row_scale = epi_loop_tensors["mRowScale"]
        for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
            tRS_rD[i] = tRS_rD[i] * row_scale[i]
        return None


def _half_tile(gemm, epi_tile):
    return epi_tile[0], epi_tile[1] // 2


class GatedProductSm90(GemmGatedMixin, _ProductSm90):
    """h = a @ w^T times a factor of its row; out = silu(gate) up times the row's score. QuACK's own has neither.

    Columns come in pairs, a gate and its up: the weight's halves are interleaved as they are loaded.
    """

    _epi_ops = (
        Scalar("sr_seed", dtype=Int32),
        ColVecLoad("mRowScale"),
        ColVecLoad("mScore"),
        TileStore("mAuxOut", epi_tile_fn=_half_tile),
    )
    _extra_param_fields = ()

    @mlir_namedtuple
    class EpilogueArguments(NamedTuple):
        mAuxOut: cute.Tensor
        mScore: cute.Tensor
        mRowScale: Optional[cute.Tensor] = None  # noqa: UP045
        rounding_mode: cutlass.Constexpr[int] = RoundingMode.RN
        sr_seed: Optional[Int32] = None  # noqa: UP045

    def epi_to_underlying_arguments(self, args, *, loc=None, ip=None):
        self.rounding_mode = args.rounding_mode
        self.aux_out_dtype = args.mAuxOut.element_type
        self.aux_out_layout = LayoutEnum.from_tensor(args.mAuxOut)
        self.cta_tile_shape_aux_out_mn = _half_tile(self, self.cta_tile_shape_mnk[:2])
        return self.EpilogueParams(**self._epi_ops_to_params_dict(args))

    @cute.jit
    def epi_visit_subtile(self, params, epi_loop_tensors, tRS_rD, tRS_rC=None):
        row_scale, score = epi_loop_tensors["mRowScale"], epi_loop_tensors["mScore"]
        if const_expr(row_scale is not None):
            for i in cutlass.range(cute.size(tRS_rD), unroll_full=True):
                tRS_rD[i] = tRS_rD[i] * row_scale[i]
        # the hardware's tanh has 11 bits, which e4m3 operands do not notice
        activate = const_expr(swiglu_tanh if self.a_dtype.width == 8 else swiglu)
        out = cute.make_rmem_tensor(cute.recast_layout(2, 1, tRS_rD.layout).shape, self.acc_dtype)
        for i in cutlass.range(cute.size(out), unroll_full=True):
            out[i] = activate(tRS_rD[2 * i], tRS_rD[2 * i + 1]) * score[2 * i]
        return out
