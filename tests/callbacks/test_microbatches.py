"""More micro-batches as training goes on: another bubble, the same numbers."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import (
    ConfigError,
    EffectiveBatchRescaler,
    MicrobatchSchedule,
    PipelineStrategy,
    ScheduleError,
)


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        schedule = getattr(self.trainer.strategy, "schedule", None)
        self.seen.append(schedule.num_microbatches if schedule else 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def _fit(devices: int, strategy: Any, callbacks: Any) -> tuple[dict[str, Tensor], list[int]]:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    module = _Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy=strategy,
            callbacks=callbacks,
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=8))
    return {k: v.clone() for k, v in module.state_dict().items()}, module.seen


def _ramp() -> dict[str, Any]:
    rescaler = EffectiveBatchRescaler("linear")
    callbacks = [MicrobatchSchedule({0: 2, 2: 4, 5: 8}), rescaler]
    weights, seen = _fit(2, PipelineStrategy(schedule="1f1b"), callbacks)
    by_epoch = [MicrobatchSchedule({0: 4, 1: 2}, "epoch")]
    again = _fit(2, PipelineStrategy(), by_epoch)
    with pytest.raises(ScheduleError, match="1f1b"):  # at setup, though it comes at step 9
        _fit(2, PipelineStrategy(schedule="1f1b"), [MicrobatchSchedule({0: 2, 9: 1})])
    return {
        "weights": [weights, again[0]],
        "seen": [seen, again[1]],
        "rescaled": (rescaler.history, rescaler.effective_batch),
    }


def test_the_number_follows_and_the_training_does_not_change() -> None:
    expected, _ = _fit(1, "auto", [])
    for found in run_ranks(2, _ramp, timeout=120):
        assert found["seen"] == [[2, 2, 4, 4, 4, 8], [4, 4, 4, 2, 2, 2]]
        for weights in found["weights"]:
            torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)
        assert found["rescaled"] == ([], 8)  # the batch is the same


def test_what_cannot_run_is_refused_at_setup() -> None:
    for milestones in ({}, {5: 8}, {0: 0}, {0: 1, -1: 2}):
        with pytest.raises(ConfigError, match="one for 0"):
            MicrobatchSchedule(milestones)
    with pytest.raises(ConfigError, match="'step' or 'epoch'"):
        MicrobatchSchedule({0: 1}, "batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="SingleDeviceStrategy"):
        _fit(1, "auto", [MicrobatchSchedule({0: 2})])
