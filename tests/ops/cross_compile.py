"""Compiles the grouped products for GPUs that need not be here and prints their matrix instructions as JSON."""

from __future__ import annotations

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from genomoe.ops.grouped_mlp.kernels.products import (
    product_kernel,
    weight_gradient_bf16_kernel,
    weight_gradient_kernel,
)

BM, BN, BK = 128, 128, 128


def block(dtype: str, *shape: int) -> str:
    return f"tensordesc<{dtype}{list(shape)}>"


def compile_for(kernel, capability: int, signature: dict[str, str], constants: dict[str, object]) -> str:
    """PTX of the kernel, sizes a multiple of 16 as the layers' are."""
    constants = {"BM": BM, "BN": BN, "BK": BK, "GROUP_M": 8, "PROGRAMS": 132, **constants}
    names = kernel.arg_names
    ordered = {n: "constexpr" if n in constants else signature[n] for n in names}
    aligned = [n for n in names if signature.get(n, "").startswith("*") or n in ("slots", "M", "N", "K")]
    source = ASTSource(
        fn=kernel,
        signature=ordered,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": 8, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


def main() -> None:
    common = {"ends_E": "*i32", "num_experts": "i32", "N": "i32"}
    product = {
        **common, "a_desc": block("fp8e4nv", BM, BK), "w_desc": block("fp8e4nv", 1, BN, BK), "tile_expert_M": "*i32",
        "out_desc": block("bf16", BM, BN), "largest_NS": "*fp32", "slots": "i32", "K": "i32",
    }  # fmt: skip
    gradient = {**common, "out_desc": block("bf16", 1, BM, BN), "slots": "i32", "M": "i32"}
    tiled = {"left_desc": block("fp8e4nv", 1, BM, BK), "right_desc": block("fp8e4nv", 1, BN, BK)}
    flat = {"left_desc": block("fp8e4nv", BM, BK), "right_desc": block("fp8e4nv", BN, BK)}
    float_scales, byte_scales = {"a_scale": "*fp32", "w_scale": "*fp32"}, {"a_scale": "*u8", "w_scale": "*u8"}
    unit = {"unit_E": "*fp32"}, {"MX": False, "left_scale": None, "right_scale": None}
    bytes_ = {"left_scale": "*u8", "right_scale": "*u8"}, {"MX": True, "unit_E": None}
    bf16 = {"a_desc": block("bf16", BM, 64), "w_desc": block("bf16", 1, 64, BN)}
    rows = {"left_desc": block("bf16", 64, BM), "right_desc": block("bf16", 64, BN)}
    made = {
        "product bf16 sm_90": compile_for(
            product_kernel,
            90,
            {**product, **bf16},
            {"MX": False, "KN": True, "BK": 64, "a_scale": None, "w_scale": None, "largest_NS": None},
        ),
        "product e4m3 sm_90": compile_for(product_kernel, 90, {**product, **float_scales}, {"MX": False, "KN": False}),
        "product MXFP8 sm_100": compile_for(
            product_kernel, 100, {**product, **byte_scales}, {"MX": True, "KN": False, "largest_NS": None}
        ),
        "gradient bf16 sm_90": compile_for(weight_gradient_bf16_kernel, 90, {**gradient, **rows}, {"BK": 64}),
        "gradient e4m3 sm_90": compile_for(weight_gradient_kernel, 90, {**gradient, **tiled, **unit[0]}, unit[1]),
        "gradient MXFP8 sm_100": compile_for(weight_gradient_kernel, 100, {**gradient, **flat, **bytes_[0]}, bytes_[1]),
    }
    json.dump(
        {name: sorted(set(re.findall(r"(?:wgmma|tcgen05)\.mma\S*", ptx))) for name, ptx in made.items()}, sys.stdout
    )


if __name__ == "__main__":
    main()
