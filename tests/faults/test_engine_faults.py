"""A rank that raises, dies or hangs at any action ends all, with the stage and the action named."""

import re
import time

import pytest
import torch
from tests.faults.harness import LIMIT_S, Fault, Job, train
from tests.helpers import PATIENCE, run_ranks

from lightning_pipe.runtime import patience
from lightning_pipe.runtime.meeting import meet
from lightning_pipe.runtime.patience import Patience
from lightning_pipe.runtime.progress import Progress
from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.watchdog import guard

# Two stages: stage 1 is on global rank 0, stage 0 on global rank 1.


def end(job, fault="fault now"):
    ended = job.end(fault)
    assert all(process.returncode not in (0, None) for process in ended)
    assert all(process.seconds < LIMIT_S * PATIENCE for process in ended)
    return ended


@pytest.mark.parametrize(
    ("action", "dead", "waits"),
    [
        ("0F1", 1, r"waits for 'h4' \(2, 6\) float64 of micro-batch 1 from stage 0 on rank 0, "),
        ("1B2", 0, r"waits for the gradient of 'h4' .* of micro-batch 2 from stage 1 on rank 1, "),
    ],
)
def test_a_rank_that_is_killed_is_named_and_ends_all(action, dead, waits):
    ended = end(Job(2, train, Fault("kill", action)))
    assert ended[dead].returncode == -9
    other = ended[1 - dead].stderr
    assert f"global rank {dead} has died: its process" in other
    assert f"It was last seen where it runs {action}" in other
    assert re.search(waits, other)


@pytest.mark.parametrize(("action", "hanging"), [("0F1", 1), ("1B2", 0)])
def test_a_rank_that_hangs_is_named_by_all_and_ends_all(action, hanging):
    ended = end(Job(2, train, Fault("sleep", action), 2.0))
    for process in ended:
        cause = rf"the others wait for rank \d \(global rank {hanging}\), which runs {action}"
        assert re.search(f"no progress.*: {cause}", process.stderr)
        assert "at happen, harness.py:" in process.stderr
    assert "time.sleep(100)" in ended[hanging].stderr, "each prints its own stack"
    assert "of micro-batch" in ended[1 - hanging].stderr, "and what it waits for"


def test_a_rank_in_native_code_that_keeps_python_from_running_is_ended_by_the_others():
    ended = end(Job(2, train, Fault("native", "0F1"), 2.0))
    assert ended[1].returncode == -9
    assert "global rank 1 does not answer" in ended[0].stderr
    assert "It was last seen where it runs 0F" in ended[0].stderr
    assert "global rank 1 did not answer and was ended too" in ended[0].stderr


def slow(fault):
    patience._REPORT_S = 2.0
    train(fault, "auto")


def test_a_rank_that_is_only_slow_is_reported_and_not_ended():
    ended = Job(2, slow, Fault("slow", "0F1")).end()
    assert [process.returncode for process in ended] == [0, 0]
    for process in ended:
        assert "the others wait for rank 0 (global rank 1), which runs 0F1, for " in process.stderr


def test_four_ranks_end_with_the_traceback_of_the_one_that_raised_first():
    ended = end(Job(4, train, Fault("raise", "2F3"), "auto", 4))
    # Stage 2 of 4 is on global rank 1. The others show its text before their own.
    for process in (ended[0], ended[2], ended[3]):
        assert process.stderr.lstrip().startswith("global rank 1 failed:\nTraceback")
    for process in ended:
        assert "ValueError: the user's own text 42" in process.stderr
        assert "stage 2, rank 2, action 2F3, micro-batch 3" in process.stderr


@pytest.mark.parametrize(("action", "failing"), [("0F1", 1), ("1B2", 0)])
def test_a_rank_that_raises_ends_all_with_its_text_first(action, failing):
    ended = end(Job(2, train, Fault("raise", action)))
    for process in ended:
        assert "ValueError: the user's own text 42" in process.stderr
        assert f"action {action}, micro-batch {action[-1]}" in process.stderr
    first = ended[1 - failing].stderr.lstrip()
    assert first.startswith(f"global rank {failing} failed:\nTraceback")


def wrong_value(kind):
    try:
        train(Fault(kind, "0F1"))
    except Exception as error:
        torch.distributed.destroy_process_group()  # as the end of the process does
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("shape", "gave 'h4' as (1, 6) float64; the next stage was told (2, 6) float64"),
        ("dtype", "gave 'h4' as (2, 6) float32; the next stage was told (2, 6) float64"),
    ],
)
def test_a_wrong_value_is_refused_before_it_is_sent_and_told_to_all(kind, text):
    told, raised = run_ranks(2, wrong_value, kind)
    assert raised[0] == "StageMismatchError"
    assert text in raised[1]
    assert told[0] == "PeerError"
    assert "global rank 1 failed first" in told[1]
    assert text in told[1]


class _Waiting:
    """Says that a rank waits for all others, as the strategy does."""

    def __init__(self, ranks):
        self.ranks, self.progress = ranks, Progress()
        self.step, self.usual_s = 3 + ranks.position, 0.0

    @property
    def text(self):
        return f"waits where it {self.ranks.talk.place}"

    @property
    def since_s(self):
        return self.ranks.talk.since_s

    @property
    def waits(self):
        return bool(self.ranks.talk.place)


def apart():
    """One rank waits in a meeting, the other in a receive: nobody can go on."""
    ranks = make_ranks([0, 1], 2)
    with guard(ranks, _Waiting(ranks), Patience(2.0)):
        if ranks.position == 0:
            meet(ranks, "saves a checkpoint")
        else:
            ranks.talk.place, ranks.talk.since_s = "waits for a gradient", time.monotonic()
            torch.distributed.recv(torch.zeros(1), ranks.global_rank_of(0))


def early():
    """One rank is done; the other still waits for it."""
    ranks = make_ranks([0, 1], 2)
    if ranks.position == 0:
        with guard(ranks):
            time.sleep(0.5)
        time.sleep(8)  # the script goes on
        return
    with guard(ranks, _Waiting(ranks), Patience(2.0)):
        meet(ranks, "saves a checkpoint")


def test_ranks_that_wait_for_each_other_are_named_with_their_places_and_steps():
    for process in end(Job(2, apart), "every rank waits for another"):
        assert "waits where it saves a checkpoint" in process.stderr
        assert "waits where it waits for a gradient" in process.stderr
        assert "global rank 0 in step 4, global rank 1 in step 3" in process.stderr


def test_a_rank_that_is_done_too_early_is_named_and_left_alone():
    waiting, done = Job(2, early).end("has left the run")
    assert waiting.returncode == 1
    assert "rank 1 has left the run: its Trainer is done" in waiting.stderr
    assert done.returncode == 0, done.stderr
