"""The pictures of docs/monitoring.md, from runs with the callbacks that they are about.

    python benchmarks/monitoring_example.py [--output docs/pictures]

1. Four ranks whose units wait instead of computing, one stage slower than the others; the number
   of micro-batches is raised during training. `TimelineRecorder` draws a step, `BubbleMonitor`
   measures the bubble over the steps.
2. A small network learns with SGD, in one process: with a batch, with one of twice as many micro-
   batches, and with that one and `EffectiveBatchRescaler("linear")`.
"""

from __future__ import annotations

import argparse
import csv
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.monitors import Module
from benchmarks.waiting import fit
from tests.helpers import run_ranks

MILESTONES = {0: 4, 8: 8, 16: 16, 24: 32}
ROWS = 8  # of a micro-batch
SAMPLES = 12_800


class _Uneven(Module):
    """Its last four units take longer."""

    def __init__(self, num_units: int, wait_s: float) -> None:
        super().__init__(num_units, wait_s)
        for block in list(self.blocks)[-4:]:
            block.wait_s *= 1.4


def watch(folder: str) -> None:
    """A run with the monitors; leaves a trace, a picture and tables in a folder."""
    from lightning_pipe import BubbleMonitor, MicrobatchSchedule, PipelineDoctor, TimelineRecorder

    pl.seed_everything(0, verbose=False)
    callbacks = [
        MicrobatchSchedule(MILESTONES),
        BubbleMonitor(every_n_steps=1),
        TimelineRecorder([12], directory=folder),
        PipelineDoctor(),
    ]
    logger = CSVLogger(folder, name="", version="")
    steps, rows = max(MILESTONES) + 8, max(MILESTONES.values())
    fit(_Uneven(16, 0.003), steps, rows, callbacks, num_microbatches=4, schedule="1f1b",
        logger=logger)  # fmt: skip


class Learner(pl.LightningModule):
    """A small network that learns what a fixed one of its kind does."""

    def __init__(self, lr: float = 0.04) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(samples: int) -> TensorDataset:
    """Inputs, and what another network makes of them."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(size, generator=generator) for size in ((8, 16), (16, 1)))
    x = torch.randn(samples, 8, generator=generator)
    return TensorDataset(x, (x @ first / 8**0.5).tanh() @ second / 2)


def learn(num_microbatches: int, reference: int | None, samples: int = SAMPLES) -> list[float]:
    """Losses of a run over all samples; with a reference, learning rates follow the batch."""
    from lightning_pipe import EffectiveBatchRescaler, PipelineStrategy

    warnings.simplefilter("ignore")
    module = Learner()
    callbacks = [] if reference is None else [EffectiveBatchRescaler("linear", reference=reference)]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, callbacks=callbacks,
        strategy=PipelineStrategy(num_microbatches=num_microbatches), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(samples), batch_size=num_microbatches * ROWS))
    return module.losses


def averaged(losses: list[float], batch: int, window: int = 640) -> list[float]:
    """Mean loss of each window of samples."""
    steps = window // batch
    return [sum(losses[i : i + steps]) / steps for i in range(0, len(losses) - steps + 1, steps)]


def draw_rescaler(path: Path) -> float:
    """Draws the three runs; returns how far the rescaled one is from the reference, at most."""
    from matplotlib.figure import Figure

    batch = 4 * ROWS
    curves = {
        f"M = 4: {batch} samples a step (reference)": averaged(learn(4, None), batch),
        f"M = 8: {2 * batch} samples, learning rate as it was": averaged(learn(8, None), 2 * batch),
        f"M = 8: {2 * batch} samples, linear rule": averaged(learn(8, batch), 2 * batch),
    }
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    for (label, losses), style in zip(curves.items(), ("-", ":", "--"), strict=True):
        axes.plot([640 * (i + 1) for i in range(len(losses))], losses, style, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("samples seen")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    reference, _, rescaled = curves.values()
    gaps = [abs(b - a) / a for a, b in zip(reference, rescaled, strict=True)]
    return max(gaps)


def draw_bubble(table: Path, path: Path) -> None:
    """Draws the measured bubble and its parts over the steps, beside the ideal one."""
    from matplotlib.figure import Figure

    with table.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("pipeline/bubble_fraction")]
    steps = [int(row["step"]) for row in rows]
    parts = {
        "fill and drain": "fill_drain", "imbalance": "imbalance",
        "communication": "communication", "host": "host",
    }  # fmt: skip
    values = [[float(row[f"pipeline/bubble_{name}"]) for row in rows] for name in parts.values()]
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(steps, values, labels=list(parts), alpha=0.8,
                   colors=["#56B4E9", "#E69F00", "#CC79A7", "#999999"])  # fmt: skip
    ideal = [float(row["pipeline/bubble_ideal"]) for row in rows]
    axes.step(steps, ideal, "k--", where="mid", label="ideal")
    axes.set_xlabel("step; M = " + ", ".join(f"{m} from {s}" for s, m in MILESTONES.items()))
    axes.set_ylabel("share of the time of all ranks")
    axes.set_xlim(min(steps), max(steps))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default=str(Path(__file__).parents[1] / "docs" / "pictures"))
    folder = Path(parser.parse_args().output)
    folder.mkdir(parents=True, exist_ok=True)
    gap = draw_rescaler(folder / "rescaler.png")
    print(f"rescaled and reference differ by {gap:.1%} at most, over windows of 640 samples")
    with tempfile.TemporaryDirectory() as runs:
        run_ranks(4, watch, runs, timeout=500)
        shutil.copy(Path(runs) / "timeline_step12.png", folder / "timeline.png")
        draw_bubble(Path(runs) / "metrics.csv", folder / "bubble.png")
        from lightning_pipe.cli import doctor

        doctor([runs])


if __name__ == "__main__":
    main()
