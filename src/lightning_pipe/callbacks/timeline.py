"""What every rank did in chosen steps, as a trace and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_pipe.callbacks.needs import need_pipeline
from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.attribution import stage_costs_of
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.render import chrome_trace, comparison_figure
from lightning_pipe.planning.simulate import simulate
from lightning_pipe.planning.timeline import Timeline

__all__ = ["TimelineRecorder"]


class TimelineRecorder(Callback):
    """Writes the real actions of all ranks in chosen steps, on one clock.

    For each step a Chrome trace (`timeline_step10.json`, for https://ui.perfetto.dev), and a
    picture of the predicted timeline, as it would be with these stages and free transfers, above
    the measured one. A logger whose experiment takes figures (TensorBoard) gets the picture too.

    Args:
        steps: Batches to record, counted from 1 within a run of `fit`. The first one is slower than
            the rest.
        directory: Where to write; the log directory of the Trainer if None.
        picture: `"png"`, `"svg"`, or None for no picture.

    Raises:
        ConfigError: No steps, steps below 1, or another strategy than ours.

    Example::

        Trainer(strategy="pipeline", devices=4, callbacks=[TimelineRecorder(steps=[10, 100])])
    """

    def __init__(
        self,
        steps: Sequence[int] = (10,),
        directory: str | None = None,
        picture: Literal["png", "svg"] | None = "png",
    ) -> None:
        if not steps or min(steps) < 1:
            raise ConfigError(f"steps={list(steps)}: give the steps to record, from 1")
        if picture not in ("png", "svg", None):
            raise ConfigError(f"picture={picture!r}: give 'png', 'svg' or None")
        self.steps = frozenset(steps)
        self.directory = directory
        self.picture = picture
        #: what was written, on the first rank
        self.paths: list[Path] = []
        self._num_batches = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        need_pipeline(self, "records", trainer, "gather_timeline")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_batches = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_batches += 1
        if self._num_batches not in self.steps:
            return
        strategy: Any = trainer.strategy
        timeline: Timeline | None = strategy.gather_timeline()
        # every rank has to take part in this, though one writes
        directory = Path(self.directory or trainer.log_dir or trainer.default_root_dir)
        if timeline is not None and trainer.is_global_zero:
            self._write(trainer, timeline, strategy, directory)

    def _write(self, trainer: Trainer, timeline: Timeline, strategy: Any, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"timeline_step{self._num_batches}.json"
        path.write_text(json.dumps(chrome_trace(timeline, strategy.sizes.to_dict())))
        written = [path]
        if self.picture is not None:
            figure = comparison_figure(_titled(timeline, strategy.schedule))
            path = path.with_suffix(f".{self.picture}")
            figure.savefig(path, format=self.picture, dpi=120)
            written.append(path)
            for logger in trainer.loggers:
                add = getattr(getattr(logger, "experiment", None), "add_figure", None)
                if add is not None:
                    add("pipeline/timeline", figure, global_step=trainer.global_step)
        self.paths += written
        rank_zero_info(f"wrote {' and '.join(map(str, written))}")


def _titled(timeline: Timeline, schedule: Schedule) -> dict[str, Timeline]:
    predicted = simulate(schedule, stage_costs_of(timeline, schedule.num_stages))
    return {
        f"{name}: {line.step_s:.3g} s, bubble {line.bubble_fraction:.1%}": line
        for name, line in (("predicted", predicted), ("measured", timeline))
    }
