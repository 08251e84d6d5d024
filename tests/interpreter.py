"""Triton's interpreter with the number formats rounded as a GPU rounds them.

As of 3.9.0 it truncates float32 to bfloat16 and e4m3, and multiplies the raw bits of bfloat16 operands. The kernels are
compared with references bit by bit, so both are replaced here with ml_dtypes' conversions (round to nearest even).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_NUMPY = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8e4nv": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8e5": np.dtype(ml_dtypes.float8_e5m2),
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}


def _convert_float(data, from_type, to_type, rounding_mode):
    source, target = _NUMPY[from_type.name], _NUMPY[to_type.name]
    with np.errstate(over="ignore", invalid="ignore"):
        converted = np.ascontiguousarray(data).view(source).astype(np.float32).astype(target)
    return converted.view(np.dtype(f"uint{8 * target.itemsize}"))


def _values(handle):
    if handle.dtype.scalar.name in ("bf16", "fp8e4nv"):
        return np.ascontiguousarray(handle.data).view(_NUMPY[handle.dtype.scalar.name]).astype(np.float32)
    return handle.data


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    return interpreter.TensorHandle(np.matmul(_values(a), _values(b), dtype=np.float32) + d.data, d.dtype.scalar)


def install() -> None:
    """Idempotent; affects interpreted kernels only."""
    interpreter._convert_float = _convert_float
    interpreter.InterpreterBuilder.create_dot = _create_dot


assert {tl.float8e4nv.name, tl.bfloat16.name} <= set(_NUMPY)
