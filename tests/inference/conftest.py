"""A tiny model with weights large enough that scores differ, and a two-contig genome."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genomoe.genome.alphabet import NucleotideTokenizer
from genomoe.inference.predictor import Predictor
from genomoe.model.config import ModelConfig
from genomoe.model.transformer import GenoMoEModel

TINY = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "expert_size": 48,
    "num_experts": 4,
    "top_k": 2,
    "max_context": 512,
    "initializer_std": 0.15,
}


def tiny_model(**changes) -> GenoMoEModel:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return GenoMoEModel(ModelConfig(**(TINY | changes))).eval()


@pytest.fixture(scope="session")
def predictor() -> Predictor:
    return Predictor(tiny_model(), NucleotideTokenizer())


@pytest.fixture(scope="session")
def sequences() -> dict[str, str]:
    random = np.random.default_rng(5)
    chromosome = "".join(random.choice(list("ACGT"), 900))
    chromosome = (
        chromosome[:300] + "N" * 7 + chromosome[307:500] + chromosome[500:700].lower() + chromosome[700:]
    )
    return {"chr1": chromosome, "chrM": "".join(random.choice(list("ACGT"), 120))}


@pytest.fixture(scope="session")
def fasta(tmp_path_factory, sequences):
    path = tmp_path_factory.mktemp("genome") / "ref.fa"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path
