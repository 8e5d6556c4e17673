"""Where a measured bubble is from.

The step is replayed without running anything: with equal stages, whose idle time is *fill and
drain*; with the measured time of every action, which adds *imbalance*. What the real step took
longer than that replay is *communication* and *host*, knock-on delays included, shared out as the
ranks were seen waiting for something that had been computed already, or for nothing at all. The
four add up to the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import StageCosts
from lightning_pipe.planning.ir import Action, Op, Schedule
from lightning_pipe.planning.simulate import simulate
from lightning_pipe.planning.timeline import Span, Timeline

__all__ = ["MeasuredBubble", "attribute_bubble", "mean_bubble", "stage_costs_of"]


@dataclass(frozen=True, slots=True)
class MeasuredBubble:
    """The parts of a measured bubble, each as a fraction of the time of all ranks, 0 to 1.

    Attributes:
        fill_drain_fraction: What equal stages of the same total would still wait for each other.
        imbalance_fraction: What unequal stages add; negative where they happen to help.
        communication_fraction: Waiting for what has been computed already.
        host_fraction: Neither computing nor waiting.
        rank_fractions: The whole bubble of each rank.
        stage_utilisations: Computing time of each stage over the step's.
    """

    fill_drain_fraction: float
    imbalance_fraction: float
    communication_fraction: float
    host_fraction: float
    rank_fractions: tuple[float, ...]
    stage_utilisations: tuple[float, ...]

    @property
    def bubble_fraction(self) -> float:
        """The whole bubble, mean over the ranks."""
        return sum(self.rank_fractions) / len(self.rank_fractions)


def attribute_bubble(timeline: Timeline, schedule: Schedule) -> MeasuredBubble:
    """Splits the bubble of a measured step.

    Args:
        timeline: Every action of every rank, on one clock.
        schedule: What was run.

    Raises:
        PlanError: The timeline is not that of the schedule, or is empty.
    """
    ends_s = {_key(span.action): span.end_s for span in timeline.spans}
    if len(ends_s) != sum(len(schedule.actions(rank)) for rank in range(schedule.num_ranks)):
        raise PlanError(
            f"{schedule.name}: a timeline of {len(ends_s)} actions is not one of this schedule"
        )
    if not timeline.step_s:
        raise PlanError(f"{schedule.name}: an empty timeline has no bubble")
    busy_s_of_ranks = sum(timeline.busy_s(rank) for rank in range(timeline.num_ranks))
    mean_busy_s = busy_s_of_ranks / timeline.num_ranks
    even_s = _even_step_s(timeline, schedule)
    free_s = _replayed_step_s(timeline, schedule)
    waited_s, host_s = _seen_s(timeline, schedule, ends_s)
    seen_s = waited_s + host_s
    rest_s = timeline.step_s - free_s
    host_part_s = rest_s * host_s / seen_s if seen_s else 0.0
    busy_s: dict[int, float] = defaultdict(float)
    for span in timeline.spans:
        busy_s[span.action.stage] += span.duration_s
    return MeasuredBubble(
        (even_s - mean_busy_s) / timeline.step_s,
        (free_s - even_s) / timeline.step_s,
        (rest_s - host_part_s) / timeline.step_s,
        host_part_s / timeline.step_s,
        tuple(timeline.rank_bubble_fraction(rank) for rank in range(timeline.num_ranks)),
        tuple(busy_s[stage] / timeline.step_s for stage in range(schedule.num_stages)),
    )


def mean_bubble(found: Sequence[MeasuredBubble]) -> MeasuredBubble:
    """The mean over several steps of one schedule."""
    count = len(found)
    return MeasuredBubble(
        sum(one.fill_drain_fraction for one in found) / count,
        sum(one.imbalance_fraction for one in found) / count,
        sum(one.communication_fraction for one in found) / count,
        sum(one.host_fraction for one in found) / count,
        tuple(sum(x) / count for x in zip(*(one.rank_fractions for one in found), strict=True)),
        tuple(sum(x) / count for x in zip(*(one.stage_utilisations for one in found), strict=True)),
    )


def stage_costs_of(timeline: Timeline, num_stages: int) -> tuple[StageCosts, ...]:
    """Mean seconds of each stage's actions in a measured step.

    A full backward counts half as I and half as W where nothing tells them apart.
    """
    total_s: dict[tuple[int, Op], float] = defaultdict(float)
    count: dict[tuple[int, Op], int] = defaultdict(int)
    for span in timeline.spans:
        total_s[span.action.stage, span.action.op] += span.duration_s
        count[span.action.stage, span.action.op] += 1

    def mean_s(stage: int, op: Op) -> float:
        return total_s[stage, op] / max(count[stage, op], 1)

    return tuple(
        StageCosts(
            mean_s(stage, Op.FORWARD),
            mean_s(stage, Op.INPUT) or mean_s(stage, Op.BACKWARD) / 2,
            mean_s(stage, Op.WEIGHT) or mean_s(stage, Op.BACKWARD) / 2,
        )
        for stage in range(num_stages)
    )


def _key(action: Action) -> tuple[int, Op, int]:
    """An action, with both forms of a backward as one."""
    op = Op.BACKWARD if action.op is Op.INPUT else action.op
    return action.stage, op, action.microbatch


def _needed_s(
    span: Span, schedule: Schedule, ends_s: Mapping[tuple[int, Op, int], float]
) -> float | None:
    """When the other rank's action that this one waits for has ended."""
    action = span.action
    if action.op is Op.WEIGHT:
        return None
    forward = action.op is Op.FORWARD
    stage = action.stage + (-1 if forward else 1)
    if not 0 <= stage < schedule.num_stages:
        return None
    if schedule.stage_to_rank[stage] == span.rank:
        return None
    return ends_s.get((stage, Op.FORWARD if forward else Op.BACKWARD, action.microbatch))


