"""MXFP8 as the OCP format says: against a slow reading of the specification, torchao, and the Triton passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from genomoe.ops.mxfp8 import BLOCK, NAN_SCALE, dequantize_mxfp8, quantize_mxfp8, round_mxfp8

ROUNDINGS = ("floor", "ceil")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BLOCKS = hnp.arrays(np.float32, (3, BLOCK), elements=FLOATS)
BELOW_OVERFLOW = hnp.arrays(np.float32, (3, BLOCK), elements=st.floats(-(2.0**126), 2.0**126, width=32))


def e4m3_values() -> np.ndarray:
    """All finite non-negative e4m3 values, from the definition: 1-4-3 bits, bias 7, no infinity, 0x7F is NaN."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append(2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))
    return np.array(values)


def slow_quantize(block: np.ndarray, rounding: str) -> tuple[np.ndarray, int]:
    """One block by the specification's words: elements as float64 and the biased scale."""
    largest = float(np.abs(block).max())
    if largest == 0:
        return np.zeros(BLOCK), 0
    exponent = math.floor(math.log2(largest)) if largest >= 2.0**-126 else -127
    exponent -= 8
    if rounding == "ceil" and largest > 448 * 2.0**exponent and exponent > -135:
        exponent += 1
    exponent = max(exponent, -127)
    table = e4m3_values()
    out = np.empty(BLOCK)
    for i, value in enumerate(np.abs(block.astype(np.float64)) / 2.0**exponent):
        distance = np.abs(table - min(value, 448.0))
        nearest = np.flatnonzero(distance == distance.min())
        even = [code for code in nearest if code % 2 == 0] or list(nearest)
        out[i] = table[even[0]] * np.sign(block[i])
    return out, exponent + 127


@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(max_examples=60, deadline=None)
@given(blocks=BLOCKS)
def test_equals_the_specification_read_slowly(rounding: str, blocks: np.ndarray) -> None:
    got = quantize_mxfp8(torch.from_numpy(blocks), rounding=rounding)
    for row, block in enumerate(blocks):
        elements, scale = slow_quantize(block, rounding)
        assert got.scales[row, 0].item() == scale
        np.testing.assert_array_equal(got.elements[row].float().numpy(), elements)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_equals_torchao(rounding: str) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    mode = {"floor": mx.ScaleCalculationMode.FLOOR, "ceil": mx.ScaleCalculationMode.RCEIL}[rounding]
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 64)[:, None]
    scales, elements = mx.to_mx(x, torch.float8_e4m3fn, BLOCK, mode)
    got = quantize_mxfp8(x, rounding=rounding)
    assert torch.equal(got.scales, scales.view(torch.uint8))
    assert torch.equal(got.elements.view(torch.uint8), elements.view(torch.uint8))


def awkward(rows: int = 37, columns: int = 288) -> torch.Tensor:
    """bfloat16 over 40 binades with zeros, subnormals, a NaN and an infinity."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, columns, generator=generator) * torch.exp(6 * torch.randn(rows, columns, generator=generator))
    x[3, 5], x[4, 40], x[7] = torch.nan, torch.inf, 0
    x[8] *= 1e-38
    return x.bfloat16().to(DEVICE)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_triton_equals_pytorch_bit_for_bit(rounding: str) -> None:
    launch = pytest.importorskip("genomoe.ops.grouped_mlp.launch")
    x = awkward()
    for got, source in (
        (launch.quantize_mx(x, rounding=rounding), x),
        (launch.quantize_mx(x[:32].contiguous(), transposed=True, rounding=rounding), x[:32].t().contiguous()),
    ):
        want = quantize_mxfp8(source, rounding=rounding)
        assert torch.equal(got.scales, want.scales)
        assert torch.equal(got.elements.view(torch.uint8), want.elements.view(torch.uint8))
        back, expected = launch.dequantize_mx(got), dequantize_mxfp8(want)
        torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


def test_a_block_with_a_nan_or_an_infinity_comes_back_as_nan() -> None:
    x = torch.ones(3, 2 * BLOCK)
    x[0, 3], x[1, 40] = torch.nan, -torch.inf
    q = quantize_mxfp8(x)
    assert q.scales[0, 0] == q.scales[1, 1] == NAN_SCALE
    back = dequantize_mxfp8(q, torch.float32)
    assert back[0, :BLOCK].isnan().all()
    assert back[1, BLOCK:].isnan().all()
    assert torch.equal(back[2], x[2])
    assert torch.equal(back[0, BLOCK:], x[0, BLOCK:])


@settings(max_examples=40, deadline=None)
@given(blocks=BLOCKS)
def test_bfloat16_holds_every_dequantised_value_exactly(blocks: np.ndarray) -> None:
    q = quantize_mxfp8(torch.from_numpy(blocks))
    exact = dequantize_mxfp8(q, torch.float64)
    kept = exact.abs() >= 2.0**-133
    assert torch.equal(dequantize_mxfp8(q).double()[kept], exact[kept])


@settings(max_examples=40, deadline=None)
@given(blocks=BELOW_OVERFLOW)
def test_rounding_twice_changes_nothing_and_the_error_is_bounded(blocks: np.ndarray) -> None:
    x = torch.from_numpy(blocks)
    once = round_mxfp8(x)
    assert torch.equal(round_mxfp8(once), once)
    bound = x.double().abs() / 16 + x.double().abs().amax(-1, keepdim=True) * 2.0**-17 + 2.0**-135
    assert ((once.double() - x.double()).abs() <= bound).all()


def test_a_dimension_that_is_no_multiple_of_32_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_mxfp8(torch.zeros(2, 48))
