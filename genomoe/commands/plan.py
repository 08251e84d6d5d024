"""`genomoe plan`: what a configuration costs, before it is run."""

import json
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from genomoe.genome.alphabet import make_tokenizer
from genomoe.training.compose import compose_config


def run(overrides: Sequence[str], *, as_json: bool, memory_gib: float | None) -> None:
    """Compose pretrain.yaml with `overrides` and print its predicted cost."""
    from genomoe.training.planning import plan
    from genomoe.training.precision import PrecisionConfig
    from genomoe.training.run import kernel_options, model_config
    from genomoe.training.run_directory import hardware

    config = compose_config("pretrain", overrides)
    precision = PrecisionConfig.from_config(config.precision, where="precision")
    model = model_config(config, make_tokenizer(config.data.tokenizer).vocab_size)
    cost = plan(
        model,
        context=config.data.context_length,
        batch_size=config.data.batch_size,
        precision=precision,
        kernels=kernel_options(config, precision),
    )
    facts = hardware()
    if memory_gib is None:
        memory_gib = facts["gpus"][0]["memory_gib"] if facts["gpus"] else facts["memory_gib"]
    longest = cost.longest_context(memory_gib * 2**30) if memory_gib else None
    if as_json:
        figures = {
            "parameters": cost.parameters,
            "active_parameters": cost.active_parameters,
            "flops_per_token": cost.flops_per_token,
            "context": cost.context,
            "tokens_per_step": cost.tokens_per_step,
            "memory_bytes": {
                **cost.fixed_bytes,
                **{name: size * cost.tokens_per_step for name, size in cost.bytes_per_token.items()},
            },
            "total_bytes": cost.total_bytes,
            "memory_gib": memory_gib,
            "longest_context": longest,
        }
        print(json.dumps(figures, indent=2))
        return
    table = Table(title="Predicted cost of a training step on one device", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("parameters", f"{cost.parameters:,}")
    table.add_row("active for a token", f"{cost.active_parameters:,}")
    table.add_row(f"FLOPs a token at context {cost.context:,}", f"{cost.flops_per_token:.3e}")
    table.add_row("tokens a step", f"{cost.tokens_per_step:,}", end_section=True)
    for name, size in cost.fixed_bytes.items():
        table.add_row(name, _gib(size))
    for name, size in cost.bytes_per_token.items():
        table.add_row(f"kept for the backward pass: {name}", _gib(size * cost.tokens_per_step))
    table.add_row("memory in all", _gib(cost.total_bytes), end_section=True)
    if longest is not None:
        table.add_row(f"longest window that fits {memory_gib:g} GiB", f"{longest:,} tokens")
    Console().print(table)


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f} GiB"
