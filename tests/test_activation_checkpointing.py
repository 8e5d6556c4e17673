"""`activation_checkpointing=`: the same numbers, dropout and running statistics included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PipelineStrategy, cutting

_CALLS = [0]


class _Noisy(nn.Module):
    """A block with dropout and running statistics, that counts its calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _CALLS[0] += 1
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


class LitNoisy(lit.Lit):
    def make_net(self, width: int, depth: int) -> nn.Module:
        return nn.Sequential(*(_Noisy(width) for _ in range(depth)), nn.Linear(width, 4))


def _train(devices: int, **arguments: Any) -> tuple[dict[str, torch.Tensor], int, Any]:
    module = lit.seeded(LitNoisy)
    _CALLS[0] = 0
    trainer = lit.trainer({"num_microbatches": 4, **arguments}, devices)
    trainer.fit(module, DataLoader(lit.rows(16), batch_size=8))
    weights = {k: v.clone() for k, v in module.state_dict().items()}
    return weights, _CALLS[0], trainer.strategy.plan


def _all_schedules() -> dict[str, tuple[dict[str, torch.Tensor], int, float]]:
    found = {}
    for schedule, chunks in [("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)]:
        for again in ("none", "all"):
            weights, calls, plan = _train(
                2, schedule=schedule, virtual_stages=chunks, activation_checkpointing=again
            )
            run_again = sum(stage.units_run_again for stage in plan.stages)
            units = sum(plan.unit_counts)
            found[f"{schedule} {again}"] = (weights, calls, run_again / units)
    return found


def test_every_schedule_trains_the_same_with_twice_the_forwards() -> None:
    for found in run_ranks(2, _all_schedules):
        for name, (weights, _, run_again) in found.items():
            assert run_again == name.endswith("all"), name
            for key, value in found["1f1b none"][0].items():  # one of them opens a block
                torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-12)
        for schedule in ("1f1b", "zero_bubble", "interleaved_1f1b"):
            plain, again = found[f"{schedule} none"][1], found[f"{schedule} all"][1]
            assert again - plain >= 2 * 4 * 2, schedule  # steps, micro-batches, own blocks


def _one_rank() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for again in ("none", "auto", 2, ["BatchNorm1d"], ["_Noisy"], ["Linear"]):
        try:
            weights, _, plan = _train(1, activation_checkpointing=again)
        except ConfigError as error:
            found[str(again)] = str(error)
        else:
            found[str(again)] = (weights, sum(stage.units_run_again for stage in plan.stages))
    return found


def test_every_kth_unit_or_a_class_may_be_named() -> None:
    (found,) = run_ranks(1, _one_rank)
    counts = {name: v[1] for name, v in found.items() if isinstance(v, tuple)}
    assert counts == {"none": 0, "auto": 0, "2": 4, "['_Noisy']": 6, "['Linear']": 1}
    for name in counts:
        for key, value in found["none"][0].items():
            torch.testing.assert_close(found[name][0][key], value, rtol=1e-9, atol=1e-12)
    message = found["['BatchNorm1d']"]
    assert "no unit that can run again is a BatchNorm1d" in message
    assert "the units are of Linear, _Noisy" in message


@pytest.mark.parametrize("wrong", ["some", 0, True, [], [3]])
def test_what_it_cannot_mean_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpointing=.*'none', 'all', 'auto'"):
        PipelineStrategy(pipeline_parallel_size=2, activation_checkpointing=wrong)


def _short_of_memory() -> list[int]:
    peaks = _train(2, activation_checkpointing="none")[2].prediction.peak_bytes
    usable_bytes = max(peaks) - 1
    memory = int(2 * usable_bytes / 0.9)  # of both ranks, with head-room
    here = memory * (1 + 9 * torch.distributed.get_rank())  # the smallest rank decides for all
    true, cutting.total_memory = cutting.total_memory, lambda device: here
    try:
        plan = _train(2)[2]
    finally:
        cutting.total_memory = true
    return [stage.units_run_again for stage in plan.stages]


def test_auto_runs_units_again_where_memory_is_short() -> None:
    for counts in run_ranks(2, _short_of_memory):
        assert sum(counts) == 1  # the fullest rank lacks one byte


def _validate() -> Any:
    module = lit.seeded(LitNoisy)
    trainer = lit.trainer({"num_microbatches": 4, "activation_checkpointing": "all"}, 1)
    trainer.validate(module, DataLoader(lit.rows(16), batch_size=8), verbose=False)
    return trainer.strategy.plan


def test_an_evaluation_runs_nothing_again() -> None:
    (plan,) = run_ranks(1, _validate)
    assert plan.stages[0].num_units == 7
    assert plan.stages[0].units_run_again == 0
