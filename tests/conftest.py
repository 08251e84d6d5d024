"""Without a GPU, Triton kernels run in its interpreter; the switch is read when Triton is first imported.

Examples of hypothesis have no deadline: test processes share the machine, so time says nothing about the code.
"""

from __future__ import annotations

import os

import hypothesis
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
