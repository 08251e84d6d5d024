"""The error every user-facing failure derives from.

Its message is one full sentence or a few: what was wrong, where (file, line or record), what to do next.
The command line prints it without a traceback.
"""

from __future__ import annotations


class GenoMoEError(ValueError):
    """Something the user gave can't be used; the message says what, where and what to do."""


class InputError(GenoMoEError):
    """A sequence, variant or annotation file breaks a rule; the message starts with ``file:line:``."""


class IntegrityError(GenoMoEError):
    """A file, store or checkpoint isn't what its recorded hash, size or version says."""
