"""GenomeDataModule: training batches that resume exactly, and held-out contigs covered once, for Lightning.

The position in the stream is counted when a batch reaches the model (`on_after_batch_transfer`), not when a worker or
Lightning prefetches it, so a checkpoint holds exactly what was trained on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import lightning
import pandas as pd
import torch
import torch.distributed
from torch.utils.data import DataLoader, IterableDataset

from genomoe.data.collate import Batch
from genomoe.data.corpus import Corpus, restricted
from genomoe.data.dataset import StreamingGenomeDataset
from genomoe.data.open import open_corpus
from genomoe.data.sampling import SamplingConfig
from genomoe.data.splits import SplitConfig, find_leaks, split_segments
from genomoe.genome.alphabet import Tokenizer, make_tokenizer
from genomoe.genome.errors import GenoMoEError


class _Stream(IterableDataset[Batch]):
    """What a loader iterates over.

    Loader processes live for many epochs and hold a copy of the dataset, so where the stream stands is told them
    through shared memory, each time before an iteration begins.
    """

    def __init__(self, dataset: StreamingGenomeDataset) -> None:
        self.dataset = dataset
        self._position = torch.zeros(3, dtype=torch.int64).share_memory_()

    def begin(self) -> None:
        """Let the next iteration, in whatever process, start where the dataset stands now."""
        self._position.copy_(torch.tensor([self.dataset.epoch, self.dataset.consumed, self.dataset.steps]))

    def __iter__(self) -> Iterator[Batch]:
        dataset = self.dataset
        dataset.epoch, dataset.consumed, dataset.steps = self._position.tolist()
        return iter(dataset)


def _heed_parent_only(worker: int) -> None:
    """Keep a loader process alive when Ctrl-C or SIGTERM is sent to all processes, as terminals and clusters do.

    The training process is asked to stop, too, needs batches until it has, and then terminates its loaders.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":  # elsewhere a process cannot see who sent a signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_termination, daemon=True).start()


def _await_termination() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)


class BatchLoader:
    """Iterates over the rest of the dataset's current epoch; each new iteration after a full one is a new epoch.

    In a training loop of your own, call ``dataset.advance()`` after each batch: ``dataset.state_dict()`` then says
    where to continue. Under Lightning, GenomeDataModule does so.

    Args:
        dataset: the stream; its `epoch` and `consumed` say where it stands.
        num_workers: loader processes, which live as long as this object; 0 loads in this one.
        pin_memory: page-lock the batches.
        advance: go on to the next epoch at the end (training); False repeats the same one (validation).
        start_method: 'fork', 'spawn' or 'forkserver' for the loader processes; None is the platform's default.
    """

    def __init__(
        self,
        dataset: StreamingGenomeDataset,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        advance: bool = True,
        start_method: str | None = None,
    ) -> None:
        self.dataset, self.pin_memory, self.advance = dataset, pin_memory, advance
        self._stream = _Stream(dataset)
        self._batches: Iterable[Batch] = self._stream
        if num_workers:
            self._batches = DataLoader(
                self._stream,
                batch_size=None,
                num_workers=num_workers,
                prefetch_factor=4,
                persistent_workers=True,
                multiprocessing_context=start_method,
                worker_init_fn=_heed_parent_only,
                generator=torch.Generator(),  # leaves the program's random numbers alone, as no processes do
            )

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[Batch]:
        dataset = self.dataset
        if self.advance and dataset.remaining <= 0:
            dataset.set_epoch(dataset.epoch + 1)
        self._stream.begin()
        for batch in self._batches:
            yield batch.pin_memory() if self.pin_memory else batch
        if self.advance:
            dataset.set_epoch(dataset.epoch + 1)


