"""`genomoe bench`: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from genomoe.cli.options import Device

app = typer.Typer(
    help="Measure this machine; JSON and a table, with hardware and versions in it.", no_args_is_help=True
)

Out = Annotated[Path | None, typer.Option(help="Write the rows, hardware and versions here as JSON.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Shell pattern of case names; may be repeated.", show_default="all")
]
Budget = Annotated[
    float | None,
    typer.Option(help="Seconds; cases that would not end in time are recorded as not run.", show_default="none"),
]
Gpu = Annotated[str, typer.Option(help="auto, cuda or cuda:N.")]
ListOnly = Annotated[bool, typer.Option("--list", help="Print the names of the cases and stop.")]


@app.command("layer")
def layer(
    out: Out = None,
    case: Only = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Shell pattern of implementation/precision/save; may be repeated.", show_default="all"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs, of which the median counts.")] = 7,
    limit_s: Annotated[int, typer.Option(min=1, help="Seconds an implementation may take for a case.")] = 120,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Compile SonicMoE's kernels for all cases first, at the same time.")
    ] = False,
) -> None:
    """One MoE layer, ours and every installed peer's: time, TFLOP/s, memory kept and at the peak, errors.

    Example: genomoe bench layer --case 'genos*' --out docs/results/layer-h200.json
    """
    from genomoe.commands.bench import run_layers

    run_layers(out=out, cases=case or [], only=only or [], repeats=repeats, limit_s=limit_s, prepare=prepare)


@app.command("step")
def step(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Gpu = "auto",
    list_only: ListOnly = False,
) -> None:
    """Whole training steps at 8k, ours and Hugging Face's: tokens/s, MFU, peak memory.

    Example: genomoe bench step --only 'genos*' --out docs/results/step-h200.json
    """
    from genomoe.commands.bench import run_steps

    run_steps("step", out=out, only=only or [], time_budget=time_budget, device=device, list_only=list_only)


@app.command("context")
def context(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Gpu = "auto",
    list_only: ListOnly = False,
) -> None:
    """Training steps on one sequence of 32k to 4M tokens, ours and Hugging Face's.

    Example: genomoe bench context --time-budget 300 --out docs/results/context-h200.json
    """
    from genomoe.commands.bench import run_steps

    run_steps("context", out=out, only=only or [], time_budget=time_budget, device=device, list_only=list_only)


@app.command("precision")
def precision(
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the loss curves here (PNG, PDF or SVG).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each training.")] = 1000,
    seeds: Annotated[int, typer.Option(min=1, help="Initial weights a precision is trained from.")] = 3,
    train: Annotated[
        list[str] | None, typer.Option(help="FASTA file to train on; may be repeated.", show_default="two yeasts")
    ] = None,
    held_out: Annotated[
        list[str] | None, typer.Option(help="FASTA file to evaluate on; may be repeated.", show_default="a third")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A toy model, to try the command on a CPU.")] = False,
    device: Device = "auto",
) -> None:
    """Loss of the same training with experts in bf16, fp8 and mxfp8, each from several initial weights.

    Example: genomoe bench precision --out docs/results/precision-h200.json --plot docs/results/precision-h200.png
    """
    from genomoe.commands.bench import run_precision

    sources = {name: tuple(paths) for name, paths in (("train", train), ("held_out", held_out)) if paths}
    run_precision(out=out, plot=plot, steps=steps, seeds=seeds, small=small, device=device, sources=sources)


@app.command("loader")
def loader(
    out: Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    bases: Annotated[int, typer.Option(min=2_000_000, help="Size of the made-up genome.")] = 50_000_000,
    window: Annotated[
        list[int] | None,
        typer.Option(min=64, help="Window length; may be repeated.", show_default="1024, 8192, 131072, 1048576"),
    ] = None,
    workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Loader processes; may be repeated.", show_default="1 and 2")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each row, of which the median counts.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of one measurement.")] = 1.5,
) -> None:
    """Bases per second from disk to packed batches, beside pyfaidx, pysam, Biopython and a memory map.

    Example: genomoe bench loader --out docs/results/loader-cpu.json
    """
    from genomoe.commands.bench import run_loader

    run_loader(
        out=out,
        as_json=as_json,
        bases=bases,
        windows=window or (1024, 8192, 131_072, 1_048_576),
        workers=workers or (1, 2),
        repeats=repeats,
        seconds=seconds,
    )


@app.command("scoring")
def scoring(
    out: Out = None,
    only: Only = None,
    time_budget: Budget = None,
    device: Device = "auto",
    precision: Annotated[
        list[str] | None, typer.Option(help="Of our expert products: bf16 (the weights' own), fp8; may be repeated.")
    ] = None,
) -> None:
    """Variants per second, ours and a well-batched Hugging Face loop's with the same weights and windows.

    Example: genomoe bench scoring --device cpu --out docs/results/scoring-cpu.json
    """
    from genomoe.commands.bench import run_scoring

    run_scoring(out=out, only=only or [], time_budget=time_budget, device=device, precisions=precision or ["bf16"])
