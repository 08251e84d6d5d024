"""A training process for test_resume: Lightning, a checkpoint every few steps, and one log line per batch trained on.

Usage: python train_and_log.py DATA FOLDER WORKERS STEPS
"""

import hashlib
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from genomoe.data.datamodule import GenomeDataModule


class Logged(lightning.LightningModule):
    """Predicts the next token from the present one, and logs a hash of every batch with its loss."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(16, 16)
        self.log_file = log

    def training_step(self, batch, step):
        logits = self.table(batch.tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten().long(), reduction="none")
        loss = (loss * batch.weights.flatten()).sum() / batch.weights.sum()
        digest = hashlib.sha256()
        for tensor in (batch.tokens, batch.labels, batch.weights, batch.index):
            digest.update(tensor.numpy().tobytes())
        with open(self.log_file, "a") as out:
            out.write(f"{self.global_step} {digest.hexdigest()} {loss.item().hex()}\n")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(data: str, folder: str, workers: int, steps: int) -> None:
    torch.set_num_threads(1)
    checkpoints = Path(folder) / "checkpoints"
    last = checkpoints / "last.ckpt"
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(checkpoints, every_n_train_steps=3, save_last=True, save_top_k=1)],
    )
    module = GenomeDataModule(
        [data],
        context_length=64,
        batch_size=4,
        seed=3,
        num_workers=workers,
        sampling={"block_bases": 1000, "group_bases": 4000, "lanes": 2},
    )
    trainer.fit(Logged(Path(folder) / "log.txt"), module, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
