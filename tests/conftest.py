"""Without a GPU, Triton kernels run in its interpreter, rounding as a GPU does (`interpreter.py`).

The switch is read when Triton is first imported.

Examples of hypothesis have no deadline: test processes share the machine, so time says nothing about the code. Several
(-n) compute on one thread each, and what they start, too: threads that wait for a core make training ten times slower.
"""

from __future__ import annotations

import importlib.util
import os

import hypothesis

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is first imported

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        import interpreter

        interpreter.install()

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
