"""A failure on one rank ends all; `tests/faults` has real processes that die and hang."""

import time

import pytest
import torch
from tests.helpers import run_ranks

from lightning_pipe.errors import ConfigError, PeerError
from lightning_pipe.runtime.board import Board, Failure
from lightning_pipe.runtime.patience import Patience
from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.verdict import BUSY, GONE, MOVED, STUCK, State, judge
from lightning_pipe.runtime.watchdog import guard


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


def overtaken():
    ranks = make_ranks([0, 1], 2)
    board = Board(ranks.global_rank, ranks.world_size)
    torch.distributed.barrier()
    begin_s = time.monotonic()
    if ranks.global_rank:
        time.sleep(1)
        board.fail(Failure(1, "KeyError", "KeyError"))
        found = board.verdict(0, 120)
    else:
        found = sorted(board.answers(0, 120)[1])
    torch.distributed.barrier()
    return found, time.monotonic() - begin_s < 30


def test_nobody_waits_for_an_answer_once_a_rank_has_failed():
    assert run_ranks(2, overtaken) == [([0, 1], True), (None, True)]


def test_one_process_is_not_watched():
    ranks = make_ranks([0], 1)
    with pytest.raises(ValueError, match="as it is"), guard(ranks):
        raise ValueError("as it is")


RUNS = State("rank 1 (global rank 0)", "runs 1F2", 70, False, 4, "forward, model.py:3")
WAITS = State("rank 0 (global rank 1)", "waits for what it needs", 60, True, 4, "fit, run.py:9")


@pytest.mark.parametrize(
    ("states", "silent", "kind", "text"),
    [
        (
            {0: RUNS, 1: WAITS},
            {},
            BUSY,
            "the others wait for rank 1 (global rank 0), which runs 1F2, for 70 s now, in step 4, "
            "at forward, model.py:3",
        ),
        (
            {0: State("rank 1", "waits for a barrier", 60, True, 5), 1: WAITS},
            {},
            STUCK,
            "every rank waits for another, so none can go on: rank 1 waits for a barrier, for 60 s "
            "now, in step 5; rank 0 (global rank 1) waits for what it needs, for 60 s now, in step "
            "4, at fit, run.py:9 (they are in different steps: global rank 0 in step 5, global "
            "rank 1 in step 4). The ranks do not do the same: look for what only some of them run",
        ),
        (
            {1: WAITS},
            {0: "It was last seen where it runs 1F2"},
            GONE,
            "global rank 0 does not answer: its process or its machine is gone, or native code in "
            "it keeps Python from running. It was last seen where it runs 1F2",
        ),
        ({1: RUNS, 0: WAITS}, {}, MOVED, "rank 1 (global rank 0) goes on"),
    ],
)
def test_the_likely_cause_is_named(states, silent, kind, text):
    verdict = judge(1, states, silent)
    assert (verdict.kind, verdict.text) == (kind, text)


def test_patience_follows_the_length_of_a_step_and_what_was_asked_for():
    by_itself = Patience()
    assert [by_itself.moment_s(looks, 0.5) for looks in (0, 1, 2)] == [60, 300, 600]
    assert [by_itself.moment_s(looks, 40.0) for looks in (0, 1)] == [400, 400]
    assert by_itself.ends(GONE, 60, 0.5)
    assert not by_itself.ends(STUCK, 60, 0.5)
    assert by_itself.ends(STUCK, 300, 0.5)
    assert not by_itself.ends(BUSY, 10_000, 0.5)
    assert by_itself.answer_s > Patience(10).answer_s  # a machine may be busy: it must say so
    asked = Patience(10)
    assert [asked.moment_s(looks, 40.0) for looks in (0, 1)] == [10, 20]
    assert all(asked.ends(kind, 10, 40.0) for kind in (GONE, STUCK, BUSY))
    assert not asked.ends(MOVED, 10, 40.0)
    never = Patience(None)
    assert never.moment_s(0, 0.0) == 60
    assert not any(never.ends(kind, 9999, 0.0) for kind in (GONE, STUCK, BUSY))
    for wrong in (0, -1, "soon", True):
        with pytest.raises(ConfigError, match=f"hang_timeout={wrong!r}: give 'auto', a number of"):
            Patience(wrong)
