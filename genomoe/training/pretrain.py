"""The LightningModule of causal pretraining: next-base loss, router losses, clipping, metrics."""

import dataclasses
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from genomoe.data.collate import Batch
from genomoe.genome.errors import GenoMoEError
from genomoe.model.moe import router_losses
from genomoe.model.transformer import GenoMoEModel, ModelOutput
from genomoe.parallel.sharding import local, whole
from genomoe.parallel.strategy import ShardedStrategy
from genomoe.training.losses import NATS_PER_BIT, LossOutput, next_token_loss
from genomoe.training.metrics import BitsPerBase
from genomoe.training.optim import OptimConfig, make_optimizer, make_schedule
from genomoe.training.precision import PrecisionConfig


class NonFiniteError(GenoMoEError):
    """The loss or a gradient became infinite or NaN; the message says at which step, where, on what batch."""


class CausalModule(lightning.LightningModule):
    """Trains a `GenoMoEModel` to predict the next base.

    One row of metrics is logged every `log_every` optimizer steps, so that nothing waits for the device in
    between except the test that the gradient norm is finite, which comes before every update.
    """

    def __init__(
        self,
        model: GenoMoEModel,
        *,
        optim: OptimConfig,
        total_steps: int,
        pad_id: int,
        gradient_clip: float,
        precision: PrecisionConfig | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        self.total_steps = total_steps
        self.pad_id = pad_id
        self.gradient_clip = gradient_clip
        self.precision = precision or PrecisionConfig()
        self.validation = BitsPerBase()
        self.latest: dict[str, float] = {}
        self.tokens_seen = 0
        self._last: dict[str, Any] = {}
        self._clock = (0.0, 0)

    def configure_model(self) -> None:
        """Divide the weights over the devices, where the strategy does so."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.shard(self.model)

    # ---- what one batch costs ----------------------------------------------------------------------------

    def forward(self, batch: Batch) -> ModelOutput:
        """The model on a batch, without logits."""
        return self.model(
            batch.tokens,
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            position_ids=batch.position_ids,
            valid=batch.tokens != self.pad_id,
            compute_logits=False,
        )

    def losses(self, batch: Batch) -> tuple[LossOutput, ModelOutput]:
        """Next-base loss of a batch, and the output it came from."""
        with self.precision.autocast(self.device):
            output = self(batch)
        loss = next_token_loss(
            output.hidden,
            self.model.lm_head.weight,
            batch.labels,
            batch.weights,
            chunk=self.model.kernels.loss_chunk,
        )
        return loss, output

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Next-base loss plus the router losses, nats."""
        loss, output = self.losses(batch)
        router = router_losses(output.routing, reduce=_sum_over_ranks)
        config = self.model.config
        self.tokens_seen += batch.num_tokens * self.trainer.world_size
        self._last = {"batch": batch, "loss": loss, "router": router, "routing": output.routing}
        if config.router_bias_balancing:
            for counts_E, layer in zip(self._counts, output.routing, strict=True):
                counts_E += layer.stats.counts_E
        # Ranks whose windows weigh less count less: the mean over ranks is the weighted mean of all windows.
        mean_weight = _sum_over_ranks(loss.weight_sum.clone()) / self.trainer.world_size
        next_base = loss.loss * loss.weight_sum / mean_weight if self.trainer.world_size > 1 else loss.loss
        return next_base + config.aux_loss_coef * router["balance"] + config.z_loss_coef * router["z"]

    def on_validation_epoch_start(self) -> None:
        """Start the sums afresh."""
        self.validation.reset()

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        """Add a batch of held-out windows to the sums."""
        self.validation.update(self.losses(batch)[0])

    def on_validation_epoch_end(self) -> None:
        """Log the held-out bits per base."""
        if not self.trainer.sanity_checking:
            self._log({f"val/{key}": float(value) for key, value in self.validation.compute().items()})

    # ---- optimisation ------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with decay groups, its rate stepped after every update."""
        optimizer = make_optimizer(self.model.named_parameters(), self.optim)
        schedule = make_schedule(optimizer, self.total_steps, self.optim)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then, in loss-free balancing, the routers' biases by the loads since the last time."""
        super().optimizer_step(*args, **kwargs)
        if self.model.config.router_bias_balancing:
            self.model.update_balance_bias(_sum_over_ranks(self._counts))
            self._counts.zero_()

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the global norm; stop if it is not finite, before the update spoils the weights."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        norm = whole(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
        if not torch.isfinite(norm):
            raise NonFiniteError(self._describe_non_finite())
        if self.gradient_clip > 0:
            nn.utils.clip_grads_with_norm_(parameters, self.gradient_clip, norm)
        self._last["grad_norm"] = norm

    # ---- metrics -----------------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Start the clock of the throughput and the counts of the loads."""
        self._counts = torch.zeros(self.model.config.num_layers, self.model.config.num_experts, device=self.device)
        self._clock = (time.perf_counter(), self.tokens_seen)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_index: int) -> None:
        """Every `log_every_n_steps` updates, log a row."""
        step, every = self.trainer.global_step, self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        stepped = (batch_index + 1) % self.trainer.accumulate_grad_batches == 0
        if stepped and (step % every == 0 or step == self.trainer.max_steps):
            self._log(self._training_row())

    def on_validation_end(self) -> None:
        """Keep validation out of the throughput."""
        self._clock = (time.perf_counter(), self.tokens_seen)

    def _training_row(self) -> dict[str, float]:
        """The figures of the last batch of all ranks."""
        loss: LossOutput = self._last["loss"]
        sums = [loss.weighted_nats_sum, loss.weight_sum, loss.nats_sum, loss.tokens]
        weighted_nats, weight, nats, count = _sum_over_ranks(torch.stack(sums).double()).tolist()
        router = _sum_over_ranks(torch.stack([value.detach() for value in self._last["router"].values()]))
        counts_LE = _sum_over_ranks(torch.stack([layer.stats.counts_E.float() for layer in self._last["routing"]]))
        seconds, tokens = time.perf_counter() - self._clock[0], self.tokens_seen - self._clock[1]
        self._clock = (time.perf_counter(), self.tokens_seen)
        row = {
            "train/loss": weighted_nats / weight if weight else 0.0,
            "train/bits_per_base": nats / max(count, 1) / NATS_PER_BIT,
            **{
                f"train/router_{name}": value / self.trainer.world_size
                for name, value in zip(self._last["router"], router.tolist(), strict=True)
            },
            "train/expert_load_max": float((counts_LE.amax(1) / counts_LE.mean(1).clamp_min(1e-9)).max()),
            "train/grad_norm": float(self._last["grad_norm"]),
            "train/learning_rate": float(self.trainer.optimizers[0].param_groups[0]["lr"]),
            "train/tokens_seen": self.tokens_seen,
        }
        if seconds > 0 and tokens:
            row["train/tokens_per_second"] = tokens / seconds
        return row

    def _log(self, row: dict[str, float]) -> None:
        self.latest.update(row)
        for logger in self.trainer.loggers:
            logger.log_metrics(row, step=self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the token count and torch's generator."""
        checkpoint["tokens_seen"] = self.tokens_seen
        checkpoint["rng"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them."""
        self.tokens_seen = checkpoint["tokens_seen"]
        torch.set_rng_state(checkpoint["rng"])

    # ---- diagnosis ---------------------------------------------------------------------------------------

    def _describe_non_finite(self) -> str:
        batch: Batch = self._last["batch"]
        place = first_non_finite(self.model, lambda: self.losses(batch)[0].loss)
        indices = batch.index.tolist()
        shown = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        return (
            f"the loss or a gradient is not finite at step {self.trainer.global_step + 1}, first in {place}, on the "
            f"batch of samples {shown}; the weights were not updated and the last checkpoint is good: lower "
            "optim.learning_rate, or look at these samples."
        )


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Sum in place over all ranks, where there are several; returns its argument."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values)
    return values


def first_non_finite(model: nn.Module, compute: Any) -> str:
    """Name of the first module whose output is not finite when `compute()` runs, or of what else is."""
    parameters = list(model.named_parameters())  # before the forward pass gathers those that are divided over ranks
    for name, parameter in parameters:
        if not torch.isfinite(local(parameter)).all():
            return f"parameter {name}"
    found: list[str] = []

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if not found and not all(torch.isfinite(t).all() for t in _floats(output)):
                found.append(name)

        return hook

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules() if name]
    try:
        with torch.no_grad():
            loss = compute()
    finally:
        for handle in handles:
            handle.remove()
    if found:
        return f"the output of {found[0]}"
    if not torch.isfinite(loss):
        return "the loss"
    # The backward pass runs from the last parameter to the first, and what follows the culprit is spoilt too.
    for name, parameter in reversed(parameters):
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all():
            return f"the gradient of {name}"
    return "the sum of the squared gradients, which overflows"


def _floats(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _floats(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _floats(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _floats(item)
