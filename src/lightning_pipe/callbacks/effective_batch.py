"""Learning rates that follow the effective batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch.optim.lr_scheduler import LambdaLR

from lightning_pipe.callbacks.needs import replicas
from lightning_pipe.callbacks.scaling import (
    Rule,
    TimeMap,
    lr_scale,
    parts_of,
    scale_adam,
    scale_optimizer,
    scale_scheduler,
    shorten_warmup,
    warp,
)
from lightning_pipe.errors import ConfigError
from lightning_pipe.split.rows import count_rows, has_rows

__all__ = ["EffectiveBatchRescaler"]


class EffectiveBatchRescaler(Callback):
    """Rescales learning rates and warm-up when the samples of an optimizer step change.

    The effective batch is rows of a batch (of the first one, or what a step draws with
    `microbatch_size`) x batches that are accumulated x replicas. It is compared with the reference:
    the argument, else that of the checkpoint that is resumed, else what it was
    before it changed during training (`GradientAccumulationScheduler`, `MicrobatchSchedule`). The
    number of micro-batches alone does not change it where they only split a batch.

    Every change is reported, logged (`pipeline/effective_batch`, `pipeline/lr_scale`) and kept in
    the checkpoint.

    Args:
        rule: `"linear"`, `"sqrt"` or `"none"`, see `lightning_pipe.callbacks.scaling.lr_scale`.
        reference: The effective batch that learning rates and warm-up were chosen for, in samples.
        warmup_steps: Length of the warm-up, at the reference, of schedulers that do not tell it:
            the lambdas of `LambdaLR`. `LinearLR`, `SequentialLR` and `OneCycleLR` tell it.
        scale_betas: With `rule="sqrt"`, move the betas and eps of Adam too.

    Raises:
        ConfigError: An unknown rule, a reference below 1, `scale_betas` with another rule; at the
            start of training, a scheduler or optimizer that cannot be rescaled.

    Example::

        Trainer(callbacks=[EffectiveBatchRescaler("sqrt", reference=256)])
    """

    def __init__(
        self,
        rule: Rule = "linear",
        reference: int | None = None,
        *,
        warmup_steps: int | None = None,
        scale_betas: bool = False,
    ) -> None:
        lr_scale(rule, 1.0)
        if reference is not None and reference < 1:
            raise ConfigError(f"reference={reference}: give the samples of an optimizer step, >= 1")
        if warmup_steps is not None and warmup_steps < 1:
            raise ConfigError(f"warmup_steps={warmup_steps}: give a number of steps >= 1, or none")
        if scale_betas and rule != "sqrt":
            raise ConfigError(f"scale_betas=True belongs to rule='sqrt', not to {rule!r}")
        self.rule: Rule = rule
        self.reference = reference
        self.warmup_steps = warmup_steps
        self.scale_betas = scale_betas
        #: what has been done, oldest first
        self.history: list[dict[str, Any]] = []
        self._current: int | None = None  # effective batch that the learning rates are for
        self._origin: int | None = None  # ... that the lambdas are written for
        self._scale = 1.0
        self._rows: int | None = None
        self._points: list[tuple[float, float]] = []
        self._times: list[TimeMap] = []

    @property
    def effective_batch(self) -> int | None:
        """Samples of an optimizer step, from the first batch on."""
        return self._current

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "effective_batch": self._current,
            "origin": self._origin,
            "lr_scale": self._scale,
            "points": [list(point) for point in self._points],
            "history": self.history,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._current = state_dict["effective_batch"]
        self._origin = state_dict["origin"]
        self._scale = state_dict["lr_scale"]
        self._points = [(a, b) for a, b in state_dict["points"]]
        self.history = list(state_dict["history"])

    # ------------------------------------------------------------------ hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = None
        self._times = []
        for config in trainer.lr_scheduler_configs:
            if self.rule != "none":
                list(parts_of(config.scheduler))
            if self.warmup_steps is not None and config.interval == "step":
                self._warp(trainer, config.scheduler)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        rows = getattr(trainer.strategy, "rows_per_step", None)
        if rows is None and self._rows is None:
            self._rows = _rows(batch)
        now = (rows or self._rows or 0) * trainer.accumulate_grad_batches * replicas(trainer)
        if self._current is None:
            self._current = self._origin = self.reference or now
        if now != self._current:
            self._rescale(trainer, now)
        elif batch_idx or len(self.history):
            return
        pl_module.log("pipeline/effective_batch", float(now), on_step=True, on_epoch=False)
        pl_module.log("pipeline/lr_scale", self._scale, on_step=True, on_epoch=False)

    # ------------------------------------------------------------------ one change

    def _warp(self, trainer: Trainer, scheduler: Any) -> None:
        assert self.warmup_steps is not None
        total = float(trainer.estimated_stepping_batches)
        for part in parts_of(scheduler):
            if isinstance(part, LambdaLR):
                time = TimeMap(self.warmup_steps, total, self._points)
                warp(part, time)
                self._times.append(time)

    def _rescale(self, trainer: Trainer, now: int) -> None:
        assert self._current is not None
        assert self._origin is not None
        before, ratio = self._current, now / self._current
        scale = lr_scale(self.rule, ratio)
        notes: list[str] = []
        for optimizer in trainer.optimizers:
            scale_optimizer(optimizer, scale)
            if self.scale_betas:
                scale_adam(optimizer, ratio)
        for config in trainer.lr_scheduler_configs:
            scale_scheduler(config.scheduler, scale)
            if config.interval == "step":
                notes += shorten_warmup(config.scheduler, ratio)
        for time in self._times:
            time.change(trainer.global_step, now / self._origin)
            self._points = time.points
        self._current = now
        self._scale *= scale
        entry = {"step": trainer.global_step, "old": before, "new": now, "lr_scale": scale}
        self.history.append({**entry, "rule": self.rule, "notes": notes})
        rates = [group["lr"] for o in trainer.optimizers for group in o.param_groups]
        rank_zero_info(
            f"effective batch {before} -> {now} samples a step: learning rates x {scale:g} (rule "
            f"'{self.rule}', now {', '.join(f'{float(rate):.3g}' for rate in rates)})"
            + "".join(f"; {note}" for note in notes)
        )


def _rows(batch: Any) -> int:
    if not has_rows(batch):
        raise ConfigError(
            "EffectiveBatchRescaler cannot tell how many samples a batch has: no tensor in it has "
            "rows. Leave the callback out"
        )
    return count_rows(batch)
