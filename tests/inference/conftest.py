"""A tiny predictor and a two-contig genome."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import tiny_model

from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.inference.predictor import Predictor


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    return Predictor(tiny_model(), NucleotideTokenizer())


@pytest.fixture(scope="session")
def sequences() -> dict[str, str]:
    random = np.random.default_rng(5)
    chromosome = "".join(random.choice(list("ACGT"), 900))
    chromosome = chromosome[:300] + "N" * 7 + chromosome[307:500] + chromosome[500:700].lower() + chromosome[700:]
    return {"chr1": chromosome, "chrM": "".join(random.choice(list("ACGT"), 120))}


@pytest.fixture(scope="session")
def fasta(tmp_path_factory, sequences):
    path = tmp_path_factory.mktemp("genome") / "ref.fa"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path
