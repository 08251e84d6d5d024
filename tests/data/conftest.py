"""The corpus that most data tests read."""

import numpy as np
import pytest
from small_corpora import random_letters, write_fasta


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
