"""The `genomoe` command line: one Typer command a verb, each loading what it needs when it runs.

Nothing heavy is imported here, so that `genomoe --help` answers at once. Every failure ends as one sentence
on stderr and an exit code: 2 for a wrong command line, 1 for anything else, 130 when interrupted.
`--debug`, anywhere on the line, shows the traceback instead.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from genomoe import __version__

app = typer.Typer(
    name="genomoe",
    help="Mixture-of-experts DNA language models: pretrain, fine-tune, score variants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Hydra overrides, for example trainer.max_steps=20."),
]


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"genomoe {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (may stand anywhere).")
    ] = False,
) -> None:
    """Options before the command; `--debug` is taken off the line in `main`, so that it may stand anywhere."""


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
def evaluate(
    run_dir: Annotated[Path, typer.Argument(help="A run directory written by `genomoe pretrain`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    stride: Annotated[
        int | None,
        typer.Option(help="Bases between windows; each base is scored once [default: half the context]."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Bits per base on the held-out contigs, beside Markov and uniform baselines.

    Example: genomoe evaluate runs/yeast --json
    """
    from genomoe.commands.evaluate import run

    run(run_dir, as_json=as_json, stride=stride, device=device)


@app.command()
def plan(
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    memory: Annotated[float | None, typer.Option(help="Memory of the device, GiB [default: this machine's]")] = None,
) -> None:
    """Parameters, FLOPs and predicted memory of a configuration, without training it.

    Example: genomoe plan model=genos-1.2b precision=bf16 data.context_length=8192 data.batch_size=4
    """
    from genomoe.commands.plan import run

    run(overrides or [], as_json=as_json, memory_gib=memory)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
) -> None:
    """What this machine can run, which backends are picked, and why not the others.

    Example: genomoe doctor
    """
    from genomoe.commands.doctor import run

    run(as_json=as_json)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (`sys.argv[1:]` unless given) and exit; `sys.argv` itself is never changed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(args=arguments, prog_name="genomoe")
    except KeyboardInterrupt:
        _fail("interrupted.", code=130)
    except Exception as error:
        if debug:
            raise
        _fail(_sentence(error), code=1)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return text if "install" in text else f"{text}; install the extra that brings it, see the README."
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | OSError) and text:
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


def _fail(sentence: str, *, code: int) -> None:
    typer.echo(f"genomoe: {sentence}", err=True)
    raise SystemExit(code)
