"""Small corpora with every feature: several sources, soft-masking, N, IUPAC codes, short contigs, BED files."""

from pathlib import Path

import numpy as np


def random_letters(rng: np.random.Generator, length: int, *, masked: bool = True) -> bytes:
    """Letters in runs of upper and lower case, with a few N and IUPAC codes."""
    letters = rng.choice(list(b"ACGT"), length).astype(np.uint8)
    if length > 20:
        start = int(rng.integers(0, length - 10))
        letters[start : start + 10] = ord("N")
        letters[rng.integers(0, length, 3)] = ord("R")
    if masked:
        edges = np.sort(rng.integers(0, length + 1, 6))
        for low, high in edges.reshape(-1, 2):
            letters[low:high] |= 0x20
    return letters.tobytes()


def write_fasta(path: Path, records: dict[str, bytes], width: int = 60) -> Path:
    """An even-lined FASTA."""
    with open(path, "wb") as out:
        for name, letters in records.items():
            out.write(b">" + name.encode() + b" words\n")
            for start in range(0, len(letters), width):
                out.write(letters[start : start + width] + b"\n")
    return path
