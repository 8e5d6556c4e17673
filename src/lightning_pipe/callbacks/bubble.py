"""The measured bubble, beside the ideal one, and where it is from."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.callbacks.needs import need_pipeline, need_steps
from lightning_pipe.planning.attribution import MeasuredBubble, mean_bubble
from lightning_pipe.planning.doctor import Run
from lightning_pipe.planning.evidence import FILE_NAME, to_text

__all__ = ["BubbleMonitor"]

_KEPT = 10  # measurements of which the mean is left for the doctor
_PARTS = ("fill_drain", "imbalance", "communication", "host")


class BubbleMonitor(Callback):
    """Logs how idle the ranks are, every few steps, and why.

    To the logger go, as fractions of the time of all ranks: `pipeline/bubble_fraction`, its parts
    `pipeline/bubble_fill_drain`, `.._imbalance`, `.._communication` and `.._host`, which add up to
    it, `pipeline/bubble_ideal` (what the schedule has with equal stages and free transfers),
    `pipeline/bubble_fraction/rank_0`, ..., and `pipeline/utilisation/stage_0`, .... Without a
    logger, a summary is printed at the end of training. The first step is left out: it is slower.
    With a logger that has a directory, `pipeline.json` is left there for `lightning-pipe doctor`.

    Args:
        every_n_steps: Batches between two measurements. Each one gathers the times of all ranks.

    Raises:
        ConfigError: `every_n_steps` below 1, or another strategy than ours.

    >>> BubbleMonitor(every_n_steps=20).every_n_steps
    20
    """

    def __init__(self, every_n_steps: int = 50) -> None:
        need_steps(every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps
        #: what was measured last, on every rank
        self.latest: MeasuredBubble | None = None
        self._sums: dict[str, float] = {}
        self._found: deque[MeasuredBubble] = deque(maxlen=_KEPT)
        self._num_measured = 0
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        need_pipeline(self, "measures", trainer, "gather_bubble")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sums, self._num_measured, self._num_batches = {}, 0, 0
        self._found.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        # Every rank measures at the same steps. Short runs are measured once, at their second step.
        if self._num_batches % self.every_n_steps and self._num_batches != 2:
            return
        strategy: Any = trainer.strategy
        if self._num_batches == 1 or strategy.bubble is None:
            return
        found: MeasuredBubble | None = strategy.gather_bubble()
        if found is None:
            return
        self.latest = found
        sizes: Run = strategy.sizes
        values = _values(found, strategy.bubble.ideal_fraction)
        values["pipeline/num_microbatches"] = float(sizes.num_microbatches)
        self._num_measured += 1
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._found.append(found)
        directory = trainer.log_dir  # every rank has to ask for it, though one writes
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
            if trainer.loggers and directory:
                self._write(sizes, Path(directory))

    def _write(self, sizes: Run, directory: Path) -> None:
        """Leaves what `lightning-pipe doctor` reads."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE_NAME).write_text(to_text(sizes, mean_bubble(list(self._found))))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._num_measured and not trainer.loggers:
            rank_zero_info(self.summary())

    def summary(self) -> str:
        """The means over all measurements, for people.

        >>> BubbleMonitor().summary()
        'no bubble was measured'
        """
        if not self._num_measured:
            return "no bubble was measured"
        means = {name: value / self._num_measured for name, value in self._sums.items()}
        parts = ", ".join(
            f"{part.replace('_', ' and ')} {means[f'pipeline/bubble_{part}']:.1%}"
            for part in _PARTS
        )
        return (
            f"bubble {means['pipeline/bubble_fraction']:.1%} "
            f"(ideal {means['pipeline/bubble_ideal']:.1%}): {parts}"
        )


def _values(found: MeasuredBubble, ideal_fraction: float) -> dict[str, float]:
    values = {
        "pipeline/bubble_fraction": found.bubble_fraction,
        "pipeline/bubble_ideal": ideal_fraction,
    }
    for part in _PARTS:
        values[f"pipeline/bubble_{part}"] = getattr(found, f"{part}_fraction")
    for rank, fraction in enumerate(found.rank_fractions):
        values[f"pipeline/bubble_fraction/rank_{rank}"] = fraction
    for stage, utilisation in enumerate(found.stage_utilisations):
        values[f"pipeline/utilisation/stage_{stage}"] = utilisation
    return values
