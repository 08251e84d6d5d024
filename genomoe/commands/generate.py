"""`genomoe generate`: continuations of prompts as FASTA."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from genomoe.commands.device import resolve_device
from genomoe.commands.places import read_records
from genomoe.files import replacing
from genomoe.genome.errors import GenoMoEError
from genomoe.inference.predictor import from_pretrained


def run(prompt: str, *, model: Path, out: Path | None, device: str, dtype: str | None, n: int, **options: Any) -> None:
    """Print or write FASTA records named PROMPT_NUMBER, each a continuation without its prompt."""
    predictor = from_pretrained(model, device=resolve_device(device), dtype=dtype)
    if prompt and set(prompt.upper()) <= set("ACGTUNRYSWKMBDHV"):
        names, prompts = ["sample"], [prompt]
    elif Path(prompt).is_file():
        names, records = read_records(Path(prompt), predictor)
        prompts = [record.decode("ascii") for record in records]
    else:
        raise GenoMoEError(f"The prompt {prompt!r} is neither a sequence of bases nor a FASTA file.")
    lines = []
    with Console(stderr=True).status("sampling"):
        for name, text in zip(names, prompts, strict=True):
            for number, sequence in enumerate(predictor.generate(text, n, **options), start=1):
                lines += [
                    f">{name}_{number}",
                    *(sequence[at : at + 80] for at in range(0, len(sequence), 80)),
                ]
    fasta = "\n".join(lines) + "\n"
    if out is None:
        sys.stdout.write(fasta)
        return
    with replacing(out) as temporary:
        temporary.write_text(fasta)
