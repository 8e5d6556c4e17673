"""A measured bubble is split into its causes: simulated steps with known causes are taken apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from lightning_pipe.errors import PlanError, ScheduleError
from lightning_pipe.planning.attribution import attribute_bubble, stage_costs_of
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.planning.simulate import Links, bubble_parts, simulate
from lightning_pipe.planning.timeline import Timeline


def as_measured(schedule: Schedule, costs: list[StageCosts], link: Links | None) -> Timeline:
    """A simulated step as an engine reports it: with the wait before each action."""
    timeline = simulate(schedule, costs, link)
    spans = []
    for rank in range(schedule.num_ranks):
        before_s = 0.0
        for span in timeline.spans_of(rank):
            spans.append(replace(span, wait_s=span.start_s - before_s))
            before_s = span.end_s
    return replace(timeline, spans=tuple(spans))


def _schedules() -> list[Schedule]:
    made = []
    for name in SCHEDULES:
        for chunks in (1, 2):
            try:
                made.append(make_schedule(name, num_ranks=2, num_microbatches=4,
                                          virtual_stages=chunks))  # fmt: skip
            except ScheduleError:  # not every schedule has every number of chunks
                continue
    assert len(made) >= 8
    return made


@pytest.mark.parametrize("schedule", _schedules(), ids=lambda s: f"{s.name}-{s.num_stages}")
def test_equal_stages_only_fill_and_drain(schedule: Schedule) -> None:
    costs = [StageCosts(1.0, 1.0, 1.0)] * schedule.num_stages
    found = attribute_bubble(as_measured(schedule, costs, None), schedule)
    ideal = simulate(schedule, costs).bubble_fraction
    assert found.fill_drain_fraction == pytest.approx(ideal)
    assert found.imbalance_fraction == pytest.approx(0.0, abs=1e-12)
    assert found.communication_fraction == found.host_fraction == 0.0
    busy = (1 - ideal) * 2 / schedule.num_stages
    assert found.stage_utilisations == pytest.approx([busy] * schedule.num_stages)


@pytest.mark.parametrize("schedule", _schedules(), ids=lambda s: f"{s.name}-{s.num_stages}")
def test_a_slow_stage_is_imbalance_and_a_slow_link_communication(schedule: Schedule) -> None:
    costs = [StageCosts(1.0, 1.0, 1.0)] * (schedule.num_stages - 1) + [StageCosts(2.0, 2.0, 2.0)]
    slow = attribute_bubble(as_measured(schedule, costs, None), schedule)
    # nothing overlaps in a naive step, so there a slow stage makes no rank wait longer
    assert (slow.imbalance_fraction > 0.05) == (schedule.name != "naive")
    assert slow.imbalance_fraction == pytest.approx(
        bubble_parts(schedule, costs).imbalance_fraction
    )
    assert slow.communication_fraction == slow.host_fraction == 0.0
    even = [StageCosts(1.0, 1.0, 1.0)] * schedule.num_stages
    late = attribute_bubble(as_measured(schedule, even, LinkCosts(latency_s=2.0)), schedule)
    expected = bubble_parts(schedule, even, LinkCosts(latency_s=2.0))
    assert late.communication_fraction == pytest.approx(expected.communication_fraction)
    assert late.communication_fraction > 0.05
    assert late.imbalance_fraction == pytest.approx(0.0, abs=1e-12)
    for found in (slow, late):
        parts = found.fill_drain_fraction + found.imbalance_fraction
        parts += found.communication_fraction + found.host_fraction
        assert parts == pytest.approx(found.bubble_fraction)


def test_time_between_actions_is_the_hosts() -> None:
    schedule = make_schedule("1f1b", num_ranks=1, num_microbatches=2)
    timeline = simulate(schedule, [StageCosts(1.0, 1.0, 1.0)])
    moved = tuple(
        replace(span, start_s=span.start_s + n, end_s=span.end_s + n)
        for n, span in enumerate(timeline.spans)
    )
    found = attribute_bubble(Timeline(moved, 1, timeline.step_s + 3), schedule)
    assert found.host_fraction == pytest.approx(3 / 9)
    assert found.bubble_fraction == pytest.approx(3 / 9)


def test_costs_are_read_back() -> None:
    schedule = make_schedule("zero_bubble", num_ranks=2, num_microbatches=4)
    costs = [StageCosts(1.0, 2.0, 3.0), StageCosts(3.0, 1.0, 2.0)]
    found = stage_costs_of(simulate(schedule, costs), 2)
    assert [(c.forward_s, c.input_s, c.weight_s) for c in found] == [(1, 2, 3), (3, 1, 2)]


def test_another_schedules_timeline_is_refused() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    other = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    timeline = simulate(other, [StageCosts(1.0, 1.0, 1.0)] * 2)
    with pytest.raises(PlanError, match="32 actions is not one of this schedule"):
        attribute_bubble(timeline, schedule)
    with pytest.raises(PlanError, match="empty timeline"):
        attribute_bubble(simulate(schedule, [StageCosts(0.0, 0.0, 0.0)] * 2), schedule)


def test_a_weight_gradient_does_not_wait_for_what_its_stage_has_sent() -> None:
    schedule = make_schedule("zero_bubble", num_ranks=2, num_microbatches=4)
    timeline = simulate(schedule, [StageCosts(1.0, 1.0, 1.0)] * 2, LinkCosts(latency_s=2.0))
    spans = timeline.spans_of(1)
    for before, span in pairwise(spans):
        if span.action.op is Op.WEIGHT:
            assert span.start_s == before.end_s
