"""What a pipeline measured in its last step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_pipe.planning.attribution import MeasuredBubble, attribute_bubble
from lightning_pipe.planning.doctor import Run
from lightning_pipe.planning.simulate import ideal_bubble_fraction
from lightning_pipe.planning.timeline import Timeline
from lightning_pipe.runtime.clock import clock_offset_s
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.share import gather_objects
from lightning_pipe.steps import Pipeline


@dataclass(frozen=True, slots=True)
class Bubble:
    """How much of a step this rank was idle.

    Attributes:
        measured_fraction: Idle over total time of the last step on this rank, 0 to 1.
        ideal_fraction: What the schedule has with equal stages and free transfers.
    """

    measured_fraction: float
    ideal_fraction: float


def bubble(pipeline: Pipeline) -> Bubble | None:
    """How idle this rank was; None before the first step."""
    if pipeline.schedule is None or not pipeline.step_s:
        return None
    busy_s = sum(span.duration_s for span in pipeline.spans)
    return Bubble(1 - busy_s / pipeline.step_s, ideal_bubble_fraction(pipeline.schedule))


def gather_bubble(pipeline: Pipeline) -> MeasuredBubble | None:
    """Where the bubble of the last step is from; None before the first. All ranks call it."""
    found = timeline(pipeline, of_all_ranks=True)
    if found is None or pipeline.schedule is None:
        return None
    return attribute_bubble(found, pipeline.schedule)


def mean_over_ranks(pipeline: Pipeline, value: float | None) -> float | None:
    """The mean of the numbers that ranks have; None if none has one. All ranks call it."""
    with at(pipeline.ranks, "gathers numbers of the ranks"):
        found = [v for v in gather_objects(pipeline.ranks, value) or [] if v is not None]
    return sum(found) / len(found) if found else None


def run_of(pipeline: Pipeline) -> Run | None:
    """The sizes of the run; None before the first step."""
    if pipeline.schedule is None or pipeline.plan is None:
        return None
    return Run.of(
        pipeline.schedule,
        pipeline.plan,
        asked_microbatches=pipeline.layout.num_microbatches,
        recomputes=pipeline.home.cut.trace.recomputes or bool(pipeline.home.again),
    )


def timeline(pipeline: Pipeline, *, of_all_ranks: bool = False) -> Timeline | None:
    """What this rank did, or, if all ranks ask for it, what all did; None before the first step."""
    if pipeline.schedule is None:
        return None
    spans = list(pipeline.spans)
    if of_all_ranks:
        with at(pipeline.ranks, "gathers the timeline"):
            ahead_s = clock_offset_s(pipeline.ranks)
            if ahead_s:
                spans = [
                    replace(span, start_s=span.start_s - ahead_s, end_s=span.end_s - ahead_s)
                    for span in spans
                ]
            parts = gather_objects(pipeline.ranks, spans) or []
        spans = [span for part in parts for span in part]
    return Timeline.from_spans(spans, pipeline.ranks.num_positions)
