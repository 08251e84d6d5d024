"""`genomoe plan`: what a configuration costs, before it is run."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from genomoe.genome.alphabet import make_tokenizer
from genomoe.training.compose import compose_config


def run(
    overrides: Sequence[str], *, as_json: bool, gpu: str | None, memory_gib: float | None, find_context: bool
) -> None:
    """Compose pretrain.yaml with `overrides` and print its predicted cost."""
    from genomoe.training.optim import OptimConfig
    from genomoe.training.parallel import ParallelConfig
    from genomoe.training.precision import PrecisionConfig
    from genomoe.training.run import kernel_options, model_config

    config = compose_config("pretrain", overrides)
    precision = PrecisionConfig.from_config(config.precision, where="precision")
    parallel = ParallelConfig.from_config(config.parallel, where="parallel")
    model = model_config(config, make_tokenizer(config.data.tokenizer).vocab_size)
    figures = predict(
        model,
        context=config.data.context_length,
        batch_size=config.data.batch_size,
        precision=precision,
        kernels=kernel_options(config, precision),
        optim=OptimConfig.from_config(config.optim, where="optim"),
        shards=parallel.shards(config.trainer.devices * config.trainer.num_nodes),
        gpu=gpu,
        memory_gib=memory_gib,
        find_context=find_context,
    )
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        console = Console()
        for table in tables(figures):
            console.print(table)


def predict(
    model: Any,
    *,
    context: int,
    batch_size: int,
    precision: Any,
    kernels: Any,
    optim: Any,
    shards: int,
    gpu: str | None,
    memory_gib: float | None,
    find_context: bool,
) -> dict[str, Any]:
    """Every figure of the plan, JSON-ready."""
    from genomoe.training import planning
    from genomoe.training.run_directory import hardware

    device = planning.Device.named(gpu) if gpu else planning.Device.detect()
    if memory_gib is None and device is None:
        memory_gib = hardware()["memory_gib"]
    if device is not None and memory_gib is not None:
        device = dataclasses.replace(device, memory_bytes=memory_gib * planning.GIB)
    shape = planning.step_shape(
        context=context, batch_size=batch_size, precision=precision, kernels=kernels, optim=optim, shards=shards
    )
    cost = planning.plan(model, shape, device)
    usable = device.usable_bytes if device else (memory_gib or 0) * planning.GIB
    figures: dict[str, Any] = {
        "parameters": cost.parameters,
        "active_parameters": cost.active_parameters,
        "flops_per_token": sum(cost.flops_per_token.values()),
        "flops_per_token_by_part": dict(cost.flops_per_token),
        "context": context,
        "tokens_per_step": shape.tokens,
        "shards": shape.shards,
        "activation_policy": shape.policy,
        "memory_bytes": dict(cost.memory),
        "total_bytes": cost.peak_bytes,
        "peak_moment": cost.moment,
        "saved_bytes_per_token_layer": cost.saved_bytes_per_token_layer,
        "device": device.name if device else None,
        "memory_gib": round(device.memory_bytes / planning.GIB, 1) if device else memory_gib,
        "fits": cost.peak_bytes <= usable if usable else None,
        "longest_context": planning.longest_context(model, dataclasses.replace(shape, batch=1), usable) or None,
        "step_seconds": cost.step_seconds or None,
        "step_seconds_by_part": dict(cost.seconds),
        "tokens_per_second": shape.tokens / cost.step_seconds if cost.seconds else None,
        "roofline": device.roofline if device else None,
    }
    if not figures["fits"] and device is not None:
        better = planning.cheapest_that_fits(model, shape, device)
        figures["fitting_overrides"] = planning.overrides_of(better) if better else None
    if find_context:
        figures["longest_context_by_policy"] = planning.longest_context_by_policy(model, shape, usable)
    return figures


def tables(figures: dict[str, Any]) -> list[Table]:
    """The figures as tables for people."""
    cost = Table(title="Predicted cost of a training step on one device", show_header=False)
    cost.add_column()
    cost.add_column(justify="right")
    cost.add_row("parameters", f"{figures['parameters']:,}")
    cost.add_row("active for a token", f"{figures['active_parameters']:,}")
    cost.add_row(f"FLOPs a token at context {figures['context']:,}", f"{figures['flops_per_token']:.3e}")
    for name, flops in figures["flops_per_token_by_part"].items():
        if flops:
            cost.add_row(f"  {name}", f"{flops:.3e}")
    cost.add_row("tokens a step", f"{figures['tokens_per_step']:,}", end_section=True)
    for name, size in figures["memory_bytes"].items():
        cost.add_row(name, _gib(size))
    cost.add_row(f"peak memory (at: {figures['peak_moment']})", _gib(figures["total_bytes"]))
    cost.add_row("kept by a layer for a token", f"{figures['saved_bytes_per_token_layer']:,} bytes", end_section=True)
    where = figures["device"] or "this machine"
    if figures["fits"] is not None:
        fits = "fits" if figures["fits"] else "does not fit"
        cost.add_row(f"{where}, {figures['memory_gib']:g} GiB", fits)
        longest = figures["longest_context"]
        cost.add_row("longest single window that fits", f"{longest:,} tokens" if longest else "none")
    if figures.get("fitting_overrides"):
        cost.add_row("cheapest setting that fits", figures["fitting_overrides"])
    if figures["step_seconds"]:
        cost.add_section()
        for name, seconds in figures["step_seconds_by_part"].items():
            if seconds:
                cost.add_row(f"time: {name}", f"{seconds:.4g} s")
        cost.add_row("time of a step", f"{figures['step_seconds']:.4g} s")
        cost.add_row("tokens a second", f"{figures['tokens_per_second']:,.0f}")
        cost.caption = figures["roofline"]
    found = [cost]
    if "longest_context_by_policy" in figures:
        contexts = Table(title=f"Longest single window on {where}")
        contexts.add_column("activation.policy")
        contexts.add_column("activation.save")
        contexts.add_column("tokens", justify="right")
        for row in figures["longest_context_by_policy"]:
            contexts.add_row(row["policy"], row["save"], f"{row['tokens']:,}")
        found.append(contexts)
    return found


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f} GiB"
