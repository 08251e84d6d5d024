"""The envelope of every measured result: hardware, versions, commit and date around flat rows, written atomically."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "zarr",
    "lightning",
    "transformers",
    "transformer-engine",
    "pyfaidx",
    "pysam",
    "biopython",
)


def envelope(packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """What a figure needs beside it: {"hardware", "versions", "commit", "date"}, JSON-ready.

    Packages that aren't installed are left out.
    """
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "hardware": _hardware(),
        "versions": versions,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write_result(path: str | os.PathLike[str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write ``{**envelope(), "rows": rows}`` to `path` as JSON and return it; the file appears whole or not at all."""
    result = {**envelope(), "rows": list(rows)}
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return result


def _hardware() -> dict[str, Any]:
    hardware: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "platform": platform.platform(),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        hardware["gpu"] = torch.cuda.get_device_name()
        hardware["gpus"] = torch.cuda.device_count()
        hardware["gpu_memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
    return hardware


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):
        return None


def _commit() -> str | None:
    """The commit of the checkout this module runs from, '-dirty' with uncommitted changes.

    Where git cannot tell (a copy of the tree), what the environment variable GENOMOE_COMMIT says.
    """
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        # a checkout that another user owns is read all the same: nothing of it is run
        command = ["git", "-c", f"safe.directory={root}", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        if not (root / ".git").exists():
            return os.environ.get("GENOMOE_COMMIT")
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", "genomoe")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("GENOMOE_COMMIT")
