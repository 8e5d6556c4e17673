"""One verdict, after a few steps, on what limits the speed."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.attribution import MeasuredBubble, mean_bubble
from lightning_pipe.planning.doctor import Verdict, diagnose

__all__ = ["PipelineDoctor"]


class PipelineDoctor(Callback):
    """Looks at a few steps, and says once what limits the speed and what to change.

    Args:
        num_steps: Steps to look at, after two that are left out.

    Raises:
        ConfigError: `num_steps` below 1, or another strategy than ours.

    Example::

        Trainer(strategy="pipeline", devices=4, callbacks=[PipelineDoctor()])
    """

    def __init__(self, num_steps: int = 5) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps={num_steps}: give a number of steps from 1")
        self.num_steps = num_steps
        #: what was said, on every rank; None before
        self.verdict: Verdict | None = None
        self._found: list[MeasuredBubble] = []
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not hasattr(trainer.strategy, "gather_bubble"):
            raise ConfigError(
                f"PipelineDoctor looks at pipelines, and the strategy is "
                f"{type(trainer.strategy).__name__}: give Trainer(strategy='pipeline')"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.verdict, self._found, self._num_batches = None, [], 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self.verdict is not None or self._num_batches <= 2:
            return
        strategy: Any = trainer.strategy
        found: MeasuredBubble | None = strategy.gather_bubble()
        if found is None:
            return
        self._found.append(found)
        if len(self._found) < self.num_steps:
            return
        self.verdict = diagnose(mean_bubble(self._found), strategy.schedule)
        rank_zero_info(f"Pipeline doctor: {self.verdict}")
