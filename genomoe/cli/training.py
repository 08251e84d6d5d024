"""Commands that train, and that say beforehand what it costs and what this machine can run."""

from typing import Annotated

import typer

app = typer.Typer()

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, for example trainer.max_steps=20."),
]


@app.command()
def pretrain(
    overrides: Overrides = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the configuration and stop.")] = False,
) -> None:
    """Pretrain a model; without overrides a small one on three yeast chromosomes, on the CPU, in minutes.

    Example: genomoe pretrain trainer.max_steps=200 optim.learning_rate=1e-3 paths.run_dir=runs/short
    """
    from genomoe.commands.pretrain import run

    run(overrides or [], show_config=show_config)


@app.command()
def finetune(
    overrides: Overrides = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the configuration and stop.")] = False,
) -> None:
    """Fine-tune a pretrained model on a labelled task, several seeds, and report beside baselines.

    Example: genomoe finetune task=sortseq model=runs/yeast seeds=[1,2,3]
    """
    from genomoe.commands.finetune import run

    run(overrides or [], show_config=show_config)


@app.command()
def plan(
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU by name: h200, h100, b200, a100, l40s.", show_default="this machine's"),
    ] = None,
    memory: Annotated[
        float | None, typer.Option(min=0.1, help="Memory of the device, GiB.", show_default="the GPU's")
    ] = None,
    find_context: Annotated[
        bool, typer.Option("--find-context", help="Longest window that fits, under every activation policy.")
    ] = False,
) -> None:
    """Parameters, FLOPs, predicted memory and step time of a configuration, without training it.

    Example: genomoe plan model=genos-1.2b precision=bf16 data.context_length=8192 data.batch_size=4 --gpu h200
    """
    from genomoe.commands.plan import run

    run(overrides or [], as_json=as_json, gpu=gpu, memory_gib=memory, find_context=find_context)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
) -> None:
    """What this machine can run, which backends are picked, and why not the others.

    Example: genomoe doctor
    """
    from genomoe.commands.doctor import run

    run(as_json=as_json)
