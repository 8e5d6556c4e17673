"""Trains for a long time and looks whether anything grows: memory, files, threads, tensors, cuts.

Two ranks, sentences of changing lengths, a validation and a checkpoint every few steps, metrics and
a logger. What is there after a warm-up must be there at the end, and no more.

    python benchmarks/soak.py --steps 2000
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

WIDTH, WORDS, ROWS = 16, 32, 8
LENGTHS = (4, 7, 5, 9, 6, 8)
#: what is read, and by how much it may be more at the end than after the warm-up
LIMITS = {"rss_mb": 8.0, "files": 0, "threads": 0, "tensors": 0, "cuts": 0, "plans": 0}


class Sentences(IterableDataset):
    """Batches of random words, of changing lengths; now and then a short one."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __iter__(self) -> Any:
        source = torch.Generator().manual_seed(0)
        for step in range(self.steps):
            rows = ROWS - 3 if step % 12 == 10 else ROWS
            length = LENGTHS[step % len(LENGTHS)]
            yield torch.randint(0, WORDS, (rows, length), generator=source)


class Model(pl.LightningModule):
    """Guesses the word before, with dropout and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.mean = MeanMetric()
        self.steps: list[int] = []

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def _loss(self, words: Tensor) -> Tensor:
        return F.cross_entropy(self(words[:, 1:]).flatten(0, 1), words[:, :-1].flatten())

    def training_step(self, words: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(words)
        self.mean(loss)
        self.log("loss", loss, batch_size=len(words))
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=len(words))
        return loss

    def validation_step(self, words: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(words), batch_size=len(words))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Gauge(pl.Callback):
    """Takes readings every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.readings: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self.readings.append(read(trainer))


def read(trainer: Any) -> dict[str, float]:
    """What is there now."""
    gc.collect()
    process = psutil.Process()
    pipeline = trainer.strategy._pipeline
    found = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return {
        "step": trainer.global_step,
        "rss_mb": process.memory_info().rss / 1e6,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "tensors": len(found),
        "cuts": len(pipeline._cuts._cuts),
        "plans": len(pipeline._schedules),
    }


def soak(steps: int, every: int, folder: str, ranks: int = 2) -> list[dict[str, float]]:
    """Trains on this job's ranks; what this one has read."""
    from lightning_pipe import PipelineStrategy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    gauge = Gauge(every)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=PipelineStrategy(num_microbatches=4),
        max_steps=steps,
        val_check_interval=every,
        limit_val_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=5,
        logger=CSVLogger(folder),
        callbacks=[
            gauge,
            ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=2, monitor="loss"),
        ],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    loader = DataLoader(Sentences(steps + 1), batch_size=None)
    trainer.fit(Model(), loader, DataLoader(Sentences(2), batch_size=None))
    return gauge.readings


def growth(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    """By how much each reading is more in the last third than in the one before.

    The first third is the warm-up; medians, since a reading may fall into a moment of work.
    """
    third = len(readings) // 3
    before, after = readings[third : 2 * third], readings[2 * third :]
    return {
        name: statistics.median(r[name] for r in after) - statistics.median(r[name] for r in before)
        for name in LIMITS
    }


def main() -> None:
    """Prints what each third had, and ends with 1 if anything grew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=10, help="steps between two readings")
    parser.add_argument("--json", type=Path, help="write the readings there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readings = soak(options.steps, options.every, folder)
    if torch.distributed.get_rank() != 0:
        return
    if options.json:
        options.json.write_text(json.dumps(readings))
    grown = growth(readings)
    first, last = readings[len(readings) // 3], readings[-1]
    for name in LIMITS:
        print(f"{name:>8}: {first[name]:10.1f} {last[name]:10.1f}  grown by {grown[name]:.2f}")
    bad = [name for name, limit in LIMITS.items() if grown[name] > limit]
    raise SystemExit(f"grows: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
