"""The doctor names what was injected, with its size."""

from __future__ import annotations

import pytest
from tests.planning.test_attribution import as_measured

from lightning_pipe.planning.attribution import attribute_bubble, mean_bubble
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.doctor import diagnose
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_microbatch_is_named_as_bubble(num_ranks: int) -> None:
    schedule = make_schedule("gpipe", num_ranks=num_ranks, num_microbatches=1)
    costs = [StageCosts(1.0, 1.0, 1.0)] * num_ranks
    verdict = diagnose(attribute_bubble(as_measured(schedule, costs, None), schedule), schedule)
    assert verdict.cause == "bubble"
    assert f"num_microbatches={4 * num_ranks}" in verdict.advice
    # P times as long for one, (4P + P - 1) / 4P for each of 4P
    better = simulate(make_schedule("gpipe", num_ranks=num_ranks, num_microbatches=4 * num_ranks),
                      costs).step_s / (4 * num_ranks)  # fmt: skip
    saved = 1 - better / simulate(schedule, costs).step_s
    assert f"about {saved:.0%} less" in verdict.advice


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zero_bubble"])
def test_a_slow_stage_is_named_with_its_ratio(name: str, slow: int) -> None:
    schedule = make_schedule(name, num_ranks=4, num_microbatches=16)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 4
    costs[slow] = StageCosts(2.0, 2.0, 2.0)
    verdict = diagnose(attribute_bubble(as_measured(schedule, costs, None), schedule), schedule)
    assert (verdict.cause, verdict.stage) == ("imbalance", slow)
    assert verdict.ratio == pytest.approx(2.0, rel=0.1)


def test_a_slow_link_is_named() -> None:
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 4
    measured = attribute_bubble(as_measured(schedule, costs, LinkCosts(latency_s=2.0)), schedule)
    verdict = diagnose(measured, schedule)
    assert verdict.cause == "communication"
    assert "micro-batches" in verdict.advice


def test_a_healthy_pipeline_is_left_alone() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=32)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 2
    found = attribute_bubble(as_measured(schedule, costs, None), schedule)
    verdict = diagnose(mean_bubble([found, found]), schedule)
    assert verdict.cause == "healthy"
    assert verdict.advice == ""
    assert "3.0%" in str(verdict)
