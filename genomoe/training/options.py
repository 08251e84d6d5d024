"""The base of every configuration dataclass: built from a mapping, with readable complaints."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Self

from genomoe.genome.errors import GenoMoEError


class ConfigError(GenoMoEError):
    """A configuration that cannot be used; the message names the key, its value and what is allowed."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`; did you mean X?` when a choice resembles `word`, else the empty string."""
    choices = list(choices)
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if not close:  # a key given without its group: `max_steps` for `trainer.max_steps`
        tail = {choice.rsplit(".", 1)[-1]: choice for choice in reversed(choices)}
        close = [tail[name] for name in difflib.get_close_matches(word.rsplit(".", 1)[-1], tail, n=1)]
    return f"; did you mean {close[0]}?" if close else ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A frozen group of settings that checks itself in `__post_init__`."""

    @classmethod
    def from_config(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """Build from the mapping of config group `where` ("": the root); an unknown key raises `ConfigError`."""
        prefix = f"{where}." if where else ""
        known = {field.name for field in dataclasses.fields(cls)}
        for key in values:
            if key not in known:
                raise ConfigError(f"{prefix}{key} is not a setting of {cls.__name__}{nearest(str(key), known) or '.'}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error}") from None

    def require(self, condition: bool, key: str, allowed: str) -> None:
        """Raise `ConfigError` naming `key`, its value and what is `allowed`, unless `condition`."""
        if not condition:
            raise ConfigError(f"{key}={getattr(self, key)} is not allowed: it must be {allowed}.")

    def require_count(self, key: str, *, minimum: int = 1, optional: bool = False) -> None:
        """Field `key` is a whole number of at least `minimum` (or None, if `optional`)."""
        value = getattr(self, key)
        if optional and value is None:
            return
        whole = isinstance(value, int) and not isinstance(value, bool)
        also = " or null" if optional else ""
        self.require(whole and value >= minimum, key, f"a whole number of at least {minimum}{also}")

    def require_number(self, key: str, *, minimum: float = 0.0, maximum: float | None = None) -> None:
        """Field `key` is a finite number within [minimum, maximum]."""
        value = getattr(self, key)
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        ok = ok and minimum <= value < float("inf") and (maximum is None or value <= maximum)
        allowed = f"between {minimum:g} and {maximum:g}" if maximum is not None else f"at least {minimum:g}"
        self.require(ok, key, f"a number {allowed}")

    def require_choice(self, key: str, choices: tuple[str, ...]) -> None:
        """Field `key` is one of `choices`."""
        self.require(getattr(self, key) in choices, key, f"one of {', '.join(choices)}")