class GenomeDataModule(lightning.LightningDataModule):
    """Windows of DNA for pretraining.

    Args:
        train: sequence files, folders or globs, a mapping of source name to such, a corpus description (.yaml) or a
            store (.zarr).
        val: the same for what is held out; every base of it is covered once by non-overlapping windows.
        corpus: one description or store for both, divided as `split` says; instead of train and val.
        split: fields of SplitConfig (by, valid, test, valid_fraction...).
        context_length: tokens of a window.
        batch_size: windows of a batch on each rank.
        val_batch_size: the same for validation; None means batch_size.
        seed: decides the order of windows and strands, nothing else.
        num_workers: loader processes; the batches don't depend on it.
        reverse_complement: probability of reading a training window from the minus strand.
        soft_mask_weight: loss weight of soft-masked (lower-case) bases.
        pack: THD batches of about batch_size x context_length tokens instead of fixed windows.
        pad_to_multiple: when packing, round every sequence up to a multiple of this many tokens.
        tokenizer: a name ('nucleotide', 'byte', 'kmer6'), a dict, or a Tokenizer.
        weights: source name to sampling weight; 2 means twice as often as the source's size would give.
        sampling: further fields of SamplingConfig (mode, replacement, stride, samples_per_epoch...).
    """

    def __init__(
        self,
        train: Any = None,
        val: Any = (),
        *,
        corpus: Any = None,
        split: Mapping[str, Any] | None = None,
        context_length: int = 512,
        batch_size: int = 16,
        val_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        reverse_complement: float = 0.5,
        soft_mask_weight: float = 0.1,
        pack: bool = False,
        pad_to_multiple: int = 1,
        tokenizer: str | Mapping[str, Any] | Tokenizer = "nucleotide",
        weights: Mapping[str, float] | None = None,
        sampling: Mapping[str, Any] | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("context_length", context_length, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("pad_to_multiple", pad_to_multiple, 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise GenoMoEError(f"data.{name} must be an integer of at least {least}, got {value!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise GenoMoEError(f"data.seed must be an integer, got {seed!r}.")
        if not 0 <= soft_mask_weight <= 1:
            raise GenoMoEError(f"data.soft_mask_weight must lie in [0, 1], got {soft_mask_weight}.")
        if (corpus is None) == (not train):
            raise GenoMoEError("Name either data.train (and data.val) or data.corpus (with data.split).")
        if corpus is not None and val:
            raise GenoMoEError("data.corpus is divided by data.split; leave data.val empty.")
        self.corpus_spec = corpus
        parts: dict[str, Any] = {k: tuple(v) if k in ("valid", "test") else v for k, v in (split or {}).items()}
        self.split = SplitConfig(**parts)
        self.tokenizer: Tokenizer = make_tokenizer(tokenizer)
        self.train_paths, self.val_paths = train, val
        self.context_length, self.batch_size = context_length, batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.num_workers = num_workers
        self.soft_mask_weight = soft_mask_weight
        self.pack, self.pad_to_multiple = pack, pad_to_multiple
        self.weights = weights
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        window = context_length * self.tokenizer.bases_per_token
        self.sampling = SamplingConfig(
            window=window,
            seed=seed,
            reverse_complement=reverse_complement,
            **{"lane_run": batch_size, **dict(sampling or {})},
        )
        self.shard: tuple[int, int] | None = None
        self.train_corpus: Corpus | None = None
        self.val_corpus: Corpus | None = None
        self.test_corpus: Corpus | None = None
        self._train: StreamingGenomeDataset | None = None
        self._pending: dict[str, Any] | None = None

    def set_shard(self, rank: int, world_size: int) -> None:
        """Tell which data-parallel rank this is where that isn't the global rank (expert or context parallelism)."""
        self.shard = (rank, world_size)

    def setup(self, stage: str | None = None) -> None:
        """Open the files (Lightning calls this in every process)."""
        if self.train_corpus is not None:
            return
        if self.corpus_spec is not None:
            whole = open_corpus(self.corpus_spec, self.weights)
            parts = split_segments(whole, self.split)
        else:
            whole = open_corpus(self.train_paths, self.weights)
            parts = {"train": whole.segments}
        views = {name: restricted(whole, part) for name, part in parts.items() if len(part.starts)}
        self.train_corpus = views["train"]
        self.val_corpus = open_corpus(self.val_paths) if self.val_paths else views.get("valid")
        self.test_corpus = views.get("test")

    @property
    def train_dataset(self) -> StreamingGenomeDataset:
        """The training stream of this rank."""
        self.setup()
        if self._train is None:
            assert self.train_corpus is not None
            self._train = self._dataset(self.train_corpus, self.sampling, self.batch_size, pack=self.pack)
            if self._pending is not None:
                self._train.load_state_dict(self._pending)
                self._pending = None
        self._train.set_shard(*self._rank())
        return self._train

    def train_dataloader(self) -> BatchLoader:
        """The rest of the current epoch, then, iterated again, the next epoch."""
        return BatchLoader(self.train_dataset, num_workers=self.num_workers, pin_memory=self.pin_memory, advance=True)

    def val_dataloader(self) -> BatchLoader | list[Any]:
        """Non-overlapping windows that cover each held-out contig once, plus strand, in genome order."""
        self.setup()
        return self._held_out_loader(self.val_corpus)

    def test_dataloader(self) -> BatchLoader | list[Any]:
        """The same for the test split, where data.split has one."""
        self.setup()
        return self._held_out_loader(self.test_corpus)

    def _held_out_loader(self, corpus: Corpus | None) -> BatchLoader | list[Any]:
        if corpus is None:
            return []
        config = SamplingConfig(
            window=self.sampling.window, mode="stride", shuffle=False, reverse_complement=0.0, lane_run=1
        )
        dataset = self._dataset(corpus, config, self.val_batch_size, pack=False)
        dataset.set_shard(*self._rank())
        dataset.fill_last = dataset.world_size > 1
        return BatchLoader(dataset, num_workers=0, pin_memory=self.pin_memory, advance=False)

    def leaks(self, **options: Any) -> pd.DataFrame:
        """Held-out windows that nearly equal training sequence (see genomoe.data.splits.find_leaks)."""
        self.setup()
        if self.train_corpus is None or self.val_corpus is None:
            raise GenoMoEError("Nothing is held out, so there is nothing to compare with the training data.")
        return find_leaks(self.train_corpus, self.val_corpus, **options)

    def _dataset(
        self, corpus: Corpus, config: SamplingConfig, batch_size: int, *, pack: bool
    ) -> StreamingGenomeDataset:
        return StreamingGenomeDataset(
            corpus,
            config,
            self.tokenizer,
            batch_size=batch_size,
            context_length=self.context_length,
            soft_mask_weight=self.soft_mask_weight,
            pack=pack,
            pad_to_multiple=self.pad_to_multiple,
        )

    def _rank(self) -> tuple[int, int]:
        if self.shard is not None:
            return self.shard
        if self.trainer is not None:
            return self.trainer.global_rank, self.trainer.world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Batches move themselves."""
        return batch.to(device, non_blocking=True)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Counts the training batches that reach the model."""
        if self.trainer is not None and self.trainer.training and self._train is not None:
            self._train.advance()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the training stream stands (see StreamingGenomeDataset.state_dict)."""
        return self.train_dataset.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with exactly the batch after the last one trained on."""
        if self._train is None:
            self._pending = state_dict
        else:
            self._train.load_state_dict(state_dict)
