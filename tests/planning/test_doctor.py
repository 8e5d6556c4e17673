"""The doctor names what was injected, with its size."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.test_attribution import as_measured

from lightning_pipe.planning.attribution import MeasuredBubble, attribute_bubble, mean_bubble
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.doctor import Run, diagnose, examine, loss_jump
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_one_microbatch_is_named_as_bubble(num_ranks: int) -> None:
    schedule = make_schedule("gpipe", num_ranks=num_ranks, num_microbatches=1)
    costs = [StageCosts(1.0, 1.0, 1.0)] * num_ranks
    verdict = diagnose(
        attribute_bubble(as_measured(schedule, costs, None), schedule), Run.of(schedule)
    )
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
    verdict = diagnose(
        attribute_bubble(as_measured(schedule, costs, None), schedule), Run.of(schedule)
    )
    assert (verdict.cause, verdict.stage) == ("imbalance", slow)
    assert verdict.ratio == pytest.approx(2.0, rel=0.1)


def test_python_that_takes_twice_as_long_as_uneven_stages_wait_is_named() -> None:
    run = Run.of(make_schedule("1f1b", num_ranks=2, num_microbatches=8))
    parts = MeasuredBubble(0.06, 0.107, 0.098, 0.251, (0.541, 0.491), (0.459, 0.508))
    verdict = diagnose(parts, run)
    assert verdict.cause == "host"
    assert "idle for 51.6% of the time: 25.1% is neither computing nor waiting" in verdict.text
    even = MeasuredBubble(0.06, 0.157, 0.098, 0.251, (0.541, 0.591), (0.459, 0.508))
    assert diagnose(even, run).cause == "imbalance"


def test_a_slow_link_is_named() -> None:
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 4
    measured = attribute_bubble(as_measured(schedule, costs, LinkCosts(latency_s=2.0)), schedule)
    verdict = diagnose(measured, Run.of(schedule))
    assert verdict.cause == "communication"
    assert "micro-batches" in verdict.advice


def test_a_healthy_pipeline_is_left_alone() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=32)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 2
    found = attribute_bubble(as_measured(schedule, costs, None), schedule)
    verdict = diagnose(mean_bubble([found, found]), Run.of(schedule))
    assert verdict.cause == "healthy"
    assert verdict.advice == ""
    assert "3.0%" in str(verdict)


def _slow_link(source: int, target: int) -> LinkCosts:
    return LinkCosts(latency_s=4.0) if {source, target} == {1, 2} else LinkCosts()


def test_the_slow_link_is_named_with_its_bytes_and_bandwidth() -> None:
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 4
    found = attribute_bubble(as_measured(schedule, costs, _slow_link), schedule)
    run = replace(Run.of(schedule), boundary_bytes=(10, 8 * 2**20, 10, 0))
    verdict = diagnose(found, run)
    assert verdict.cause == "communication"
    assert verdict.link is not None
    assert {verdict.link.source, verdict.link.target} == {1, 2}
    assert verdict.link.transfer_s == pytest.approx(4.0)
    assert "8.0 MiB per micro-batch, 2.0 MiB per second" in verdict.text
    assert sum(link.waited_fraction for link in found.links) > 0.1


def test_a_better_cut_is_written_out() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=16)
    costs = [StageCosts(2.0, 2.0, 2.0), StageCosts(6.0, 6.0, 6.0)]
    found = attribute_bubble(as_measured(schedule, costs, None), schedule)
    verdict = diagnose(found, replace(Run.of(schedule), unit_counts=(4, 4)))
    # units of 0.5 and of 1.5: six of the first kind and ... 2 + 1.5 against 4.5
    assert "balance=[5, 3] (units per stage, now [4, 4]): about 25% less" in verdict.advice
    alone = diagnose(found, replace(Run.of(schedule), unit_counts=(4, 1)))
    assert "No other number of units per stage is clearly better (now [4, 1])" in alone.advice


def test_a_batch_with_too_few_rows_is_said_in_place_of_more_microbatches() -> None:
    schedule = make_schedule("gpipe", num_ranks=4, num_microbatches=2)
    costs = [StageCosts(1.0, 1.0, 1.0)] * 4
    found = attribute_bubble(as_measured(schedule, costs, None), schedule)
    (verdict,) = examine(found, replace(Run.of(schedule), asked_microbatches=16))
    assert verdict.cause == "small batch"
    assert "num_microbatches=16 was asked for, and the batch has rows for 2" in verdict.text
    asked = make_schedule("gpipe", num_ranks=4, num_microbatches=16)
    saved = 1 - simulate(asked, costs).step_s / 16 / (simulate(schedule, costs).step_s / 2)
    assert f"about {saved:.0%} less" in verdict.advice


@pytest.mark.parametrize(("held", "said"), [(0.3, True), (0.7, False), (None, False)])
def test_recomputing_without_need_is_said(held: float | None, said: bool) -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=32)
    run = replace(Run.of(schedule), recomputes=True, memory_fraction=held)
    assert [v.cause for v in examine(None, run)] == ["recomputation"] * said
    assert examine(None, replace(run, recomputes=False)) == ()


def test_a_loss_that_jumps_with_the_number_of_microbatches_is_said() -> None:
    calm = [(4, 32, 1.0 + 0.01 * (-1) ** step) for step in range(20)]
    higher = [(8, 32, 1.5 + 0.01 * (-1) ** step) for step in range(10)]
    verdict = loss_jump([*calm, *higher])
    assert verdict is not None
    assert "The loss rose from 1 to 1.5 when num_microbatches went from 4 to 8." in verdict.text
    assert "num_microbatches=4" in verdict.advice
    larger = loss_jump([*calm, *((8, 64, loss) for _, _, loss in higher)])
    assert larger is not None
    assert "samples of an optimizer step from 32 to 64" in larger.text
    assert 'EffectiveBatchRescaler("linear")' in larger.advice
    assert loss_jump([*calm, *((8, 32, loss) for _, _, loss in calm)]) is None
    assert loss_jump([*calm, *((4, 32, loss) for _, _, loss in higher)]) is None  # not the sizes
    assert loss_jump([*calm, *higher[:2]]) is None  # too early to tell
    assert loss_jump([]) is None
