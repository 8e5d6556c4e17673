"""One verdict, after a few steps, on what limits the speed; later, if the loss jumps."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_pipe.callbacks.needs import need_pipeline, need_steps
from lightning_pipe.planning.attribution import MeasuredBubble, mean_bubble
from lightning_pipe.planning.doctor import AROUND, Loss, Run, Verdict, examine, loss_jump
from lightning_pipe.split.rows import count_rows, has_rows

__all__ = ["PipelineDoctor"]


class PipelineDoctor(Callback):
    """Looks at a few steps, and says once what limits the speed and what to change.

    Besides, it says when the batch has rows for fewer micro-batches than were asked for, when units
    are recomputed although there is memory, and, at any time, when the loss jumps after the number
    of micro-batches or the accumulation was changed. `lightning-pipe doctor` says the same of a run
    that is over.

    Args:
        num_steps: Steps to look at, after two that are left out.

    Raises:
        ConfigError: `num_steps` below 1, or another strategy than ours.

    Example::

        Trainer(strategy="pipeline", devices=4, callbacks=[PipelineDoctor()])
    """

    def __init__(self, num_steps: int = 5) -> None:
        need_steps(num_steps=num_steps)
        self.num_steps = num_steps
        #: what was said first, on every rank; None before
        self.verdict: Verdict | None = None
        #: all that was said, in order
        self.verdicts: list[Verdict] = []
        self._found: list[MeasuredBubble] = []
        self._losses = _Losses()
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        need_pipeline(self, "looks at", trainer, "gather_bubble")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.verdict, self._found, self._num_batches = None, [], 0
        self.verdicts, self._losses = [], _Losses()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        jump = self._losses.after(trainer, outputs, batch)
        if jump is not None:
            self._say([jump])
        if self.verdict is not None or self._num_batches <= 2:
            return
        strategy: Any = trainer.strategy
        found: MeasuredBubble | None = strategy.gather_bubble()
        if found is None:
            return
        self._found.append(found)
        if len(self._found) < self.num_steps:
            return
        held = strategy.gather_memory()
        fullest = max((one.peak_bytes / one.device_bytes for one in held), default=None)
        run: Run = replace(strategy.sizes, memory_fraction=fullest)
        said = examine(mean_bubble(self._found), run)
        self.verdict = said[0]
        self._say(said)

    def _say(self, verdicts: Any) -> None:
        self.verdicts += verdicts
        for verdict in verdicts:
            rank_zero_info(f"Pipeline doctor: {verdict}")


class _Losses:
    """The losses around a change of the sizes of a step; they are read when there was one."""

    def __init__(self) -> None:
        self._before: deque[Tensor] = deque(maxlen=AROUND)
        self._after: list[Tensor] = []
        self._asked: tuple[Any, int] | None = None
        self._last = (0, 0)  # micro-batches and accumulated batches of the step before
        self._samples: dict[tuple[int, int], int] = {}
        self._change: tuple[tuple[int, int], tuple[int, int]] | None = None

    def after(self, trainer: Trainer, outputs: Any, batch: Any) -> Verdict | None:
        """Notes a step; says whether the loss has jumped."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if not isinstance(loss, Tensor):
            return None
        strategy: Any = trainer.strategy
        accumulated = trainer.accumulate_grad_batches
        sizes = (strategy.sizes.num_microbatches, accumulated)
        asked = (strategy.num_microbatches, accumulated)
        rows = count_rows(batch, {}) * accumulated if has_rows(batch) else 0
        if asked != self._asked:
            if self._asked is not None and len(self._before) == AROUND:
                self._change, self._after = (self._last, sizes), []
            else:
                self._before.clear()
            self._asked = asked
        self._samples[sizes] = max(rows, self._samples.get(sizes, 0))
        self._last = sizes
        if self._change is None:
            self._before.append(loss.detach() * accumulated)
            return None
        self._after.append(loss.detach() * accumulated)
        return self._compare() if len(self._after) == AROUND else None

    def _compare(self) -> Verdict | None:
        assert self._change is not None
        losses: list[Loss] = []
        for (pieces, accumulated), values in zip(
            self._change, (self._before, self._after), strict=True
        ):
            samples = self._samples[pieces, accumulated]
            losses += [(pieces, samples, float(value)) for value in values]
        self._before, self._after, self._change = deque(self._after, AROUND), [], None
        return loss_jump(losses)
