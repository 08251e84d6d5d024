"""Without a GPU: the grouped products really become Hopper's and Blackwell's matrix instructions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def instructions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Matrix instructions in the PTX of each kernel; compiled in a process of its own, outside the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "PYTHONPATH": os.getcwd()}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("cross_compile.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("kernel", ["product e4m3 sm_90", "gradient e4m3 sm_90"])
def test_e4m3_products_are_wgmma_on_hopper(instructions: dict[str, list[str]], kernel: str) -> None:
    assert any("wgmma.mma_async" in name and "e4m3.e4m3" in name for name in instructions[kernel]), instructions[kernel]


@pytest.mark.parametrize("kernel", ["product bf16 sm_90", "gradient bf16 sm_90"])
def test_bf16_products_are_wgmma_on_hopper(instructions: dict[str, list[str]], kernel: str) -> None:
    assert any("wgmma.mma_async" in name and "bf16.bf16" in name for name in instructions[kernel]), instructions[kernel]


@pytest.mark.parametrize("kernel", ["product MXFP8 sm_100", "gradient MXFP8 sm_100"])
def test_mxfp8_products_are_block_scaled_on_blackwell(instructions: dict[str, list[str]], kernel: str) -> None:
    assert any("mxf8f6f4" in name and "block_scale" in name for name in instructions[kernel]), instructions[kernel]
