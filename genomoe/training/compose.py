"""Hydra's compose API in struct mode, with errors that name the key and its nearest neighbour.

Only `compose_config` touches Hydra's global state, and it leaves it as it was; `sys.argv` is never read.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from genomoe.training.options import ConfigError, nearest

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"


def compose_config(name: str, overrides: Sequence[str] = (), *, rename: Mapping[str, str] | None = None) -> DictConfig:
    """Compose `genomoe/configs/NAME.yaml` with Hydra `overrides`, resolved and in struct mode.

    rename: keys that the command line spells otherwise than the config, for example `{"model": "pretrained"}`
    where a config has a plain key and Hydra would take the word for the group `model/`.

    Raises ConfigError: an unknown key or choice (naming the nearest), a value of the wrong type, bad syntax.
    """
    overrides = [_renamed(text, rename or {}) for text in overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_DIR)):
        parsed = [_parse(text) for text in overrides]
        groups = [override for override in parsed if _is_group(override)]
        for override in groups:
            _check_choice(override)
        # Values are checked against the same configuration without them: its keys and its types.
        before = _compose(name, [text for text, override in zip(overrides, parsed, strict=True) if override in groups])
        for override in parsed:
            top = override.key_or_group.split(".")[0]
            if override not in groups and (not (override.is_add() or override.is_delete()) or top not in before):
                _check_value(override, before)
        config = _compose(name, overrides)
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        spelling = {new: old for old, new in (rename or {}).items()}
        key = spelling.get(missing[0], missing[0])
        raise ConfigError(f"{key} must be given: add {key}=VALUE to the command.")
    OmegaConf.set_struct(config, True)
    return config


def choices(group: str) -> list[str]:
    """The names of the files in config group `group`."""
    return sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))


def _renamed(text: str, rename: Mapping[str, str]) -> str:
    key, equals, value = text.partition("=")
    return f"{rename.get(key, key)}{equals}{value}"


def _compose(name: str, overrides: list[str]) -> DictConfig:
    try:
        config = compose(name, overrides=overrides)
        OmegaConf.resolve(config)
        return config
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot compose the configuration: {_first_line(error)}") from error


def _parse(text: str) -> Override:
    if "=" not in text and not text.startswith("~"):
        raise ConfigError(f"'{text}' is not an override: write KEY=VALUE, for example trainer.max_steps=20.")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(
            f"cannot read the override '{text}': {_first_line(error)}; quote a value that holds spaces, "
            "commas or brackets, as in 'key=\"a, b\"'."
        ) from error


def _is_group(override: Override) -> bool:
    return (CONFIG_DIR / override.key_or_group).is_dir()


def _check_choice(override: Override) -> None:
    group, value = override.key_or_group, override.value()
    options = choices(group)
    for choice in value if isinstance(value, list) else [value]:
        if choice is not None and str(choice) not in options:
            hint = nearest(str(choice), options) or "."
            raise ConfigError(f"{group}={choice}: there is no such choice{hint} The choices are {', '.join(options)}.")


def _check_value(override: Override, config: DictConfig) -> None:
    key = override.key_or_group
    keys = list(_dotted_keys(config))
    if key not in keys:
        hint = nearest(key, [*keys, *(group.name for group in CONFIG_DIR.iterdir() if group.is_dir())])
        raise ConfigError(f"the configuration has no key {key}{hint or '; --show-config prints all keys.'}")
    now, value = OmegaConf.select(config, key), override.value()
    kinds: list[tuple[type | tuple[type, ...], tuple[type, ...], str]] = [
        (bool, (bool,), "true or false"),
        (int, (int,), "a whole number"),
        (float, (int, float), "a number"),
    ]
    for kind, allowed, words in kinds:
        if isinstance(now, kind):
            wrong = not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool))
            if wrong and value is not None:
                raise ConfigError(f"{key}={value}: expected {words} (the default is {now}).")
            return


def _dotted_keys(config: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(config, DictConfig):
        for key in config:
            name = prefix + str(key)
            yield name
            yield from _dotted_keys(config._get_node(key), f"{name}.")


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
