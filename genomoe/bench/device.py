"""Waiting for a device, and giving its memory back."""

from __future__ import annotations

import gc

import torch


def synchronize(device: torch.device | str) -> None:
    """Wait until a CUDA device has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device | str) -> None:
    """Give back memory that nothing refers to."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
