"""The bubble of stages that only sleep is the schedule's, and its parts are what was injected."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import BubbleMonitor, ConfigError, PipelineDoctor, PipelineStrategy

UNIT_S = 0.03


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _Sleeper(nn.Module):
    """Sleeps a unit in the forward and two in the backward; while traced it does not."""

    def __init__(self, units: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.units = units

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeps.apply(x + self.weight, self.units * UNIT_S)


class _Module(pl.LightningModule):
    def __init__(self, units: list[float]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(_Sleeper(unit) for unit in units))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(
    units: list[float], devices: int, root: Any = None, *, plain: bool = False, **strategy: Any
) -> dict[str, Any]:
    monitor, doctor = BubbleMonitor(every_n_steps=2), PipelineDoctor(num_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="auto" if plain else PipelineStrategy(balance="uniform", **strategy),
            callbacks=[monitor, doctor],
            max_epochs=1,
            logger=CSVLogger(root) if root else False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(_Module(units), DataLoader(TensorDataset(torch.ones(48, 1)), batch_size=16))
    assert monitor.latest is not None
    assert trainer.strategy.bubble is not None
    return {
        "measured": monitor.latest,
        "ideal": trainer.strategy.bubble.ideal_fraction,
        "summary": monitor.summary(),
        "verdict": doctor.verdict,
        "path": trainer.logger.log_dir if trainer.logger else None,
    }


def _runs(root: str) -> list[dict[str, Any]]:
    return [
        _fit([1.0, 1.0], 2, root, num_microbatches=4, schedule="1f1b"),
        _fit([0.5] * 4, 2, num_microbatches=4, schedule="interleaved_1f1b", virtual_stages=2),
        _fit([1.0, 2.0], 2, num_microbatches=8, schedule="1f1b"),
        _fit([1.0, 1.0], 2, num_microbatches=1, schedule="gpipe"),
    ]


def test_sleeping_stages_have_the_bubble_of_their_schedule(tmp_path: Any) -> None:
    results = run_ranks(2, _runs, str(tmp_path), timeout=150)
    for even, interleaved, uneven, one in results:
        for run, ideal in ((even, 1 / 5), (interleaved, 1 / 9), (one, 1 / 2)):
            found = run["measured"]
            assert run["ideal"] == pytest.approx(ideal)
            assert found.bubble_fraction > ideal - 0.01
            _parts_add_up(found)
        assert uneven["measured"].imbalance_fraction > 0.1
        assert (
            uneven["measured"].stage_utilisations[1]
            > 1.5 * (uneven["measured"].stage_utilisations[0])
        )
        _parts_add_up(uneven["measured"])
        assert (uneven["verdict"].cause, uneven["verdict"].stage) == ("imbalance", 1)
        assert one["verdict"].cause == "bubble"
        assert "ideal 20.0%" in even["summary"]
    header, *rows = Path(results[0][0]["path"], "metrics.csv").read_text().splitlines()
    for name in ("bubble_fraction", "bubble_ideal", "bubble_host", "bubble_fraction/rank_1"):
        assert f"pipeline/{name}" in header
    assert "pipeline/utilisation/stage_1" in header
    assert len(rows) == 1


def _parts_add_up(found: Any) -> None:
    parts = (found.fill_drain_fraction, found.imbalance_fraction)
    parts += (found.communication_fraction, found.host_fraction)
    assert sum(parts) == pytest.approx(found.bubble_fraction, abs=1e-9)


def test_what_it_cannot_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        BubbleMonitor(every_n_steps=0)
    with pytest.raises(ConfigError, match="strategy is SingleDeviceStrategy"):
        _fit([0.0], 1, plain=True)
