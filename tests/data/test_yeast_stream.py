"""The bundled yeast chromosomes through GenomeDataModule: coverage, weights, strands, determinism."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import genomoe
from genomoe.data.datamodule import GenomeDataModule
from genomoe.genome.alphabet import reverse_complement
from genomoe.genome.fasta import Reference
from genomoe.genome.sequence_files import resolve_path

CONFIGS = Path(genomoe.__file__).parent / "configs" / "data"


def yeast(**overrides) -> GenomeDataModule:
    options = yaml.safe_load((CONFIGS / "yeast.yaml").read_text())
    options.pop("_target_")
    return GenomeDataModule(
        **{**options, "seed": 0, "context_length": 512, "batch_size": 16, "soft_mask_weight": 0.1, **overrides}
    )


def test_bundled_files_have_the_checksums_of_the_readme():
    readme = (Path(genomoe.__file__).parents[1] / "data" / "README.md").read_text()
    files = sorted(resolve_path("bundled:yeast").glob("*.fna.gz"))
    assert len(files) == 3
    for file in files:
        assert hashlib.sha256(file.read_bytes()).hexdigest() in readme


def test_an_epoch_in_stride_mode_covers_every_training_base_once():
    data = yeast(sampling={"mode": "stride"})
    batches = list(data.train_dataloader())
    assert sum(int((batch.tokens != 0).sum()) for batch in batches) == 230_218 + 248_052


def test_every_window_comes_once_an_epoch_and_the_next_epoch_differs():
    data = yeast()
    loader = data.train_dataloader()
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == len(loader)
    for batches in (first, second):
        index = torch.cat([batch.index for batch in batches])
        assert torch.equal(index[index >= 0], torch.arange(230_218 // 512 + 248_052 // 512 - 2))
    assert not torch.equal(first[0].tokens, second[0].tokens)


def test_windows_are_the_bases_the_plan_names_on_the_strand_it_names():
    data = yeast()
    dataset = data.train_dataset
    corpus = data.train_corpus
    batch = next(iter(data.train_dataloader()))
    windows = dataset.plan().windows(0, len(batch.index))
    assert windows.minus.any()
    assert not windows.minus.all()
    for row, tokens in enumerate(batch.tokens):
        letters = corpus.read(int(windows.starts[row]), int(windows.ends[row])).tobytes()
        expected = reverse_complement(letters) if windows.minus[row] else letters
        assert data.tokenizer.decode(tokens.numpy()) == expected.decode().upper()
        weights = np.array([0.1 if letter.islower() else 1.0 for letter in expected.decode()], dtype=np.float32)
        assert np.array_equal(batch.weights[row, : len(weights) - 1].numpy(), weights[1:])
        assert torch.equal(batch.labels[row, : len(weights) - 1], tokens[1 : len(weights)])
    assert (batch.weights[:, -1] == 0).all()
    assert (batch.labels[:, -1] == data.tokenizer.pad_id).all()


def test_validation_covers_the_held_out_contig_once_in_order():
    data = yeast(context_length=1000)
    reference = Reference("bundled:yeast/SkudIFO1802_1_GCF_947243775.1_Skud-IFO1802_genomic.fna.gz")
    text = "".join(data.tokenizer.decode(row.numpy()) for batch in data.val_dataloader() for row in batch.tokens)
    ((contig, length),) = reference.contigs.items()
    assert text == reference.fetch_array(contig, 0, length).tobytes().decode().upper()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_number_of_workers_changes_nothing(workers):
    alone, shared = yeast(), yeast(num_workers=workers)
    for one, other in zip(alone.train_dataloader(), shared.train_dataloader(), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.weights, other.weights)
        assert torch.equal(one.index, other.index)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_out_the_batches_of_one_process(ranks):
    single = list(yeast().train_dataloader())
    shards = []
    for rank in range(ranks):
        data = yeast()
        data.set_shard(rank, ranks)
        shards.append(list(data.train_dataloader()))
    assert len({len(shard) for shard in shards}) == 1
    merged = [shards[number % ranks][number // ranks] for number in range(len(shards[0]) * ranks)]
    for one, other in zip(single, merged, strict=False):
        assert torch.equal(one.tokens, other.tokens)
    for filler in merged[len(single) :]:
        assert (filler.index == -1).all()
        assert (filler.weights == 0).all()
