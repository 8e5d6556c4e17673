"""The worker pool itself: values by rank, exceptions, deaths and hangs."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.helpers import run_ranks, spawn_ranks


def _rank_and_sum(x):
    total = torch.tensor([float(dist.get_rank() + x)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.environ["WORLD_SIZE"]


def _one_raises(rank):
    if dist.get_rank() == rank:
        raise ValueError("bad 17")
    dist.barrier()


def _one_dies(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def _one_sleeps(rank):
    if dist.get_rank() == rank:
        time.sleep(100)


def test_values_come_by_rank():
    assert run_ranks(2, _rank_and_sum, 10) == [(0, 21.0, "2"), (1, 21.0, "2")]
    assert run_ranks(1, _rank_and_sum, 10) == [(0, 10.0, "1")]


def test_an_exception_is_raised_and_the_pool_goes_on():
    with pytest.raises(ValueError, match="bad 17"):
        run_ranks(2, _one_raises, 1)
    assert run_ranks(2, _rank_and_sum, 0)[1] == (1, 1.0, "2")


def test_a_death_and_a_hang_fail_and_the_pool_is_built_again():
    with pytest.raises(ChildProcessError, match=r"(?s)rank 1 died with exit code 3.*beside it: "):
        run_ranks(2, _one_dies, 1)  # with what the others raised: it may be the cause
    with pytest.raises(AssertionError, match=r"(?s)ran past 2 s.*_one_sleeps"):
        run_ranks(2, _one_sleeps, 0, timeout=2)
    assert run_ranks(2, _rank_and_sum, 0)[1] == (1, 1.0, "2")


def test_spawned_ranks_report_how_they_ended():
    ended = spawn_ranks(2, _one_raises, 1, timeout=60)
    assert [e.returncode for e in ended] == [1, 1]
    assert "ValueError: bad 17" in ended[1].stderr