def _seen_s(
    timeline: Timeline, schedule: Schedule, ends_s: Mapping[tuple[int, Op, int], float]
) -> tuple[float, float]:
    """Seconds in which ranks waited for what had been computed, and for nothing."""
    waited_s = host_s = 0.0
    for rank in range(timeline.num_ranks):
        before_s: float | None = None
        for span in timeline.spans_of(rank):
            idle_s = max(0.0, span.start_s - (before_s or 0.0))
            needed_s = _needed_s(span, schedule, ends_s)
            if needed_s is None:
                host_s += idle_s
            else:  # a rank waits for its first action from the start of the step
                wait_s = idle_s if before_s is None else min(span.wait_s, idle_s)
                host_s += idle_s - wait_s
                waited_s += min(wait_s, max(0.0, span.start_s - needed_s))
            before_s = span.end_s
    return waited_s, host_s


def _even_step_s(timeline: Timeline, schedule: Schedule) -> float:
    """Seconds of the step if all stages took the mean of the measured ones."""
    costs = stage_costs_of(timeline, schedule.num_stages)
    mean = StageCosts(
        sum(cost.forward_s for cost in costs) / len(costs),
        sum(cost.input_s for cost in costs) / len(costs),
        sum(cost.weight_s for cost in costs) / len(costs),
    )
    return simulate(schedule, [mean] * len(costs)).step_s


def _replayed_step_s(timeline: Timeline, schedule: Schedule) -> float:
    """Seconds of the step if every action took what it took, and nothing else took time."""
    duration_s = {span.action: span.duration_s for span in timeline.spans}
    free_s = [0.0] * schedule.num_ranks
    made_s: dict[int, float] = {}
    for rank, _, action in schedule.execution():
        needed = schedule.needs(action)
        start_s = max(free_s[rank], 0.0 if needed is None else made_s[needed])
        free_s[rank] = start_s + duration_s[action]
        made = schedule.makes(action)
        if made is not None:
            made_s[made] = free_s[rank]
    return max(free_s)
