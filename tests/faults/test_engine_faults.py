"""A rank that raises, dies or hangs at any action ends all, with the stage and the action named."""

import re
import time

import pytest
import torch
from tests.faults.harness import LIMIT_S, Fault, Job, train, wrong

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
    assert all(process.seconds < LIMIT_S for process in ended)
    return ended


def injected(kind, action, hang_timeout="auto", num_ranks=2):
    """How all processes end after a fault, once it is said what has to be."""
    fault = Fault(kind, action)
    schedule = "zero_bubble" if action[1] in "IW" else "1f1b"
    ended = Job(num_ranks, train, fault, hang_timeout, num_ranks, 3, schedule).end()
    assert not wrong(fault, ended)
    return ended


@pytest.mark.parametrize(
    ("action", "waits"),
    [
        ("0F1", r"waits for 'h4' \(2, 6\) float64 of micro-batch 1 from stage 0 on rank 0, "),
        ("1B2", r"waits for the gradient of 'h4' .* of micro-batch 2 from stage 1 on rank 1, "),
        ("1I0", r"waits for the gradient of 'h4' .* of micro-batch 0 from stage 1 on rank 1, "),
    ],
)
def test_a_rank_that_is_killed_is_named_and_ends_all(action, waits):
    other = injected("kill", action)[int(action[0])]
    assert re.search(waits, other.stderr)


@pytest.mark.parametrize("action", ["0F1", "1B2", "0W1"])
def test_a_rank_that_hangs_is_named_by_all_and_ends_all(action):
    ended = injected("sleep", action, 2.0)
    stage = int(action[0])
    assert "time.sleep(100)" in ended[1 - stage].stderr, "each prints its own stack"
    assert "of micro-batch" in ended[stage].stderr, "and what it waits for"


def test_a_rank_in_native_code_that_keeps_python_from_running_is_ended_by_the_others():
    ended = injected("native", "0F1", 2.0)
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
    ended = injected("raise", "2F3", num_ranks=4)
    # Stage 2 of 4 is on global rank 1. The others show its text before their own.
    for process in (ended[0], ended[2], ended[3]):
        assert process.stderr.lstrip().startswith("global rank 1 failed:\nTraceback")
    for process in ended:
        assert "stage 2, rank 2, action 2F3, micro-batch 3" in process.stderr


@pytest.mark.parametrize("action", ["1B2", "1I1", "0W3"])
def test_a_rank_that_raises_ends_all_with_its_text_first(action):
    stage = int(action[0])
    first = injected("raise", action)[stage].stderr.replace("fault now\n", "").lstrip()
    assert first.startswith(f"global rank {1 - stage} failed:\nTraceback")


@pytest.mark.parametrize("kind", ["shape", "dtype"])
def test_a_wrong_value_is_refused_before_it_is_sent_and_told_to_all(kind):
    ended = injected(kind, "0F1")
    assert "StageMismatchError: stage 0" in ended[1].stderr
    assert "PeerError: global rank 1 failed first: " in ended[0].stderr


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
