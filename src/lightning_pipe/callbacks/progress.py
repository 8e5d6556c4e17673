"""One line of progress every few steps, and a table at the end; they suit a file too."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.callbacks.needs import need_steps, replicas
from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.attribution import MeasuredBubble
from lightning_pipe.planning.plan import Plan, columns, format_bytes, format_count
from lightning_pipe.stage_memory import StageMemory

__all__ = ["PipelineProgress"]


class PipelineProgress(Callback):
    """Reports the metrics of the progress bar, the throughput, the bubble and the busiest stage.

    The numbers, means over those steps, go to the logger too: `samples_per_s` (or `tokens_per_s`)
    and `bubble_fraction`, the mean over all ranks. Only where a line is printed do ranks tell each
    other what they measured. At the end comes a summary: the same numbers over all steps, and a row
    for each stage with its share of computing time in the last step that was reported, and its
    memory.
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
        need_steps(every_n_steps=every_n_steps)
        if count not in ("samples", "tokens"):
            raise ConfigError(f"count={count!r}: choose 'samples' or 'tokens'")
        self.every_n_steps = every_n_steps
        self.count = count
        self.unit = f"{count}/s"
        self._restart()
        self._reported_step = 0
        self._all_items, self._all_s = 0, 0.0
        self._all_bubbles: list[float] = []
        self._ideal_fraction: float | None = None
        self._stages: MeasuredBubble | None = None  # in the last step that was reported
        self._before_validation: dict[str, Any] = {}
        self._validation_metrics = {"v_num"}  # not shown in the lines of training

    def _restart(self) -> None:
        self._num_items = 0
        self._busy_s = 0.0
        self._since_s: float | None = None
        self._bubble_fractions: list[float] = []  # of this rank

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restart()
        self._all_items, self._all_s, self._stages = 0, 0.0, None
        self._all_bubbles = []
        self._reported_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now_s = time.perf_counter()
        reports = trainer.global_step >= self._reported_step + self.every_n_steps
        if self._since_s is not None:  # the first batch after a pause only starts the clock
            self._num_items += self._items(batch) * replicas(trainer)
            self._busy_s += now_s - self._since_s
            # a GPU's clock is read when its step is over: waiting for that each time costs time
            if reports or trainer.strategy.root_device.type == "cpu":
                self._note_bubble(trainer.strategy)
        self._since_s = now_s
        if reports:
            self._reported_step = trainer.global_step
            self._all_items += self._num_items
            self._all_s += self._busy_s
            self._all_bubbles += self._bubble_fractions
            self._report(trainer)
            self._restart()
            self._since_s = now_s

    def _note_bubble(self, strategy: Any) -> None:
        bubble = getattr(strategy, "bubble", None)
        if bubble is not None and bubble.measured_fraction is not None:
            self._bubble_fractions.append(bubble.measured_fraction)
            self._ideal_fraction = bubble.ideal_fraction

    def _mean_bubble(self, strategy: Any, own: Sequence[float]) -> float | None:
        """Over steps and ranks; each rank gives the steps that it measured."""
        if not hasattr(strategy, "mean_over_ranks"):
            return None
        found: float | None = strategy.mean_over_ranks(sum(own) / len(own) if own else None)
        return found

    def _bubble_text(self, measured: float) -> str:
        ideal = "" if self._ideal_fraction is None else f" (ideal {self._ideal_fraction:.1%})"
        return f"bubble {measured:.1%}{ideal}"

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        items, seconds = self._all_items + self._num_items, self._all_s + self._busy_s
        lines = [f"{trainer.global_step} steps"]
        if items and seconds:
            lines[0] += f", {items:,} {self.count} at {items / seconds:,.0f} {self.unit}"
        strategy: Any = trainer.strategy
        bubble = self._mean_bubble(strategy, self._all_bubbles + self._bubble_fractions)
        if bubble is not None:
            lines[0] += f", {self._bubble_text(bubble)}"
        if getattr(strategy, "plan", None) is not None:
            lines += _stage_rows(strategy.plan, self._stages, strategy.gather_memory())
        rank_zero_info("\n".join(lines))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since_s = None
        self._before_validation = dict(trainer.progress_bar_metrics)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # `trainer.validate` prints a table, and knows of no steps
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
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
        strategy: Any = trainer.strategy
        bubble = self._mean_bubble(strategy, self._bubble_fractions)
        if bubble is not None:
            values["bubble_fraction"] = bubble
            parts.append(self._bubble_text(bubble))
        if hasattr(strategy, "gather_bubble"):
            self._stages = strategy.gather_bubble() or self._stages
        if self._stages is not None and len(self._stages.stage_utilisations) > 1:
            busy = self._stages.stage_utilisations
            stage = max(range(len(busy)), key=busy.__getitem__)
            parts.append(f"busiest stage {stage} ({busy[stage]:.0%})")
        rank_zero_info(_line(trainer, parts))
        if trainer.is_global_zero and values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)


def _stage_rows(
    plan: Plan, measured: MeasuredBubble | None, held: Sequence[StageMemory]
) -> list[str]:
    """The stages as a table: what they are, how busy they were, what they held."""
    busy = () if measured is None else measured.stage_utilisations
    rows = [["stage", "rank", "units", "parameters", "busy", "tensors", "peak of rank"]]
    for stage, memory in zip(plan.stages, held, strict=False):
        share = f"{busy[stage.stage]:.0%}" if len(busy) == len(plan.stages) else "-"
        row = [str(stage.stage), str(stage.rank), str(stage.num_units)]
        row += [format_count(stage.parameters), share, format_bytes(memory.tensor_bytes)]
        rows.append([*row, format_bytes(memory.peak_bytes)])
    return columns(rows)


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
