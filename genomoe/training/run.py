"""From a composed configuration to a trained model in a run directory.

`pretrain(config)` is the whole of it; the parts (`seed_everything`, `make_model`, `fit`) serve fine-tuning too.
"""

import dataclasses
import logging
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from omegaconf import DictConfig, OmegaConf

from genomoe.data.splits import repeated_contigs
from genomoe.genome.errors import GenoMoEError
from genomoe.model.config import ModelConfig
from genomoe.model.kernels import KernelOptions
from genomoe.model.pretrained import save_pretrained
from genomoe.model.transformer import GenoMoEModel
from genomoe.parallel.sharding import gather
from genomoe.training.callbacks import Interrupted
from genomoe.training.checkpoint import AtomicCheckpointIO
from genomoe.training.metrics_log import MetricsCsv
from genomoe.training.optim import OptimConfig, require_available
from genomoe.training.options import ConfigError, Options
from genomoe.training.parallel import ParallelConfig
from genomoe.training.planning import Device, require_fit, step_shape
from genomoe.training.precision import PrecisionConfig
from genomoe.training.pretrain import CausalModule
from genomoe.training.run_directory import RunDirectory, environment, is_main_process, open_run, write_provenance
from genomoe.training.start import start_from


class Terminated(GenoMoEError):
    """The run was asked to stop (SIGTERM) and did, after a checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig(Options):
    """Length, placement and rhythm of training (config group `trainer`); names as in Lightning's Trainer."""

    max_steps: int
    """Optimizer updates in all."""
    accelerator: str = "auto"
    """cpu, cuda or auto (a GPU if there is one)."""
    devices: int = 1
    """Devices of one node."""
    num_nodes: int = 1
    """Nodes."""
    gradient_clip_val: float = 1.0
    """Largest global gradient norm; 0 does not clip."""
    accumulate_grad_batches: int = 1
    """Batches an update."""
    val_check_interval: int | None = None
    """Batches between two validations; null: none."""
    limit_val_batches: int | None = None
    """Held-out batches looked at in one validation; null: all."""
    log_every_n_steps: int = 10
    """Updates between two rows of metrics.csv."""
    deterministic: bool = True
    """Ask torch for algorithms that give the same bits every time (warning where there is none)."""

    def __post_init__(self) -> None:
        for key in ("max_steps", "devices", "num_nodes", "accumulate_grad_batches", "log_every_n_steps"):
            self.require_count(key)
        for key in ("val_check_interval", "limit_val_batches"):
            self.require_count(key, optional=True)
        self.require_choice("accelerator", ("auto", "cpu", "cuda", "gpu"))
        self.require_number("gradient_clip_val")
        if self.accelerator in ("cuda", "gpu"):
            available = torch.cuda.device_count()
            self.require(available > 0, "accelerator", "cpu, because torch sees no CUDA device here")
            self.require(self.devices <= available, "devices", f"at most {available}, what torch sees here")

    @property
    def ranks(self) -> int:
        """Processes in all, one a device."""
        return self.devices * self.num_nodes

    @property
    def root_device(self) -> torch.device:
        """The kind of device training runs on."""
        cuda = self.accelerator in ("cuda", "gpu") or (self.accelerator == "auto" and torch.cuda.is_available())
        return torch.device("cuda" if cuda else "cpu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationConfig(Options):
    """What is kept for the backward pass (config group `activation`)."""

    policy: str = "none"
    """Policy over whole layers by name, see `genomoe.training.activation`."""
    save: str = "bf16"
    """What the experts keep: bf16 (as computed), mxfp8 or recompute."""
    chunk_tokens: int | None = None
    """Experts run so many tokens at a time; null: all at once."""
    loss_chunk: int | None = None
    """The loss is taken over so many tokens at a time; null: all at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a training run leaves behind."""

    run: RunDirectory
    """Its directory."""
    steps: int
    """Optimizer updates done in all, those before a resume included."""
    seconds: float
    """Wall time of this process's part."""
    metrics: Mapping[str, float]
    """The last value of every metric."""
    held_out: bool
    """Whether any sequence is held out, so that there is something to evaluate on."""
    is_global_zero: bool
    """Whether this process is the one that writes and reports."""


def pretrain(config: DictConfig) -> RunResult:
    """Train, or go on training, as `config` (of pretrain.yaml) says; writes the run directory.

    Raises ConfigError or ValueError for settings that cannot work, before anything is written.
    """
    started = time.perf_counter()
    trainer_config = TrainerConfig.from_config(config.trainer, where="trainer")
    optim = OptimConfig.from_config(config.optim, where="optim")
    require_available(optim)
    precision = PrecisionConfig.from_config(config.precision, where="precision")
    precision.check(trainer_config.root_device)
    parallel = ParallelConfig.from_config(config.parallel, where="parallel")
    parallel.check(trainer_config.ranks, optim)
    seed_everything(config.seed)
    data = load_data(config)
    data.setup()
    warn_of_repeated_contigs(data)
    shards = parallel.shards(trainer_config.ranks)
    refuse_if_too_large(config, data.tokenizer, precision, optim, trainer_config.root_device, shards)
    model = make_model(config, data.tokenizer, precision)
    run, checkpoint = open_run(config)
    if config.start_from is not None and checkpoint is None:
        start_from(model, data.tokenizer.to_dict(), config.start_from)
    module = CausalModule(
        model,
        optim=optim,
        precision=precision,
        total_steps=trainer_config.max_steps,
        pad_id=data.tokenizer.pad_id,
        gradient_clip=trainer_config.gradient_clip_val,
    )
    write_provenance(run, config)
    strategy = parallel.lightning_strategy(trainer_config.ranks, precision)
    trainer = fit(module, data, config, trainer_config, strategy, checkpoint)
    state = gather(model.state_dict(), keep=trainer.is_global_zero)
    seconds = time.perf_counter() - started
    if trainer.is_global_zero:
        save_pretrained(model, data.tokenizer.to_dict(), run.model, state=state, card=_card(config, trainer, module))
    return RunResult(
        run=run,
        steps=trainer.global_step,
        seconds=seconds,
        metrics=dict(module.latest),
        held_out=data.val_corpus is not None,
        is_global_zero=trainer.is_global_zero,
    )


def load_data(config: DictConfig) -> Any:
    """The data module of config group `data`.

    A run directory may come from someone else, so its config may name no class outside `genomoe.data`.
    """
    target = str(config.data.get("_target_", ""))
    if not target.startswith("genomoe.data."):
        raise ConfigError(f"data._target_={target} is not allowed: it must be a class of genomoe.data.")
    return _instantiate(config.data)


def warn_of_repeated_contigs(data: Any) -> None:
    """Warn, in the main process, of held-out contigs that are trained on."""
    if data.val_corpus is None or not is_main_process():
        return
    repeated = repeated_contigs(data.train_corpus, data.val_corpus)
    if repeated:
        (held_out, trained), more = repeated[0], len(repeated) - 1
        warnings.warn(
            f"{held_out} is held out, but {trained} in the training data is the same sequence"
            f"{f' (and {more} more)' if more else ''}: held-out figures will flatter the model; "
            "`genomoe corpus leakage` lists near copies, too.",
            stacklevel=2,
        )


def seed_everything(seed: int) -> None:
    """Seed torch; sampling has its own (seed, epoch, index) and needs no global state."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed} is not allowed: it must be a whole number from 0 to 2^63 - 1.")
    torch.manual_seed(seed)


def kernel_options(config: DictConfig, precision: PrecisionConfig) -> KernelOptions:
    """`KernelOptions` from the keys `kernels`, `precision` and `activation` of a configuration."""
    activation = ActivationConfig.from_config(config.activation, where="activation")
    return KernelOptions(
        **config.kernels,
        precision=precision.experts,  # type: ignore[arg-type]
        save=activation.save,  # type: ignore[arg-type]
        chunk_tokens=activation.chunk_tokens,
        loss_chunk=activation.loss_chunk,
        activation=activation.policy,
    )


def model_config(config: DictConfig, vocab_size: int) -> ModelConfig:
    """The architecture in config group `model`, with the tokenizer's vocabulary unless it names its own.

    Raises ConfigError if the training context does not fit the model.
    """
    fields = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(fields, dict)
    fields["vocab_size"] = fields.get("vocab_size") or vocab_size
    architecture = ModelConfig.from_dict(fields)  # type: ignore[arg-type]
    if architecture.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size={architecture.vocab_size} is smaller than the tokenizer's {vocab_size} tokens."
        )
    context = config.data.context_length
    if context > architecture.max_context:
        raise ConfigError(
            f"data.context_length={context} is longer than model.max_context={architecture.max_context}, "
            "what the RoPE setting covers: raise model.max_context or shorten the windows."
        )
    return architecture


def make_model(config: DictConfig, tokenizer: Any, precision: PrecisionConfig) -> GenoMoEModel:
    """A freshly initialised model with its kernels and activation policy in force."""
    kernels = kernel_options(config, precision)
    model = GenoMoEModel(model_config(config, tokenizer.vocab_size), dtype=precision.dtype, kernels=kernels)
    if kernels.activation != "none":
        from genomoe.training.activation import apply_policy

        apply_policy(model, kernels.activation)
    return model


def refuse_if_too_large(
    config: DictConfig,
    tokenizer: Any,
    precision: PrecisionConfig,
    optim: OptimConfig,
    root_device: torch.device,
    shards: int = 1,
) -> None:
    """Raise ConfigError before anything is allocated if a step is predicted not to fit the GPU.

    The message names the cheapest activation policy that would.
    """
    device = Device.detect() if root_device.type == "cuda" else None
    if device is not None:
        kernels = kernel_options(config, precision)
        shape = step_shape(
            context=config.data.context_length,
            batch_size=config.data.batch_size,
            precision=precision,
            kernels=kernels,
            optim=optim,
            shards=shards,
        )
        require_fit(model_config(config, tokenizer.vocab_size), shape, device)


def fit(
    module: lightning.LightningModule,
    data: lightning.LightningDataModule,
    config: DictConfig,
    trainer_config: TrainerConfig,
    strategy: str | Strategy = "auto",
    checkpoint: Path | None = None,
) -> lightning.Trainer:
    """Run Lightning's loop with the callbacks and loggers of `config`; returns the trainer when it is done."""
    loggers = [_instantiate(logger) for logger in (config.logger or {}).values() if logger]
    callbacks = [_instantiate(callback) for callback in (config.callbacks or {}).values() if callback]
    if checkpoint is not None:
        step = int(checkpoint.stem.rpartition("-")[2])
        for logger in loggers:
            if isinstance(logger, MetricsCsv):
                logger.continue_from(step)
    with quiet_lightning(), _deterministic(trainer_config.deterministic):
        trainer = lightning.Trainer(
            accelerator=trainer_config.root_device.type,
            devices=trainer_config.devices,
            num_nodes=trainer_config.num_nodes,
            strategy=strategy,
            max_steps=trainer_config.max_steps,
            max_epochs=-1,
            gradient_clip_val=trainer_config.gradient_clip_val or None,
            accumulate_grad_batches=trainer_config.accumulate_grad_batches,
            val_check_interval=trainer_config.val_check_interval,
            check_val_every_n_epoch=None if trainer_config.val_check_interval else 1,
            limit_val_batches=_or(trainer_config.limit_val_batches, 1.0) if trainer_config.val_check_interval else 0,
            num_sanity_val_steps=0,
            log_every_n_steps=trainer_config.log_every_n_steps,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=loggers,
            callbacks=callbacks,
            plugins=[AtomicCheckpointIO()],
            use_distributed_sampler=False,
        )
        try:
            trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        except MisconfigurationException as error:
            raise ConfigError(" ".join(str(error).split())) from error
        except SIGTERMException:
            if not trainer.is_global_zero:
                raise  # exits with code 0 and no word: at another code launchers would kill rank 0, which reports
            saved, _ = RunDirectory(Path(config.paths.run_dir)).last_checkpoint() or (0, None)
            raise Terminated(
                f"terminated after step {trainer.global_step}; start the same command again to go on from step {saved}."
            ) from None
        except Interrupted as error:
            raise KeyboardInterrupt(str(error)) from None
    return trainer


def _instantiate(config: DictConfig) -> Any:
    """Hydra's `instantiate`, but the constructor's own error comes out as it is."""
    try:
        return instantiate(config)
    except InstantiationException as error:
        if isinstance(error.__cause__, ValueError | OSError | ModuleNotFoundError):
            raise error.__cause__ from None
        raise ConfigError(" ".join(str(error).split())) from error


def _card(config: DictConfig, trainer: lightning.Trainer, module: CausalModule) -> dict[str, Any]:
    """What the model card says of this run, a line each."""
    facts = environment()
    data = {key: value for key, value in config.data.items() if key in ("train", "val", "context_length")}
    return {
        "Name": config.name,
        "Trained on": data,
        "Started from": config.start_from or "random weights",
        "Optimizer steps": trainer.global_step,
        "Tokens seen": f"{module.tokens_seen:,}",
        "Last metrics": {name: round(value, 4) for name, value in module.latest.items()},
        "Seed": config.seed,
        "Written by": f"genomoe {facts['genomoe']}, commit {facts['commit']}, torch {facts['packages']['torch']}",
        "Hardware": facts["hardware"]["gpus"] or f"{facts['hardware']['cpu']}, {facts['hardware']['cores']} cores",
        "Limits": "Scores of a small model trained for minutes are for trying the program out, not for decisions.",
    }


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(wanted, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's banner and its advice about workers; its errors still come.

    Ctrl-C comes out as KeyboardInterrupt: Lightning would exit with code 1 and ignore every further Ctrl-C.
    """
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        # FSDP2 of the model's output, which nothing changes in place
        warnings.filterwarnings("ignore", message=".*returned a view tensor.*")
        try:
            yield
        except SIGTERMException:
            raise
        except SystemExit:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise KeyboardInterrupt from None
        finally:
            logger.setLevel(level)
