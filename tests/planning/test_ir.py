"""Actions and schedules as data: text, CSV, and a checker that names rank, step and action."""

from __future__ import annotations

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.ir import Action, Op, Schedule

GOOD = "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize(("stage", "microbatch"), [(0, 0), (2, 13), (117, 4095)])
def test_action_text_round_trips(op: Op, stage: int, microbatch: int) -> None:
    action = Action(stage, op, microbatch)
    assert str(action) == f"{stage}{op}{microbatch}"
    assert Action.parse(f" {action} ") == action


@pytest.mark.parametrize(
    "text", ["", "F0", "2F", "2X0", "2f0", "-1F0", "2F0 1F0", "0SEND_F0", "\u0663F0"]
)
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="such as 2F0") as caught:
        Action.parse(text)
    assert caught.value.action == text


def test_csv_round_trips_with_idle_slots_and_idle_ranks() -> None:
    schedule = Schedule.from_csv(GOOD, "x")
    assert schedule.to_csv() == "0F0,0F1,,0B0,0B1\n,1F0,1B0,1F1,1B1\n"
    assert Schedule.from_csv(schedule.to_csv(), "x") == schedule
    idle = Schedule("x", (tuple(schedule.orders[0][:2]), ()), 1, 2)
    assert Schedule.from_csv(idle.to_csv()).num_ranks == 2


def test_csv_comments_and_blank_lines_are_skipped() -> None:
    assert Schedule.from_csv("# by hand\n\n" + GOOD) == Schedule.from_csv(GOOD)


def test_facts() -> None:
    schedule = Schedule.from_csv(GOOD)
    assert (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches) == (2, 2, 2)
    assert schedule.stage_to_rank == (0, 1)
    assert schedule.has_backward
    assert schedule.in_flight() == (2, 1)
    assert [str(action) for action in schedule.actions(1)] == ["1F0", "1B0", "1F1", "1B1"]
    assert schedule.stages(1) == (1,)
    forward = Schedule.from_csv("0F0")
    assert not forward.has_backward
    assert forward.in_flight() == (0,)


def test_str_is_a_table_of_unit_slots() -> None:
    dense = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    assert str(dense).splitlines() == [
        "rank 0 | 0F0 0F1     0B0     0B1",
        "rank 1 |     1F0 1B0 1F1 1B1",
    ]
    assert dense.aligned().aligned() == dense.aligned()


def test_fewer_microbatches_of_a_schedule_that_runs_run() -> None:
    kept = Schedule.from_csv(GOOD).keep_microbatches(1)
    assert kept.check() == Schedule.from_csv("0F0,0B0\n1F0,1B0")
    with pytest.raises(ScheduleError, match="3 micro-batches of 2"):
        Schedule.from_csv(GOOD).keep_microbatches(3)


@pytest.mark.parametrize(
    ("text", "message", "rank", "step", "action"),
    [
        ("0F0,0B0\n1F0,1Q0", "rank 1, step 1: '1Q0' is not an action", 1, 1, "1Q0"),
        ("0F0,0B0\n1F0,1F0,1B0", "1F0 is repeated; it is already at step 0", 1, 1, "1F0"),
        ("0F0,1F0,0B0\n1B0", "1B0 runs stage 1, which is on rank 0", 1, 0, "1B0"),
        ("0F0,0B0\n1F0", "rank 1, step 1: 1B0 is missing", 1, 1, "1B0"),
        ("0F0,0B0\n1B0", "rank 1, step 1: 1F0 is missing", 1, 1, "1F0"),
        ("0F0,0I0\n1F0,1B0", "rank 0, step 2: 0W0 is missing", 0, 2, "0W0"),
        ("0F0,0W0\n1F0,1B0", "rank 0, step 2: 0I0 is missing", 0, 2, "0I0"),
        ("0F0,0B0,0I0\n1F0,1B0", "0I0 is a second backward beside 0B0", 0, 2, "0I0"),
        ("0F0,0B0,0W0\n1F0,1B0", "0W0 is a second backward beside 0B0", 0, 2, "0W0"),
        ("0F0,0B0\n2F0,2B0", "1F0 is missing, no rank has stage 1", None, None, "1F0"),
        ("0F0,0B0,0F2,0B2", "rank 0, step 4: 0F1 is missing", 0, 4, "0F1"),
        ("0F999999999", "0F0 is missing", 0, 1, "0F0"),
        ("0F0\n999999999F0", "1F0 is missing, no rank has stage 1", None, None, "1F0"),
    ],
)
def test_a_wrong_csv_is_named_by_rank_step_and_action(
    text: str, message: str, rank: int | None, step: int | None, action: str
) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        Schedule.from_csv(text, "mine.csv")
    assert (caught.value.rank, caught.value.step, caught.value.action) == (rank, step, action)
    assert str(caught.value).startswith("mine.csv: ")


def test_actions_out_of_range_are_named() -> None:
    schedule = Schedule("x", ((Action(0, Op.FORWARD, 5),),), 1, 2)
    with pytest.raises(ScheduleError, match="0F5 is out of range; there are 1 stages and 2 micro"):
        schedule.check()


def test_no_action_at_all() -> None:
    with pytest.raises(ScheduleError, match="no action found in 2 lines"):
        Schedule.from_csv(",,\n,,")


@pytest.mark.parametrize(
    ("text", "rank", "step", "action"),
    [
        # rank 0 waits for the gradient of 0, rank 1 for the output of 1
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", 0, 1, "0B0"),
        # a backward before its own forward, on the last stage and on a middle one
        ("0F0,0B0\n1B0,1F0", 1, 0, "1B0"),
        ("0F0,0B0\n1B0,1F0\n2F0,2B0", 1, 0, "1B0"),
        ("0F0,,0W0,0I0\n1F0,1B0", 0, 2, "0W0"),
    ],
)
def test_deadlocks_are_found_and_blamed(text: str, rank: int, step: int, action: str) -> None:
    with pytest.raises(ScheduleError, match=f"deadlock at rank {rank}, step {step}") as caught:
        Schedule.from_csv(text)
    assert (caught.value.rank, caught.value.step, caught.value.action) == (rank, step, action)
    assert str(caught.value).count("<-- ERROR HERE") == 1


def test_crossed_gradients_deadlock() -> None:
    """Both ranks are right alone: each takes the other's second micro-batch first."""
    with pytest.raises(ScheduleError, match="0B1 waits for the input gradient of 1B1 on rank 1"):
        Schedule.from_csv("0F0,0B1,0F1,0B0\n1F0,1F1,1B0,1B1")
