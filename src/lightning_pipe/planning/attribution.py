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

__all__ = ["LinkWait", "MeasuredBubble", "attribute_bubble", "mean_bubble", "stage_costs_of"]


@dataclass(frozen=True, slots=True)
class LinkWait:
    """Waiting for values of another rank that had been computed already.

    Attributes:
        source: The stage that computed them; those of the stage after are gradients.
        target: The stage that waited.
        waited_fraction: Of the time of all ranks.
        transfer_s: Mean seconds from the end of the one action to the start of the other, over
            those that were waited for.
    """

    source: int
    target: int
    waited_fraction: float
    transfer_s: float


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
        links: Where ranks waited for values under way, the longest wait first.
    """

    fill_drain_fraction: float
    imbalance_fraction: float
    communication_fraction: float
    host_fraction: float
    rank_fractions: tuple[float, ...]
    stage_utilisations: tuple[float, ...]
    links: tuple[LinkWait, ...] = ()

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
    late, host_s = _seen_s(timeline, schedule, ends_s)
    seen_s = sum(waits_s for waits in late.values() for waits_s, _ in waits) + host_s
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
        _links(late, timeline),
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
        _mean_links([one.links for one in found]),
    )


def _mean_links(found: Sequence[tuple[LinkWait, ...]]) -> tuple[LinkWait, ...]:
    by_link: dict[tuple[int, int], list[LinkWait]] = defaultdict(list)
    for links in found:
        for link in links:
            by_link[link.source, link.target].append(link)
    means = [
        LinkWait(
            *key,
            sum(link.waited_fraction for link in links) / len(found),
            sum(link.transfer_s for link in links) / len(links),
        )
        for key, links in by_link.items()
    ]
    return tuple(sorted(means, key=lambda link: -link.waited_fraction))


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


def _source(span: Span, schedule: Schedule) -> int | None:
    """The stage of another rank that an action waits for."""
    action = span.action
    if action.op is Op.WEIGHT:
        return None
    stage = action.stage + (-1 if action.op is Op.FORWARD else 1)
    if not 0 <= stage < schedule.num_stages or schedule.stage_to_rank[stage] == span.rank:
        return None
    return stage


def _seen_s(
    timeline: Timeline, schedule: Schedule, ends_s: Mapping[tuple[int, Op, int], float]
) -> tuple[dict[tuple[int, int], list[tuple[float, float]]], float]:
    """Waits for what had been computed, by the two stages: (seconds, seconds since it was). And the
    seconds in which ranks waited for nothing."""
    late: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    host_s = 0.0
    for rank in range(timeline.num_ranks):
        before_s: float | None = None
        for span in timeline.spans_of(rank):
            idle_s = max(0.0, span.start_s - (before_s or 0.0))
            stage = _source(span, schedule)
            if stage is None:
                host_s += idle_s
            else:  # a rank waits for its first action from the start of the step
                forward = Op.FORWARD if span.action.op is Op.FORWARD else Op.BACKWARD
                since_s = span.start_s - ends_s[stage, forward, span.action.microbatch]
                wait_s = idle_s if before_s is None else min(span.wait_s, idle_s)
                host_s += idle_s - wait_s
                waited_s = min(wait_s, max(0.0, since_s))
                if waited_s:
                    late[stage, span.action.stage].append((waited_s, since_s))
            before_s = span.end_s
    return late, host_s


def _links(
    late: Mapping[tuple[int, int], Sequence[tuple[float, float]]], timeline: Timeline
) -> tuple[LinkWait, ...]:
    whole_s = timeline.step_s * timeline.num_ranks
    links = [
        LinkWait(
            *key, sum(w for w, _ in waits) / whole_s, sum(since for _, since in waits) / len(waits)
        )
        for key, waits in late.items()
    ]
    return tuple(sorted(links, key=lambda link: -link.waited_fraction))


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
