"""Compiles our epilogues of QuACK's products for Hopper; no GPU need be here."""

from __future__ import annotations

import os

os.environ |= {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}

from cutlass.base_dsl.compiler import Compiler

from genomoe.ops.grouped_mlp import products_quack, products_quack_fp8
from genomoe.ops.grouped_mlp.launch_quack import compiled_product

Compiler._check_cuda_dependencies_once = lambda self, libraries: None  # it asks for a driver before it compiles

bf16 = {"gated": True, "e4m3": False}
e4m3 = {"e4m3": True, "gather": False}
for tile, options in (
    (products_quack.UP, {**bf16, "keep": True, "gather": False}),
    (products_quack.UP_ALONE, {**bf16, "keep": False, "gather": False}),
    (products_quack.WIDE, {**bf16, "keep": True, "gather": True}),
    (products_quack.WIDE, {**bf16, "keep": False, "gather": True}),
    (products_quack_fp8.UP_ALONE, {**e4m3, "gated": True, "keep": False}),
    (products_quack_fp8.DOWN, {**e4m3, "gated": False, "keep": True}),
):
    assert callable(compiled_product(tile, **options))
    print("compiled", tile, options)
