"""`genomoe score`: a variant file in, a scored file out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from genomoe.commands.device import resolve_device
from genomoe.genome.errors import GenoMoEError
from genomoe.genome.sequence_files import resolve_path
from genomoe.genome.variant_files import open_variants
from genomoe.inference.predictor import from_pretrained
from genomoe.inference.score_file import score_file, summary_lines
from genomoe.model.kernels import KernelOptions


def run(
    variants: Path,
    *,
    reference: Path,
    model: Path,
    out: Path,
    contig_alias: list[str],
    info_key: str,
    device: str,
    dtype: str | None,
    precision: str,
    restart: bool,
    window: int | None,
    **options: Any,
) -> None:
    """Score `variants` and print on stderr what was scored and what was not."""
    source = open_variants(variants)
    kernels = KernelOptions(precision=precision)  # type: ignore[arg-type]
    predictor = from_pretrained(model, device=_local(resolve_device(device)), dtype=dtype, kernels=kernels)
    if window is not None:
        options["window"] = window
    scorer = predictor.scorer(reference, contig_alias=read_aliases(contig_alias), **options)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Rich takes a notebook's pipe for a terminal.
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("checking the input", total=None)
        summary = score_file(
            scorer,
            source,
            out,
            model_id=_model_id(Path(predictor.name)),
            reference=resolve_path(reference),
            key=info_key,
            restart=restart,
            progress=lambda phase, done, total: bar.update(task, description=phase, completed=done, total=total),
        )
    if summary is not None:
        for line in [*summary_lines(summary), f"written: {out}"]:
            print(line, file=sys.stderr)


def read_aliases(items: list[str]) -> dict[str, str]:
    """`NAME=NAME` items and two-column TSV files to one table."""
    found: dict[str, str] = {}
    for item in items:
        if "=" in item:
            name, _, target = item.partition("=")
            found[name] = target
            continue
        if not Path(item).is_file():
            raise GenoMoEError(f"--contig-alias {item} is neither NAME=NAME nor a file.")
        for number, line in enumerate(Path(item).read_text().splitlines(), start=1):
            names = line.split("\t")
            if line.strip() and not line.startswith("#"):
                if len(names) != 2:
                    raise GenoMoEError(f"{item}, line {number}: two columns with a tab between were expected.")
                found[names[0].strip()] = names[1].strip()
    return found


def _local(device: str) -> str:
    """Under torchrun each process takes the GPU of its own number."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if device == "cuda" and rank is not None else device


def _model_id(folder: Path) -> str:
    """Folder, sizes and times of the files that make up a model."""
    files = sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors"))
    return ";".join([str(folder.resolve()), *(f"{p.name}:{p.stat().st_size}:{p.stat().st_mtime_ns}" for p in files)])
