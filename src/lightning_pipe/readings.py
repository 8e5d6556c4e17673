"""What users and callbacks read of a run, from the strategy of a Trainer."""

from __future__ import annotations

from dataclasses import replace

from lightning.pytorch import LightningModule

from lightning_pipe import _lightning as seam
from lightning_pipe.construction import PipelineConstruction
from lightning_pipe.hooks import Hooks, NoHooks
from lightning_pipe.planning.attribution import MeasuredBubble
from lightning_pipe.planning.doctor import Run
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import Plan
from lightning_pipe.planning.timeline import Timeline
from lightning_pipe.report import Bubble, bubble, gather_bubble, mean_over_ranks, run_of, timeline
from lightning_pipe.stage_memory import StageMemory, gather_memory, relief
from lightning_pipe.steps import Pipeline


class PipelineReadings(PipelineConstruction):
    """The part of the strategy that tells what a run does."""

    _pipeline: Pipeline | None = None
    _plan: Plan | None = None
    _hooks: Hooks | None = None

    @property
    def plan(self) -> Plan | None:
        """Which stage holds what; known from the first batch on."""
        return self._plan

    @property
    def bubble(self) -> Bubble | None:
        """How idle this rank was in the last step; None before the first."""
        return None if self._pipeline is None else bubble(self._pipeline)

    @property
    def last_timeline(self) -> Timeline | None:
        """What this rank did in the last step; None before the first."""
        return None if self._pipeline is None else timeline(self._pipeline)

    @property
    def schedule(self) -> Schedule | None:
        """What was run in the last step; None before the first."""
        return None if self._pipeline is None else self._pipeline.schedule

    @property
    def randomness(self) -> tuple[dict[str, bool], bool]:
        """Which modules draw random numbers, to whether from Python or NumPy too, and whether the
        code around the units draws; known from the first batch on."""
        if self._plan is None or self._pipeline is None:
            return {}, False
        trace = self._pipeline.home.cut.trace
        return dict(trace.drawing), bool(trace.random_glue or trace.draws)

    def gather_bubble(self) -> MeasuredBubble | None:
        """Where the bubble of the last step is from, over all ranks; all have to call this."""
        return None if self._pipeline is None else gather_bubble(self._pipeline)

    def mean_over_ranks(self, value: float | None) -> float | None:
        """The mean of what each rank gives; None of a rank that has nothing. All have to call this.

        None if no rank has anything.
        """
        return value if self._pipeline is None else mean_over_ranks(self._pipeline, value)

    @property
    def sizes(self) -> Run | None:
        """Schedule, micro-batches, cut and the like of the last step; None before the first."""
        return None if self._pipeline is None else run_of(self._pipeline)

    def count_activations(self) -> None:
        """Lets the next training step count what it keeps for its backwards."""
        if self._pipeline is not None:
            self._pipeline.counts_kept = True

    def gather_memory(self) -> tuple[StageMemory, ...]:
        """What every stage holds now; all ranks have to call this."""
        if self._pipeline is None:
            return ()
        with self._between.suspended():
            return gather_memory(self._pipeline, self.num_processes)

    def memory_advice(self, rank: int) -> str:
        """What would let a rank hold less; empty if nothing is known."""
        return "" if self._pipeline is None else relief(self._pipeline, rank)

    def gather_timeline(self) -> Timeline | None:
        """What all ranks did in the last step; all ranks have to call this."""
        return None if self._pipeline is None else timeline(self._pipeline, of_all_ranks=True)

    @property
    def num_microbatches(self) -> int | None:
        """Pieces of a batch; None where that follows from its rows. May be changed between steps,
        with `microbatch_size` between epochs.

        Raises:
            ScheduleError: When it is set: the schedule cannot run so many.
        """
        return self._pipeline_layout.num_microbatches

    @num_microbatches.setter
    def num_microbatches(self, number: int | None) -> None:
        layout = replace(self._pipeline_layout, num_microbatches=number)
        self._arguments["num_microbatches"] = number
        draws_others = layout.rows_per_step != self._pipeline_layout.rows_per_step
        self._layout = layout
        if self._pipeline is not None:
            self._pipeline.layout = replace(self._pipeline.layout, num_microbatches=number)
            if draws_others:
                seam.reload_training_data(self._module.trainer)

    @property
    def microbatch_size(self) -> int | None:
        """Rows of a micro-batch, where steps draw them."""
        return self._pipeline_layout.microbatch_size

    @property
    def rows_per_step(self) -> int | None:
        """Rows that a training step draws, with `microbatch_size`; None: a batch of the loader."""
        return self._pipeline_layout.rows_per_step

    @property
    def _between(self) -> Hooks | NoHooks:
        return self._hooks if self._hooks is not None else NoHooks()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
