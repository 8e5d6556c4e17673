"""The number of micro-batches, changed during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.callbacks.needs import need_pipeline
from lightning_pipe.errors import ConfigError

__all__ = ["MicrobatchSchedule"]


class MicrobatchSchedule(Callback):
    """Splits batches into more, or fewer, micro-batches as training goes on.

    Micro-batches only split the batch of the loader: its rows, and with them learning rates and
    results, stay what they are. What changes is the bubble, and the memory of a micro-batch.

    With `PipelineStrategy(microbatch_size=...)` they change the effective batch: a step draws as
    many micro-batches. Epochs then have other lengths, so it may only change between them:
    `interval="epoch"`. `EffectiveBatchRescaler` follows.

    Args:
        milestones: Optimizer step, or epoch, to the number of micro-batches from there on. It has
            to say what is at 0.
        interval: Whether `milestones` counts optimizer steps (`"step"`) or epochs (`"epoch"`).

    Raises:
        ConfigError: No entry for 0, a number below 1, an unknown interval; at setup, another
            strategy than ours, or a number that the schedule cannot run.

    >>> MicrobatchSchedule({0: 8, 1000: 16}).at(999), MicrobatchSchedule({0: 8, 1000: 16}).at(1000)
    (8, 16)
    """

    def __init__(
        self, milestones: Mapping[int, int], interval: Literal["step", "epoch"] = "step"
    ) -> None:
        if 0 not in milestones or min(milestones) < 0 or min(milestones.values()) < 1:
            raise ConfigError(
                f"milestones={dict(milestones)}: give numbers of micro-batches >= 1 by the "
                f"{interval} that each begins at, and one for 0"
            )
        if interval not in ("step", "epoch"):
            raise ConfigError(f"interval={interval!r}: give 'step' or 'epoch'")
        self.milestones = dict(sorted(milestones.items()))
        self.interval = interval

    def at(self, moment: int) -> int:
        """The number of micro-batches at an optimizer step or epoch."""
        return self.milestones[max(start for start in self.milestones if start <= moment)]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy: Any = trainer.strategy
        need_pipeline(self, "changes the micro-batches of", trainer, "num_microbatches")
        if strategy.rows_per_step is not None and self.interval == "step":
            raise ConfigError(
                "MicrobatchSchedule(interval='step') with microbatch_size="
                f"{strategy.microbatch_size}: other micro-batches are other rows for a step, and "
                "other steps for the epoch that runs. Give interval='epoch', or leave "
                "microbatch_size out of the strategy"
            )
        if stage == "fit":
            for number in reversed(self.milestones.values()):  # each is checked, the first stays
                strategy.num_microbatches = number

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._draws(trainer):
            self._change(trainer, trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._draws(trainer):
            self._change(trainer, trainer.current_epoch + 1)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._draws(trainer):
            by_step = self.interval == "step"
            self._change(trainer, trainer.global_step if by_step else trainer.current_epoch)

    def _draws(self, trainer: Trainer) -> bool:
        strategy: Any = trainer.strategy
        return strategy.rows_per_step is not None

    def _change(self, trainer: Trainer, moment: int) -> None:
        strategy: Any = trainer.strategy
        before, now = strategy.num_microbatches, self.at(moment)
        if now != before:
            strategy.num_microbatches = now
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics({"pipeline/num_microbatches": float(now)}, trainer.global_step)
            rank_zero_info(
                f"num_microbatches {before} -> {now} at {self.interval} {moment}: "
                + (
                    "the batch is split into other pieces; the samples of an optimizer step stay "
                    "the same"
                    if strategy.rows_per_step is None
                    else f"a step draws {strategy.rows_per_step} rows"
                )
            )
