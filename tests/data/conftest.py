"""Small corpora with every feature: several sources, soft-masking, N, IUPAC codes, short contigs, BED files."""

from pathlib import Path

import numpy as np
import pytest


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


@pytest.fixture
def corpus_files(tmp_path):
    """Folder with three files and a description that uses every filter; returns the description's path."""
    rng = np.random.default_rng(7)
    write_fasta(tmp_path / "a.fa", {f"a{n}": random_letters(rng, size) for n, size in enumerate((9000, 500, 30, 4000))})
    write_fasta(tmp_path / "b.fa", {f"b{n}": random_letters(rng, size) for n, size in enumerate((700, 12_000))})
    write_fasta(tmp_path / "c.fa", {"c0": random_letters(rng, 8000, masked=False).lower(), "c1": b"NNNNNNNNNN" * 20})
    (tmp_path / "keep.bed").write_text("# regions\nb0\t100\t600\nb1\t0\t5000\nb1\t4000\t6000\nb1\t9000\t12000\n")
    (tmp_path / "mask.bed").write_text("c0\t10\t500\nc0\t400\t700\n")
    description = tmp_path / "corpus.yaml"
    description.write_text(
        """
format: 1
sources:
  - {name: first, path: a.fa, exclude: [a1], min_length: 100, tags: {species: one}}
  - {name: second, path: [b.*a], keep: keep.bed, weight: 2, split: valid}
  - {name: third, path: c.fa, mask: mask.bed, max_n_fraction: 0.5, split: test}
"""
    )
    return description
