"""Every file of every config group composes, and its values are accepted by what they configure."""

import inspect

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.utils import get_class
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from genomoe.genome.alphabet import make_tokenizer
from genomoe.training.compose import CONFIG_DIR, choices, compose_config
from genomoe.training.optim import OptimConfig
from genomoe.training.options import ConfigError
from genomoe.training.parallel import ParallelConfig
from genomoe.training.precision import PrecisionConfig
from genomoe.training.run import TrainerConfig, kernel_options, model_config

PRETRAIN_GROUPS = (
    "data",
    "model",
    "trainer",
    "optim",
    "precision",
    "activation",
    "parallel",
    "callbacks",
    "logger",
    "paths",
)
CASES = [(group, name) for group in (*PRETRAIN_GROUPS, "experiment", "debug") for name in choices(group)]


@pytest.mark.parametrize(("group", "name"), CASES, ids=[f"{group}={name}" for group, name in CASES])
def test_every_choice_composes_and_is_accepted(group: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    overrides = [f"{group}={name}"]
    overrides += {"fasta": ["data.train=some.fa"], "corpus": ["data.corpus=some.zarr"]}.get(name, [])
    config = compose_config("pretrain", overrides)
    assert OmegaConf.is_struct(config)
    TrainerConfig.from_config(config.trainer, where="trainer")
    OptimConfig.from_config(config.optim, where="optim")
    ParallelConfig.from_config(config.parallel, where="parallel")
    precision = PrecisionConfig.from_config(config.precision, where="precision")
    kernel_options(config, precision)
    model_config(config, make_tokenizer(config.data.tokenizer).vocab_size)
    for logger in config.logger.values():
        arguments = {key: value for key, value in logger.items() if key != "_target_"}
        inspect.signature(get_class(logger._target_)).bind(**arguments)


def test_no_config_group_is_left_out() -> None:
    with_files = {path.parent.name for path in CONFIG_DIR.glob("*/*.yaml")}
    assert set(PRETRAIN_GROUPS) <= with_files


def test_compose_leaves_hydra_and_argv_alone() -> None:
    compose_config("pretrain", ["trainer.max_steps=7"])
    assert not GlobalHydra.instance().is_initialized()


def test_struct_mode_refuses_unknown_keys() -> None:
    config = compose_config("pretrain")
    with pytest.raises(ConfigAttributeError):
        _ = config.trainer.no_such_key


def test_rename_makes_a_group_word_a_plain_key() -> None:
    config = compose_config("pretrain", ["title=abc"], rename={"title": "name"})
    assert config.name == "abc"


def test_null_default_takes_any_value() -> None:
    assert compose_config("pretrain", ["activation.chunk_tokens=128"]).activation.chunk_tokens == 128


def test_group_default_types_follow_the_chosen_group() -> None:
    assert compose_config("pretrain", ["trainer=gpu", "trainer.max_steps=3"]).trainer.max_steps == 3
    with pytest.raises(ConfigError, match="whole number"):
        compose_config("pretrain", ["trainer=gpu", "trainer.max_steps=x"])
