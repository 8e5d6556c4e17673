"""What every stage holds, beside what the plan expected."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_pipe.callbacks.needs import need_pipeline, need_steps
from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.plan import columns, format_bytes
from lightning_pipe.stage_memory import StageMemory

__all__ = ["StageMemoryMonitor"]

_PARTS = ("weights", "gradients", "optimizer", "activations", "peak", "predicted")


class StageMemoryMonitor(Callback):
    """Logs what every stage holds, every few steps, and warns before a device is full.

    To the logger go, in bytes, `pipeline/memory_weights_bytes/stage_0`, `.._gradients_bytes`,
    `.._optimizer_bytes`, `.._activations_bytes` (kept for backwards at most at a time, counted in
    that very step), `.._peak_bytes` (of the stage's rank: its device's allocator, on the CPU its
    process) and `.._predicted_bytes` (the plan's, for the stage). Without a logger, a table is
    printed at the end of training.

    Args:
        every_n_steps: Batches between two measurements; the second batch is measured as well.
        warn_fraction: Warns, once per stage, when the peak is more than this share of the device.

    Raises:
        ConfigError: An argument out of its range, or another strategy than ours.

    >>> StageMemoryMonitor(every_n_steps=20).warn_fraction
    0.9
    """

    def __init__(self, every_n_steps: int = 50, warn_fraction: float = 0.9) -> None:
        need_steps(every_n_steps=every_n_steps)
        if not 0 < warn_fraction <= 1:
            raise ConfigError(f"warn_fraction={warn_fraction}: give a share above 0, 1 at most")
        self.every_n_steps = every_n_steps
        self.warn_fraction = warn_fraction
        #: what was measured last, by stage, on every rank
        self.latest: tuple[StageMemory, ...] = ()
        self._warned: set[int] = set()
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        need_pipeline(self, "measures", trainer, "gather_memory")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.latest, self._num_batches = (), 0
        self._warned.clear()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._measures:
            strategy: Any = trainer.strategy
            strategy.count_activations()

    @property
    def _measures(self) -> bool:
        return self._num_batches == 2 or self._num_batches % self.every_n_steps == 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._measures:
            return
        strategy: Any = trainer.strategy
        found: tuple[StageMemory, ...] = strategy.gather_memory()
        if not found:
            return
        self.latest = found
        if not trainer.is_global_zero:
            return
        for logger in trainer.loggers:
            logger.log_metrics(_values(found), step=trainer.global_step)
        for one in found:
            self._warn(one, strategy)

    def _warn(self, one: StageMemory, strategy: Any) -> None:
        share = one.peak_bytes / one.device_bytes
        if share <= self.warn_fraction or one.stage in self._warned:
            return
        self._warned.add(one.stage)
        advice = strategy.memory_advice(one.rank)
        rank_zero_warn(
            f"stage {one.stage} is on rank {one.rank}, which held {format_bytes(one.peak_bytes)} "
            f"at its peak, {share:.0%} of its {format_bytes(one.device_bytes)}"
            f"{f'. To hold less: {advice}' if advice else ''}"
        )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.loggers and self.latest:
            rank_zero_info(self.summary())

    def summary(self) -> str:
        """What was measured last, as a table for people.

        >>> StageMemoryMonitor().summary()
        'no memory was measured'
        """
        if not self.latest:
            return "no memory was measured"
        rows = [["stage", "rank", *_PARTS]]
        for one in self.latest:
            sizes = _sizes(one)
            texts = ["-" if sizes[p] is None else format_bytes(sizes[p] or 0) for p in _PARTS]
            rows.append([str(one.stage), str(one.rank), *texts])
        return "\n".join(["Memory of the stages", *columns(rows)])


def _sizes(one: StageMemory) -> dict[str, int | None]:
    sizes = (one.weight_bytes, one.gradient_bytes, one.optimizer_bytes, one.activation_bytes)
    return dict(zip(_PARTS, (*sizes, one.peak_bytes, one.predicted_bytes), strict=True))


def _values(found: tuple[StageMemory, ...]) -> dict[str, float]:
    return {
        f"pipeline/memory_{part}_bytes/stage_{one.stage}": float(number)
        for one in found
        for part, number in _sizes(one).items()
        if number is not None
    }
