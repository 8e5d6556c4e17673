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
from lightning_pipe.planning.ir import Action, Op, Schedule
from lightning_pipe.planning.timeline import Span, Timeline

__all__ = [
    "BubbleParts",
    "bubble_parts",
    "held_over_time",
    "ideal_bubble_fraction",
    "peak_activation_bytes",
    "simulate",
]

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
    network = _Network(schedule.stage_to_rank, costs, link if link is not None else LinkCosts())
    duration_s = [_durations(stage) for stage in costs]
    free_s = [0.0] * schedule.num_ranks
    arrival_s: dict[int, float] = {}
    spans = []
    for rank, _, action in schedule.execution():
        # W follows its own I in the order of the rank; what I sent away does not hold it up
        needed = None if action.op is Op.WEIGHT else schedule.needs(action)
        start_s = free_s[rank]
        if needed is not None and arrival_s[needed] > start_s:
            start_s = arrival_s[needed]
        end_s = start_s + duration_s[action.stage][action.op]
        free_s[rank] = end_s
        spans.append(Span(rank, action, start_s, end_s))
        made = schedule.makes(action)
        if made is not None:
            arrival_s[made] = network.send(rank, action, end_s)
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


class _Network:
    """The links between ranks during one simulation; remembers until when each is taken."""

    def __init__(self, rank_of: Sequence[int], costs: Sequence[StageCosts], link: Links) -> None:
        self._rank_of = rank_of
        self._costs = costs
        self._link = link
        self._taken_s: dict[tuple[int, int], float] = {}

    def send(self, source: int, action: Action, end_s: float) -> float:
        """When the result of an action that ends at ``end_s`` is where it is needed."""
        forward = action.op is Op.FORWARD
        neighbour = action.stage + (1 if forward else -1)
        if not 0 <= neighbour < len(self._rank_of):
            return end_s
        target = self._rank_of[neighbour]
        if target == source:
            return end_s
        link = self._link if isinstance(self._link, LinkCosts) else self._link(source, target)
        num_bytes = (
            self._costs[action.stage].boundary_bytes
            if forward
            else self._costs[neighbour].returned_bytes
        )
        leave_s = max(end_s, self._taken_s.get((source, target), 0.0))
        self._taken_s[source, target] = leave_s + num_bytes / link.bytes_per_s
        return leave_s + link.transfer_s(num_bytes)


def _durations(stage: StageCosts) -> dict[Op, float]:
    return {
        Op.FORWARD: stage.forward_s,
        Op.BACKWARD: stage.backward_s,
        Op.INPUT: stage.input_s,
        Op.WEIGHT: stage.weight_s,
    }
