"""The `genomoe` command line: one Typer command a verb, each loading what it needs when it runs.

`training` and `models` hold the verbs, `corpus` and `bench` those of two groups, `genomoe.commands` what they do.

Nothing heavy is imported here, so that `genomoe --help` answers at once. Every failure ends as one sentence
on stderr and an exit code: 2 for a wrong command line, 1 for anything else, 130 when interrupted.
`--debug`, anywhere on the line, shows the traceback instead.
"""

import io
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from genomoe import __version__
from genomoe.cli import bench, corpus, models, training


class _Commands(TyperGroup):
    """Says that it was interrupted, or what is wrong with a value: Typer says nothing, or draws a box."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _fail(str(error) or "interrupted.", code=130)
        except typer.BadParameter as error:
            where = error.ctx.command_path if error.ctx else ctx.command_path
            _fail(f"{error.format_message().removesuffix('.')} (see {where} --help).", code=2)


app = typer.Typer(
    name="genomoe",
    cls=_Commands,
    help="Mixture-of-experts DNA language models: pretrain, fine-tune, score variants.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for room, name in ((training, None), (models, None), (corpus, "corpus"), (bench, "bench")):
    app.add_typer(room.app, name=name)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line (`sys.argv[1:]` unless given) and exit; `sys.argv` itself is never changed."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets a question mark
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    usual_format, warnings.formatwarning = warnings.formatwarning, _format_warning
    try:
        app(args=arguments, prog_name="genomoe")
    except Exception as error:
        if debug:
            raise
        _fail(_sentence(error), code=1)
    finally:
        warnings.formatwarning = usual_format


def _format_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> str:
    """A warning for the user as one line, without the line of code it came from."""
    return f"genomoe: warning: {' '.join(str(message).split())}\n"


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError):
        return text if "install" in text else f"{text}; install the extra that brings it, see the README."
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}."
    if isinstance(error, ValueError | OSError) and text:
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


def _fail(sentence: str, *, code: int) -> NoReturn:
    typer.echo(f"genomoe: {sentence}", err=True)
    raise SystemExit(code)
