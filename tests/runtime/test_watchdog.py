"""A failure on one rank ends all, fast, with the user's own exception in front. Real processes."""

import sys
import time

import pytest
import torch
from tests.helpers import run_ranks, spawn_ranks
from tests.runtime.models import Stage, cut, make_batch, make_model

from lightning_pipe.errors import PeerError
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.watchdog import guard

NUM_RANKS = 4


class Failing(Stage):
    """Stage 2 fails, or sleeps for a while, in its forward of micro-batch 3."""

    action = "raise"

    def forward(self, microbatch, received):
        if self.blocks[0] is self.model[4] and microbatch == 3:
            if self.action == "raise":
                sys.stderr.write(f"failing at {time.time()}\n")
                raise ValueError("the user's own text 42")
            time.sleep(6)
        return super().forward(microbatch, received)


def train(action, report_after_s):
    schedule = make_schedule("1f1b", num_ranks=NUM_RANKS, num_microbatches=8)
    ranks = make_ranks(schedule.stage_to_rank, NUM_RANKS)
    engine = Engine(ranks, torch.device("cpu"))
    model = make_model("chain")
    with guard(ranks, engine.progress, report_after_s=report_after_s):
        work = Failing(model, ranks.position, cut(model, NUM_RANKS), make_batch([2] * 8))
        work.action = action
        engine.run(schedule, {ranks.position: work}, training=True)


def test_an_exception_on_one_rank_ends_all_with_its_text_first():
    ended = spawn_ranks(NUM_RANKS, train, "raise", 60.0, timeout=120)
    failed_at = float(ended[1].stderr.split("failing at ")[1].split()[0])
    assert time.time() - failed_at < 30
    assert [process.returncode for process in ended] == [1] * NUM_RANKS
    for process in ended:
        assert "ValueError: the user's own text 42" in process.stderr
        if sys.version_info >= (3, 11):
            assert "stage 2, rank 2, action 2F3, micro-batch 3" in process.stderr
    # Stage 2 of 4 is on global rank 1. The others show its text before their own.
    for process in (ended[0], ended[2], ended[3]):
        assert process.stderr.lstrip().startswith("global rank 1 failed:\nTraceback")


def test_a_rank_that_hangs_is_reported_by_those_that_wait():
    ended = spawn_ranks(NUM_RANKS, train, "sleep", 2.0, timeout=120)
    assert [process.returncode for process in ended] == [0] * NUM_RANKS
    report = ": waiting for forward of microbatch 3 from stage 2, for "
    assert f"rank 3 (global rank 0){report}" in ended[0].stderr
    assert "rank 2 (global rank 1): running 2F3, for " in ended[1].stderr
    assert "in forward\n    time.sleep(6)" in ended[1].stderr  # the stack says which line
    assert "rank 1 (global rank 2): waiting for backward of microbatch" in ended[2].stderr


def guards_in_a_row():
    ranks = make_ranks([0, 1], 2)
    for _ in range(3):
        with guard(ranks):
            torch.distributed.barrier()
    with pytest.raises(KeyError, match="same everywhere"), guard(ranks):
        raise KeyError("same everywhere")
    with guard(ranks):  # an earlier failure is not seen again
        torch.distributed.barrier()
        time.sleep(1)
    return ranks.position


def test_guards_in_a_row_are_independent():
    assert run_ranks(2, guards_in_a_row) == [1, 0]


def consequence():
    ranks = make_ranks([0, 1], 2)
    if ranks.position == 0:
        with pytest.raises(ZeroDivisionError, match="cause 5"), guard(ranks):
            raise ZeroDivisionError("cause 5")
        return "cause"
    with pytest.raises(PeerError) as caught, guard(ranks):
        raise PeerError("the connection broke")  # before the reason could be read
    return str(caught.value)


def test_what_a_failure_causes_names_it():
    assert run_ranks(2, consequence) == [
        "global rank 1 failed first: ZeroDivisionError: cause 5",
        "cause",
    ]


def test_one_process_is_not_watched():
    ranks = make_ranks([0], 1)
    with pytest.raises(ValueError, match="as it is"), guard(ranks):
        raise ValueError("as it is")
