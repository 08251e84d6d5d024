"""The folder of one run: what lies where, whether it is new, interrupted or finished, and its provenance."""

import dataclasses
import json
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from genomoe import __version__
from genomoe.files import write_text
from genomoe.provenance import cpu_name, git_commit, memory_gib, usable_cores, versions
from genomoe.training.checkpoint import list_checkpoints
from genomoe.training.options import ConfigError

RESUME_CHOICES = ("auto", "always", "never")
# Settings that change where and how a run computes, but not what.
_FREE_KEYS = ("resume", "overwrite", "evaluate", "paths", "logger", "callbacks", "name", "data.num_workers", "parallel")


@dataclasses.dataclass(frozen=True)
class RunDirectory:
    """Paths inside a run directory; nothing is created until something is written."""

    path: Path

    @property
    def config_file(self) -> Path:
        """The resolved configuration, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One row a logged step."""
        return self.path / "metrics.csv"

    @property
    def checkpoints(self) -> Path:
        """Training state, for resuming."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The trained model: config.json, model.safetensors, tokenizer.json, README.md."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """Evaluation results and plots."""
        return self.path / "report"

    @property
    def finished(self) -> bool:
        """Whether the model was written, which is the last thing a run does."""
        return (self.model / "config.json").exists()

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """(step, path) of the newest checkpoint, if there is one."""
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None

    def load_config(self) -> DictConfig:
        """The configuration the run was started with; raises FileNotFoundError if this is no run directory."""
        if not self.config_file.exists():
            raise FileNotFoundError(
                f"{self.path} is not a run directory: it holds no config.yaml; give the folder that "
                "`genomoe pretrain` wrote."
            )
        try:
            config = OmegaConf.load(self.config_file)
        except yaml.YAMLError as error:
            raise ConfigError(f"{self.config_file} is not valid YAML: {' '.join(str(error).split())}.") from None
        if not isinstance(config, DictConfig):
            raise ConfigError(f"{self.config_file} does not hold a mapping.")
        return config


def open_run(config: DictConfig) -> tuple[RunDirectory, Path | None]:
    """Decide whether `config` starts or continues the run at `paths.run_dir`; returns it and a checkpoint.

    `resume=auto` continues an interrupted run of the same settings, `always` also a finished or changed one,
    `never` does not. What would replace a finished run or mix two raises ConfigError, unless `overwrite=true`.
    """
    if config.resume not in RESUME_CHOICES:
        raise ConfigError(f"resume={config.resume} is not allowed: it must be one of {', '.join(RESUME_CHOICES)}.")
    run = RunDirectory(Path(config.paths.run_dir))
    if run.path.exists() and not run.path.is_dir():
        raise ConfigError(f"paths.run_dir={run.path} is a file, not a folder.")
    if config.overwrite:
        if is_main_process():
            _clear(run)
        return run, None
    last = run.last_checkpoint()
    if config.resume == "always":
        if last is None:
            raise ConfigError(f"resume=always, but {run.path} holds no checkpoint to resume from.")
        return run, last[1]
    way_out = "give another paths.run_dir, or overwrite=true to replace it"
    if run.finished:
        raise ConfigError(f"{run.path} already holds a finished run; {way_out}, or resume=always to train on.")
    if last is None:
        return run, None
    if config.resume == "never":
        raise ConfigError(f"{run.path} holds an interrupted run and resume=never; {way_out}.")
    changed = _differences(run.load_config(), config)
    if changed:
        raise ConfigError(
            f"{run.path} holds an interrupted run with other settings ({', '.join(changed[:5])}); {way_out}, or "
            "resume=always to go on with the new ones."
        )
    return run, last[1]


def is_main_process() -> bool:
    """Whether this is the one process of a run that writes files (before the process group exists, too)."""
    return int(getattr(rank_zero_only, "rank", None) or 0) == 0


def write_provenance(run: RunDirectory, config: DictConfig) -> None:
    """Write config.yaml and environment.json, in the main process only."""
    if not is_main_process():
        return
    write_text(run.config_file, OmegaConf.to_yaml(config, resolve=True))
    write_text(run.path / "environment.json", json.dumps(environment(), indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, hardware, commit and command line, for reports."""
    packages = (
        "torch",
        "lightning",
        "hydra-core",
        "numpy",
        "zarr",
        "triton",
        "transformer-engine",
        "flash-attn-4",
        "transformers",
    )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "genomoe": __version__,
        "commit": git_commit(),
        "python": platform.python_version(),
        "packages": versions(packages),
        "hardware": hardware(),
    }


def hardware() -> dict[str, Any]:
    """CPU, cores this process may use, memory and GPUs."""
    facts: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": memory_gib(),
        "gpus": [],
    }
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            facts["gpus"].append(
                {
                    "name": gpu.name,
                    "capability": f"{gpu.major}.{gpu.minor}",
                    "memory_gib": round(gpu.total_memory / 2**30, 1),
                }
            )
    return facts


def _clear(run: RunDirectory) -> None:
    """Remove what an earlier run wrote, and nothing else that may lie there."""
    for _, checkpoint in list_checkpoints(run.checkpoints):
        checkpoint.unlink()
    for file in (run.metrics_file, *run.model.glob("*"), *run.report.glob("*")):
        if file.is_file():
            file.unlink()


def _differences(old: DictConfig, new: DictConfig) -> list[str]:
    """Dotted keys whose values differ and that change what a run computes."""
    flat_old, flat_new = (dict(_flatten(OmegaConf.to_container(c, resolve=True))) for c in (old, new))
    return sorted(
        key
        for key in flat_old.keys() | flat_new.keys()
        if flat_old.get(key) != flat_new.get(key)
        and not any(key == free or key.startswith(f"{free}.") for free in _FREE_KEYS)
    )


def _flatten(value: Any, prefix: str = "") -> Any:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
