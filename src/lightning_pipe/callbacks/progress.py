"""One line of progress every few steps, for runs whose output goes to a file."""

import time
from collections.abc import Collection, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.errors import ConfigError

__all__ = ["PipelineProgress"]


class PipelineProgress(Callback):
    """Reports the metrics of the progress bar, the throughput, and the bubble beside its ideal.

    The numbers, means over those steps, go to the logger too: `samples_per_s` (or `tokens_per_s`)
    and `bubble_fraction` of the rank that logs.
    With another strategy than ours there is no bubble to report, and the rest works as well.

    Args:
        every_n_steps: Steps between two lines.
        count: What a batch consists of: `"samples"` (length of its first tensor) or `"tokens"`
            (elements of its first tensor).

    >>> PipelineProgress(every_n_steps=10, count="tokens").unit
    'tokens/s'
    """

    def __init__(
        self, every_n_steps: int = 20, count: Literal["samples", "tokens"] = "samples"
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"every_n_steps={every_n_steps}: give a number of steps from 1")
        if count not in ("samples", "tokens"):
            raise ConfigError(f"count={count!r}: choose 'samples' or 'tokens'")
        self.every_n_steps = every_n_steps
        self.count = count
        self.unit = f"{count}/s"
        self._restart()
        self._reported_step = 0
        self._before_validation: dict[str, Any] = {}
        self._validation_metrics = {"v_num"}  # not shown in the lines of training

    def _restart(self) -> None:
        self._num_items = 0
        self._busy_s = 0.0
        self._since_s: float | None = None
        self._bubble_fractions: list[float] = []
        self._ideal_fraction: float | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()
        self._reported_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        if self._since_s is not None:  # the first batch after a pause only starts the clock
            self._num_items += self._items(batch)
            self._busy_s += now_s - self._since_s
        self._since_s = now_s
        bubble = getattr(trainer.strategy, "bubble", None)
        if bubble is not None and bubble.measured_fraction is not None:
            self._bubble_fractions.append(bubble.measured_fraction)
            self._ideal_fraction = bubble.ideal_fraction
        if trainer.global_step >= self._reported_step + self.every_n_steps:
            self._reported_step = trainer.global_step
            self._report(trainer)
            self._restart()
            self._since_s = now_s

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since_s = None
        self._before_validation = dict(trainer.progress_bar_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        before = self._before_validation
        metrics = trainer.progress_bar_metrics
        self._validation_metrics |= {n for n, v in metrics.items() if before.get(n) != v}
        rank_zero_info(_line(trainer, _texts(metrics, only=self._validation_metrics - {"v_num"})))

    def _items(self, batch: Any) -> int:
        first = _first_tensor(batch)
        if first is None:
            return 0
        return first.numel() if self.count == "tokens" else len(first)

    def _report(self, trainer: Trainer) -> None:
        metrics = trainer.progress_bar_metrics
        parts = _texts(metrics, only=metrics.keys() - self._validation_metrics)
        values: dict[str, float] = {}
        if self._busy_s > 0 and self._num_items:
            values[f"{self.count}_per_s"] = self._num_items / self._busy_s
            parts.append(f"{self._num_items / self._busy_s:,.0f} {self.unit}")
        if self._bubble_fractions:
            measured = sum(self._bubble_fractions) / len(self._bubble_fractions)
            values["bubble_fraction"] = measured
            ideal = "" if self._ideal_fraction is None else f" (ideal {self._ideal_fraction:.1%})"
            parts.append(f"bubble {measured:.1%}{ideal}")
        rank_zero_info(_line(trainer, parts))
        if trainer.is_global_zero and values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)


def _first_tensor(batch: Any) -> torch.Tensor | None:
    """The first tensor with rows in nested dicts, lists and tuples."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() > 0 else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)):
        return next((first for part in batch if (first := _first_tensor(part)) is not None), None)
    return None


def _texts(metrics: Mapping[str, Any], only: Collection[str]) -> list[str]:
    return [f"{name} {float(value):.3f}" for name, value in metrics.items() if name in only]


def _line(trainer: Trainer, parts: list[str]) -> str:
    total = trainer.estimated_stepping_batches
    of_total = f"/{total}" if isinstance(total, int) else ""
    return " | ".join([f"step {trainer.global_step}{of_total}", *parts])
