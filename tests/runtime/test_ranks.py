"""Where the stages are: the last one is always on the first process of its pipeline."""

import pytest
import torch
import torch.distributed as dist
from tests.helpers import run_ranks

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.runtime.ranks import make_ranks, rank_order


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_last_stage_is_on_process_0(name, num_ranks):
    virtual_stages = 2 if name in ("zbv", "dualpipev", "interleaved_1f1b") else 1
    schedule = make_schedule(
        name, num_ranks=num_ranks, num_microbatches=8, virtual_stages=virtual_stages
    )
    order = rank_order(schedule.stage_to_rank, num_ranks)
    assert sorted(order) == list(range(num_ranks))
    assert order[schedule.stage_to_rank[-1]] == 0


def test_any_placement_has_an_order():
    assert rank_order([0, 2, 1], 3) == (2, 0, 1)  # the last stage is in the middle


def test_one_process_needs_no_group():
    ranks = make_ranks([0, 0], 1)
    assert (ranks.world_size, ranks.position, ranks.global_rank_of(0)) == (1, 0, 0)
    assert ranks.pipeline_group is None
    assert ranks.control_group is None
    assert ranks.is_first
    assert str(ranks) == "rank 0 (global rank 0)"


def test_a_wrong_number_of_processes_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size=2 .* 2 processes .* 1 were"):
        make_ranks([0, 1], 2)


def two_pipelines():
    ranks = make_ranks([0, 1], 2, data_parallel_size=2)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=ranks.pipeline_group)
    return (
        ranks.position,
        ranks.data_parallel_rank,
        ranks.is_first,
        [ranks.global_rank_of(p) for p in range(2)],
        total.item(),
    )


def test_copies_of_a_pipeline_are_neighbours():
    assert run_ranks(4, two_pipelines) == [
        (1, 0, True, [1, 0], 1.0),
        (0, 0, False, [1, 0], 1.0),
        (1, 1, True, [3, 2], 5.0),
        (0, 1, False, [3, 2], 5.0),
    ]
