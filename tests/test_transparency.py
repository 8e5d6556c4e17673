"""The test of a pipeline is that it is invisible: over stages as on one device.

Every schedule, every shape of pipeline, seven architectures, 20 AdamW steps and a validation, in
double precision to 1e-9 and in single precision to 1e-5. Batch normalisation sees micro-batches, so
its one device is Lightning's own gradient accumulation over batches of the micro-batch's size.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.zoo.lit import NAMES, build, loader
from torch import Tensor

from lightning_pipe import PipelineStrategy

STEPS, ROWS, MICROBATCHES = 20, 8, 4
SCHEDULES = {
    1: ("naive", "gpipe", "1f1b", "zero_bubble"),
    2: ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"),
}
ALL_AT_ONE_RANK = ("gpipe", "1f1b", "interleaved_1f1b")
Numbers = tuple[dict[str, Tensor], dict[str, float]]


def _train(name: str, dtype: torch.dtype, accumulate: int = 1, **trainer: Any) -> Numbers:
    rows = ROWS // accumulate
    module = build(name, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = pl.Trainer(
            accelerator="cpu",
            max_epochs=STEPS // 4,
            check_val_every_n_epoch=STEPS // 4,
            accumulate_grad_batches=accumulate,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **trainer,
        )
        fit.fit(module, loader(name, 4 * ROWS, rows, dtype), loader(name, 2 * ROWS, ROWS, dtype))
    assert fit.global_step == STEPS
    metrics = {k: float(v) for k, v in fit.callback_metrics.items()}
    return {k: v.detach().clone() for k, v in module.state_dict().items()}, metrics


@functools.cache
def _one_device(name: str, dtype: torch.dtype) -> Numbers:
    accumulate = MICROBATCHES if name == "resnet" else 1
    return _train(name, dtype, accumulate, devices=1)


def _over_stages(
    name: str, dtype: torch.dtype, devices: int, virtual_stages: int, schedules: tuple[str, ...]
) -> list[tuple[str, Numbers]]:
    """Runs in every rank."""
    return [
        (
            schedule,
            _train(
                name,
                dtype,
                devices=devices,
                strategy=PipelineStrategy(
                    num_microbatches=MICROBATCHES,
                    virtual_stages=virtual_stages,
                    schedule=schedule,
                ),
            ),
        )
        for schedule in schedules
    ]


def _assert_equal(name: str, dtype: torch.dtype, schedule: str, got: Numbers) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 1e-5
    weights, metrics = _one_device(name, dtype)
    assert got[0].keys() == weights.keys()
    for key, value in weights.items():
        error = (got[0][key].double() - value.double()).abs().max()
        scale = value.double().abs().max().clamp(min=1.0)
        assert error <= tolerance * scale, f"{schedule}: {key} differs by {error / scale:.1e}"
    skipped = {"train_loss_step", "train_loss"} if name == "resnet" else set()  # of one micro-batch
    for key in metrics.keys() - skipped:
        assert got[1][key] == pytest.approx(metrics[key], rel=max(tolerance, 1e-7)), (schedule, key)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_equals_one_device(name: str, virtual_stages: int) -> None:
    for schedule, got in _over_stages(name, torch.float64, 1, virtual_stages, ALL_AT_ONE_RANK):
        _assert_equal(name, torch.float64, schedule, got)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one_device(name: str, virtual_stages: int, pool: Any) -> None:
    args = (name, torch.float64, 2, virtual_stages, SCHEDULES[virtual_stages])
    for runs in pool(2, _over_stages, *args, timeout=150):
        for schedule, got in runs:
            _assert_equal(name, torch.float64, schedule, got)


@pytest.mark.parametrize("name", NAMES)
def test_four_ranks_equal_one_device(name: str, pool: Any) -> None:
    for runs in pool(4, _over_stages, name, torch.float64, 4, 1, SCHEDULES[1], timeout=170):
        for schedule, got in runs:
            _assert_equal(name, torch.float64, schedule, got)


@pytest.mark.parametrize("name", NAMES)
def test_single_precision_equals_one_device(name: str, pool: Any) -> None:
    for runs in pool(2, _over_stages, name, torch.float32, 2, 1, ("1f1b",), timeout=100):
        for schedule, got in runs:
            _assert_equal(name, torch.float32, schedule, got)
