"""Timing of several ways to do the same in turn, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from genomoe.bench.device import synchronize

__all__ = ["in_short", "interleaved"]


def interleaved(
    runs: Mapping[str, Callable[[], np.ndarray]], repeats: int, device: str, deadline: float
) -> tuple[dict[str, float], dict[str, np.ndarray], dict[str, str]]:
    """Least seconds and the scores of each run, or why there are none; every run once to warm up, then in turn."""
    seconds: dict[str, float] = {}
    scores: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name in errors or (time.monotonic() > deadline and name in seconds):
                continue
            if time.monotonic() > deadline:
                errors[name] = "not run: the time budget was spent"
                continue
            try:
                synchronize(device)
                start = clock()
                scores[name] = run()
                synchronize(device)
                elapsed = clock() - start
            except (RuntimeError, ValueError) as error:
                errors[name] = in_short(error)
                continue
            if turn:
                seconds[name] = min(elapsed, seconds.get(name, elapsed))
    for name in runs:
        if name not in seconds and name not in errors:
            errors[name] = "not run: the time budget was spent"
    return seconds, scores, errors


def in_short(error: Exception) -> str:
    """An error's kind and the beginning of what it says."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
