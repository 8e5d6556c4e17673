"""Predicted time: by hand on small cases, by closed form on large ones."""

from __future__ import annotations

import time

import pytest

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.ir import Action, Schedule
from lightning_pipe.planning.schedules import forward_only, make_schedule
from lightning_pipe.planning.simulate import (
    bubble_parts,
    ideal_bubble_fraction,
    peak_activation_bytes,
    simulate,
)
from lightning_pipe.planning.timeline import Span, Timeline

EQUAL = StageCosts(1, 1, 1)


def starts(timeline: Timeline, rank: int) -> list[tuple[str, float]]:
    return [(str(span.action), span.start_s) for span in timeline.spans_of(rank)]


def test_by_hand() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    timeline = simulate(schedule, [EQUAL, EQUAL])
    assert starts(timeline, 0) == [("0F0", 0), ("0F1", 1), ("0B0", 4), ("0B1", 7)]
    assert starts(timeline, 1) == [("1F0", 1), ("1B0", 2), ("1F1", 4), ("1B1", 5)]
    assert timeline.step_s == 9
    assert timeline.busy_s(0) == 6
    assert timeline.idle_s(1) == 3
    assert timeline.rank_bubble_fraction(0) == 1 / 3


def test_latency_and_bandwidth_delay_but_do_not_occupy_ranks() -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    costs = [StageCosts(1, 1, 1, boundary_bytes=8), EQUAL]
    timeline = simulate(schedule, costs, LinkCosts(latency_s=0.5, bytes_per_s=4))
    # 0F0 leaves at 1, takes 2 s of the link and 0.5 s more; 0F1 leaves at 2 but the link is taken
    # to 3
    assert starts(timeline, 1)[:2] == [("1F0", 3.5), ("1F1", 5.5)]
    assert starts(timeline, 1)[2:] == [("1B0", 6.5), ("1B1", 8.5)]
    # gradients have the boundary's bytes too: 8.5 + 2.5, and 10.5 + 2.5
    assert starts(timeline, 0)[2:] == [("0B0", 11.0), ("0B1", 13.0)]
    assert timeline.step_s == 15.0


def test_links_may_differ_and_none_is_needed_within_a_rank() -> None:
    schedule = forward_only([0, 0, 1, 2], 1)
    costs = [StageCosts(1, 0, 0, boundary_bytes=1)] * 4
    asked: list[tuple[int, int]] = []

    def link(source: int, target: int) -> LinkCosts:
        asked.append((source, target))
        return LinkCosts(latency_s=10.0 if target == 2 else 1.0)

    assert simulate(schedule, costs, link).step_s == 1 + 1 + 1 + 1 + 10 + 1
    assert asked == [(0, 1), (1, 2)]


def test_a_slow_stage_sets_the_pace() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    timeline = simulate(schedule, [EQUAL, StageCosts(2, 2, 2)])
    assert timeline.step_s == 1 + 8 * 6 + 2
    assert timeline.rank_bubble_fraction(1) == 3 / 51


def test_the_bubble_is_attributed() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    parts = bubble_parts(schedule, [EQUAL, StageCosts(2, 2, 2)], LinkCosts(latency_s=0.25))
    # equal stages of 1.5, 1.5, 1.5 take 9 x 4.5 = 40.5; busy is 36, the real step 51 without links
    step_s = simulate(schedule, [EQUAL, StageCosts(2, 2, 2)], LinkCosts(0.25)).step_s
    assert parts.fill_drain_fraction == pytest.approx(4.5 / step_s)
    assert parts.imbalance_fraction == pytest.approx((51 - 40.5) / step_s)
    assert parts.communication_fraction == pytest.approx((step_s - 51) / step_s)
    assert parts.communication_fraction > 0
    free = bubble_parts(schedule, [StageCosts(0, 0, 0)] * 2)
    assert free.bubble_fraction == 0.0


def test_zero_bubble_is_a_third_of_1f1b() -> None:
    for num_ranks, m in ((4, 32), (8, 64), (16, 256)):
        zero = make_schedule("zero_bubble", num_ranks=num_ranks, num_microbatches=m)
        full = make_schedule("1f1b", num_ranks=num_ranks, num_microbatches=m)
        ratio = ideal_bubble_fraction(zero) / ideal_bubble_fraction(full)
        assert 1 / 3 < ratio < 0.37


def test_bubbles_in_order_of_the_papers() -> None:
    best_last = [
        ("naive", 1),
        ("gpipe", 1),
        ("interleaved_1f1b", 2),
        ("zero_bubble", 1),
        ("zbv", 2),
    ]
    bubbles = [
        ideal_bubble_fraction(
            make_schedule(name, num_ranks=4, num_microbatches=16, virtual_stages=chunks)
        )
        for name, chunks in best_last
    ]
    assert bubbles == sorted(bubbles, reverse=True)
    assert len(set(bubbles)) == 5


def test_bytes_in_flight() -> None:
    costs = [StageCosts(1, 1, 1, activation_bytes=10), StageCosts(1, 1, 1, activation_bytes=7)]
    for name, held in (("gpipe", (40, 28)), ("1f1b", (20, 7)), ("zero_bubble", (20, 14))):
        schedule = make_schedule(name, num_ranks=2, num_microbatches=4)
        assert peak_activation_bytes(schedule, costs) == held
    assert peak_activation_bytes(forward_only([0, 1], 4), costs) == (0, 0)


def test_one_cost_per_stage() -> None:
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=2)
    with pytest.raises(PlanError, match="costs of 3 stages for a schedule of 2"):
        simulate(schedule, [EQUAL] * 3)


def test_large_simulations_are_fast() -> None:
    schedule = make_schedule(
        "interleaved_1f1b", num_ranks=64, num_microbatches=128, virtual_stages=4
    )
    start_s = time.process_time()
    timeline = simulate(schedule, [EQUAL] * 256, LinkCosts(0.0, 1e9))
    assert time.process_time() - start_s < 2.5  # a quarter of P=64, V=4, M=512, allowed twice
    assert timeline.bubble_fraction == 63 / (4 * 128 + 63)


def test_measured_spans_start_at_zero() -> None:
    first, second = Action.parse("0F0"), Action.parse("0F1")
    spans = [
        Span(1, first, 105.0, 106.0),
        Span(0, second, 102.0, 103.0),
        Span(0, first, 100.0, 101.0),
    ]
    timeline = Timeline.from_spans(spans, 2)
    assert [(s.rank, s.start_s) for s in timeline.spans] == [(0, 0.0), (0, 2.0), (1, 5.0)]
    assert timeline.step_s == 6.0
    assert timeline.bubble_fraction == 9 / 12


def test_an_empty_timeline_has_no_bubble() -> None:
    timeline = Timeline.from_spans([], 2)
    assert timeline.step_s == timeline.bubble_fraction == timeline.rank_bubble_fraction(0) == 0
    assert simulate(Schedule("x", (), 0, 0), []).step_s == 0.0
