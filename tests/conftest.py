"""Without a GPU, Triton kernels run in its interpreter, rounding as a GPU does (`interpreter.py`).

The switch is read when Triton is first imported.

Examples of hypothesis have no deadline: test processes share the machine, so time says nothing about the code.
"""

from __future__ import annotations

import importlib.util
import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        import interpreter

        interpreter.install()

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
