"""What ran where: the facts of machine, packages and source that stand beside every result."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count()


def memory_gib() -> float | None:
    """Main memory of the machine in GiB, where the system tells."""
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def git_commit() -> str | None:
    """Commit of the source tree this package is imported from, with `-dirty` if the package has changes.

    Where git cannot tell (an installed package, a copy of the tree), what the environment variable GENOMOE_COMMIT says.
    """
    root = Path(__file__).resolve().parents[1]

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
