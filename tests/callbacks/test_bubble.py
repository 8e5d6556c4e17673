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

from lightning_pipe import (
    BubbleMonitor,
    ConfigError,
    MicrobatchSchedule,
    PipelineDoctor,
    PipelineStrategy,
)
from lightning_pipe.planning.evidence import read_evidence
from lightning_pipe.runtime.transfer import Links

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
    units: list[float],
    devices: int,
    root: Any = None,
    *,
    plain: bool = False,
    rows: int = 16,
    **strategy: Any,
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
        trainer.fit(
            _Module(units), DataLoader(TensorDataset(torch.ones(3 * rows, 1)), batch_size=rows)
        )
    assert monitor.latest is not None
    assert trainer.strategy.bubble is not None
    return {
        "measured": monitor.latest,
        "ideal": trainer.strategy.bubble.ideal_fraction,
        "summary": monitor.summary(),
        "verdict": doctor.verdict,
        "all": doctor.verdicts,
        "path": trainer.logger.log_dir if trainer.logger else None,
    }


def _runs(root: str) -> list[dict[str, Any]]:
    return [
        _fit([1.0, 1.0], 2, root, num_microbatches=4, schedule="1f1b"),
        _fit([0.5] * 4, 2, num_microbatches=4, schedule="interleaved_1f1b", virtual_stages=2),
        _fit([1.0, 2.0], 2, num_microbatches=8, schedule="1f1b"),
        _fit([1.0, 1.0], 2, num_microbatches=1, schedule="gpipe"),
        _over_a_slow_link(),
        _fit([1.0, 1.0], 2, rows=2, num_microbatches=8, schedule="gpipe"),
    ]


def _over_a_slow_link() -> dict[str, Any]:
    """Each message is two units late for whoever waits for it."""
    own_wait, own_receive, under_way = Links.wait, Links.receive, set[int]()

    def receive(self: Links, specs: Any, position: int) -> Any:
        message, values = own_receive(self, specs, position)
        under_way.add(id(message))
        return message, values

    def wait(self: Links, message: Any, position: int, what: object = "") -> None:
        if id(message) in under_way:
            under_way.remove(id(message))
            time.sleep(2 * UNIT_S)
        own_wait(self, message, position, what)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Links, "wait", wait)
        patch.setattr(Links, "receive", receive)
        return _fit([1.0, 1.0], 2, num_microbatches=8, schedule="1f1b")


def test_sleeping_stages_have_the_bubble_of_their_schedule(tmp_path: Any) -> None:
    results = run_ranks(2, _runs, str(tmp_path), timeout=150)
    for even, interleaved, uneven, one, late, small in results:
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
        assert "balance=" not in uneven["verdict"].advice  # one unit each: nothing to move
        assert late["verdict"].cause == "communication"
        assert "B per micro-batch, " in late["verdict"].text
        _parts_add_up(late["measured"])
        assert [verdict.cause for verdict in small["all"]] == ["small batch"]
        assert "num_microbatches=8 was asked for, and the batch has rows for 2" in str(small["all"])
        assert "ideal 20.0%" in even["summary"]
    header, *rows = Path(results[0][0]["path"], "metrics.csv").read_text().splitlines()
    for name in ("bubble_fraction", "bubble_ideal", "bubble_host", "bubble_fraction/rank_1"):
        assert f"pipeline/{name}" in header
    assert "pipeline/utilisation/stage_1" in header
    assert len(rows) == 1
    evidence = read_evidence(results[0][0]["path"])
    assert evidence.run.unit_counts == (1, 1)
    assert evidence.found is not None
    assert evidence.found.bubble_fraction == results[0][0]["measured"].bubble_fraction


def _parts_add_up(found: Any) -> None:
    parts = (found.fill_drain_fraction, found.imbalance_fraction)
    parts += (found.communication_fraction, found.host_fraction)
    assert sum(parts) == pytest.approx(found.bubble_fraction, abs=1e-9)


class _Jumps(pl.LightningModule):
    """Its loss is higher from the tenth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        more = 5.0 if self.trainer.global_step >= 10 else 0.0
        return self.net(batch[0]).square().mean() + more

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("milestones", [{0: 2, 10: 4}, {0: 2}])
def test_a_loss_that_jumps_after_a_change_is_said_once(milestones: dict[int, int]) -> None:
    doctor = PipelineDoctor(num_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=PipelineStrategy(num_microbatches=2),
            callbacks=[doctor, MicrobatchSchedule(milestones)],
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(torch.randn(8 * 25, 2))
        trainer.fit(_Jumps(), DataLoader(data, batch_size=8))
    jumps = [verdict for verdict in doctor.verdicts if verdict.cause == "loss jump"]
    assert len(jumps) == len(milestones) - 1
    for verdict in jumps:
        assert "num_microbatches went from 2 to 4" in verdict.text


def test_what_it_cannot_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        BubbleMonitor(every_n_steps=0)
    with pytest.raises(ConfigError, match="strategy is SingleDeviceStrategy"):
        _fit([0.0], 1, plain=True)
