"""`genomoe corpus`: check, build and describe training corpora."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Check, build and describe training corpora.", no_args_is_help=True)

CorpusInputs = Annotated[
    list[str],
    typer.Argument(
        metavar="INPUT...", help="FASTA or GenBank files, folders, quoted globs, or one description (.yaml)."
    ),
]


@app.command("build")
def build(
    inputs: CorpusInputs,
    out: Annotated[Path, typer.Option("--out", "-o", help="The store to create, for example corpus.zarr.")],
    workers: Annotated[int, typer.Option(help="Processes.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False,
) -> None:
    """Turn sequence files into a Zarr store that streams fast.

    Example: genomoe corpus build genomes/ --out corpus.zarr --workers 4
    """
    from genomoe.commands.corpus import build

    build(inputs, out, workers=workers, overwrite=overwrite)


@app.command("validate")
def validate(
    inputs: CorpusInputs,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check files (or a store) against every rule; prints file:line for each fault and exits 1 on an error.

    Example: genomoe corpus validate genomes/*.fa.gz
    """
    from genomoe.commands.corpus import validate

    raise typer.Exit(validate(inputs, as_json=as_json))


@app.command("describe")
def describe(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT...", help="A store (.zarr), or what `build` takes.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of a table.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page here.")] = None,
) -> None:
    """Sizes, GC, N, soft-masking and duplicate contigs.

    Example: genomoe corpus describe corpus.zarr --report corpus.html
    """
    from genomoe.commands.corpus import describe

    describe(inputs, as_json=as_json, report=report)


@app.command("leakage")
def leakage(
    train: Annotated[list[str], typer.Argument(metavar="TRAIN...", help="The training files, description or store.")],
    held_out: Annotated[list[str], typer.Option("--held-out", help="What is held out; may be given several times.")],
    window: Annotated[int, typer.Option(help="Bases of a window.")] = 1000,
    threshold: Annotated[float, typer.Option(help="Part of a window's 21-mers that counts as the same.")] = 0.5,
    out: Annotated[Path | None, typer.Option(help="Write all windows here as TSV.")] = None,
) -> None:
    """Report held-out windows that nearly equal training sequence, on either strand; exits 1 when there is any.

    Example: genomoe corpus leakage train.zarr --held-out chr8.fa.gz
    """
    from genomoe.commands.corpus import leakage

    raise typer.Exit(leakage(train, held_out, window=window, threshold=threshold, out=out))
