"""Runs a schedule against costs, without running anything: ``Schedule`` x costs -> ``Timeline``.

Each rank does its actions in order, each as soon as what it needs has arrived. A transfer leaves
when its action ends, does not keep the rank busy, and queues behind earlier ones on the same link
in the same direction. Time is linear in the number of actions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.planning.timeline import Span, Timeline

__all__ = [
    "BubbleParts",
    "bubble_parts",
    "held_over_time",
    "ideal_bubble_fraction",
    "peak_activation_bytes",
    "simulate",
]

_FORWARD, _WEIGHT = Op.FORWARD, Op.WEIGHT  # looked up for each action
_Route = tuple[tuple[int, int], float, float] | None
"""The two ranks, seconds for which the link is taken, seconds until the values are there."""

Links = LinkCosts | Callable[[int, int], LinkCosts]
"""One link between all ranks, or the link from one rank to another: (source, target) -> costs."""


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCosts],
    link: Links | None = None,
    *,
    after_s: Sequence[float] = (),
) -> Timeline:
    """Predicts when each action runs.

    Args:
        schedule: A schedule that passes its ``check``.
        costs: One entry per stage.
        link: What sending costs; nothing by default, nor ever within a rank.
        after_s: Seconds that each rank needs after its last action, to sum gradients with the
            copies of the pipeline (``profile.all_reduce_s``) or for the optimizer.

    Returns:
        The timeline, from 0 to the end of the last rank.

    Raises:
        PlanError: Not one entry per stage.
        ScheduleError: The schedule deadlocks.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    >>> timeline = simulate(schedule, [StageCosts(1.0, 1.0, 1.0)] * 2)
    >>> timeline.step_s, timeline.bubble_fraction
    (15.0, 0.2)
    """
    if len(costs) != schedule.num_stages:
        raise PlanError(
            f"{schedule.name}: costs of {len(costs)} stages for a schedule of "
            f"{schedule.num_stages}; give one entry per stage"
        )
    ahead, back = _routes(schedule, costs, link)
    duration_s = [_durations(stage) for stage in costs]
    free_s = [0.0] * schedule.num_ranks
    arrival_s: dict[int | None, float] = {None: 0.0}
    taken_s: dict[tuple[int, int], float] = {}
    spans = []
    for rank, _, action, needed, made in schedule.walk():
        op, stage = action.op, action.stage
        start_s = free_s[rank]
        # W follows its own I in the order of the rank; what I sent away does not hold it up
        if op is not _WEIGHT and arrival_s[needed] > start_s:
            start_s = arrival_s[needed]
        end_s = free_s[rank] = start_s + duration_s[stage][op]
        spans.append(Span(rank, action, start_s, end_s))
        if made is None:
            continue
        route = ahead[stage] if op is _FORWARD else back[stage]
        if route is not None:
            link_of, busy_s, transfer_s = route
            leave_s = taken_s.get(link_of, 0.0)
            if end_s > leave_s:
                leave_s = end_s
            taken_s[link_of] = leave_s + busy_s
            end_s = leave_s + transfer_s
        arrival_s[made] = end_s
    spans.sort(key=lambda span: span.rank)  # stable: each rank stays in its order
    ends_s = [a + b for a, b in zip(free_s, after_s or [0.0] * len(free_s), strict=True)]
    return Timeline(tuple(spans), schedule.num_ranks, max(ends_s, default=0.0))


@functools.lru_cache(maxsize=64)
def ideal_bubble_fraction(schedule: Schedule) -> float:
    """The bubble of the schedule itself: equal stages, F = I = W = 1, sending costs nothing.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> ideal_bubble_fraction(make_schedule("1f1b", num_ranks=2, num_microbatches=4))
    0.2
    """
    return simulate(schedule, [StageCosts(1, 1, 1)] * schedule.num_stages).bubble_fraction


@dataclass(frozen=True, slots=True)
class BubbleParts:
    """Where a predicted bubble is from; each is a fraction of the step's time, and they sum to it.

    Args:
        fill_drain_fraction: What equal stages of the same total cost would still be idle.
        imbalance_fraction: What unequal stages add; negative where they happen to help.
        communication_fraction: What waiting for transfers adds.
    """

    fill_drain_fraction: float
    imbalance_fraction: float
    communication_fraction: float

    @property
    def bubble_fraction(self) -> float:
        """The whole bubble."""
        return self.fill_drain_fraction + self.imbalance_fraction + self.communication_fraction


def bubble_parts(
    schedule: Schedule, costs: Sequence[StageCosts], link: Links | None = None
) -> BubbleParts:
    """Splits the bubble by simulating thrice: equal stages, then real ones, then real links.

    Takes and raises what ``simulate`` does.
    """
    count = max(len(costs), 1)
    equal = StageCosts(
        sum(stage.forward_s for stage in costs) / count,
        sum(stage.input_s for stage in costs) / count,
        sum(stage.weight_s for stage in costs) / count,
    )
    even = simulate(schedule, [equal] * len(costs))
    free = simulate(schedule, costs)
    real = simulate(schedule, costs, link)
    if not real.step_s:
        return BubbleParts(0.0, 0.0, 0.0)
    return BubbleParts(
        even.bubble_fraction * even.step_s / real.step_s,
        (free.step_s - even.step_s) / real.step_s,
        (real.step_s - free.step_s) / real.step_s,
    )


def peak_activation_bytes(schedule: Schedule, costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """The most bytes of activations that each rank holds at a time, over all its stages.

    Held from F to the end of B or W. Evaluation holds nothing.
    """
    if not schedule.has_backward:
        return (0,) * schedule.num_ranks
    peaks = []
    for rank in range(schedule.num_ranks):
        held_bytes = peak_bytes = 0
        for action in schedule.actions(rank):
            if action.op is Op.FORWARD:
                held_bytes += costs[action.stage].activation_bytes
                peak_bytes = max(peak_bytes, held_bytes)
            elif action.op is not Op.INPUT:
                held_bytes -= costs[action.stage].activation_bytes
        peaks.append(peak_bytes)
    return tuple(peaks)


def held_over_time(
    timeline: Timeline, costs: Sequence[StageCosts]
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Bytes of activations that each rank holds, over the step.

    Args:
        timeline: Predicted or measured.
        costs: One entry per stage.

    Returns:
        For each rank the moments in seconds at which the amount changes, with the bytes from then
        on. Memory is taken when F starts and freed when B or W ends.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> schedule, costs = make_schedule("gpipe", num_ranks=1, num_microbatches=2), [
    ...     StageCosts(1.0, 1.0, 1.0, activation_bytes=8)]
    >>> held_over_time(simulate(schedule, costs), costs)
    (((0.0, 8), (1.0, 16), (4.0, 8), (6.0, 0)),)
    """
    changes: list[list[tuple[float, int]]] = [[] for _ in range(timeline.num_ranks)]
    trains = any(span.action.op is not Op.FORWARD for span in timeline.spans)
    for span in timeline.spans:
        num_bytes = costs[span.action.stage].activation_bytes
        if trains and span.action.op is Op.FORWARD:
            changes[span.rank].append((span.start_s, num_bytes))
        elif span.action.op in (Op.BACKWARD, Op.WEIGHT):
            changes[span.rank].append((span.end_s, -num_bytes))
    held = []
    for steps in changes:
        moments: list[tuple[float, int]] = []
        total_bytes = 0
        for time_s, change in sorted(steps, key=lambda step: (step[0], step[1])):
            total_bytes += change
            if moments and moments[-1][0] == time_s:
                moments.pop()
            moments.append((time_s, total_bytes))
        held.append(tuple(moments))
    return tuple(held)


def _routes(
    schedule: Schedule, costs: Sequence[StageCosts], link: Links | None
) -> tuple[list[_Route], list[_Route]]:
    """Where each stage's outputs and gradients go, and what that takes."""
    rank_of = schedule.stage_to_rank
    last = len(rank_of) - 1

    def route(stage: int, neighbour: int, num_bytes: int) -> _Route:
        pair = rank_of[stage], rank_of[neighbour]
        if link is None or pair[0] == pair[1]:
            return None
        costs_of = link if isinstance(link, LinkCosts) else link(*pair)
        return pair, num_bytes / costs_of.bytes_per_s, costs_of.transfer_s(num_bytes)

    ahead = [route(stage, stage + 1, costs[stage].boundary_bytes) for stage in range(last)]
    back: list[_Route] = [None] * last
    if schedule.has_backward:
        back = [route(stage + 1, stage, costs[stage].returned_bytes) for stage in range(last)]
    return [*ahead, None], [None, *back]


def _durations(stage: StageCosts) -> dict[Op, float]:
    return {
        Op.FORWARD: stage.forward_s,
        Op.BACKWARD: stage.backward_s,
        Op.INPUT: stage.input_s,
        Op.WEIGHT: stage.weight_s,
    }
