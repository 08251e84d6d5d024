"""The envelope of every measured result: hardware, versions, commit and date around flat rows, written atomically."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from genomoe.files import write_text
from genomoe.provenance import cpu_name, git_commit, memory_gib, usable_cores, versions

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "zarr",
    "lightning",
    "transformers",
    "transformer-engine",
    "flash-attn-4",
    "quack-kernels",
    "sonic-moe",
    "liger-kernel",
    "pyfaidx",
    "pysam",
    "biopython",
    "isal",
)


def envelope(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """What a figure needs beside it: {"hardware", "versions", "commit", "date"}, JSON-ready.

    Packages that aren't installed are left out.
    """
    return {
        "hardware": _hardware(),
        "versions": {"python": platform.python_version(), **versions(packages)},
        "commit": git_commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_result(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write ``{**envelope(), "rows": rows}`` to `path` as JSON and return it; the file appears whole or not at all."""
    result = {**envelope(), "rows": list(rows)}
    write_text(Path(path), json.dumps(result, indent=2, allow_nan=False) + "\n")
    return result


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpus": usable_cores(),
        "memory_gib": memory_gib(),
        "platform": platform.platform(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["gpus"] = torch.cuda.device_count()
        hardware["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return hardware
