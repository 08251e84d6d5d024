"""Packages that are faster where they are installed and fit."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata


def package_unusable(package: str, extra: str, load: Callable[[], object]) -> str | None:
    """Why `package`, which our extra of that name installs, cannot be used, or None.

    Args:
        load: imports what is needed of it.
    """
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"{package} is not installed (pip install 'genomoe[{extra}]')"
    try:
        load()
    except Exception as error:  # whatever an installation that does not fit the others raises, a model must run
        return f"{package} {version} does not load ({type(error).__name__}: {error})"
    return None
