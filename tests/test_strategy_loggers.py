"""What a step says to loggers itself, prints, and logs as plain numbers is said once per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy
from lightning_pipe.errors import CutError


class _Run:
    """What `logger.experiment` is."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.calls.append((name, float(value), step))

    def add_histogram(self, name: str, values: Tensor, global_step: int = 0) -> None:
        self.calls.append((name, values.shape[0], values.double().sum().item(), global_step))

    def get_step(self) -> int:
        return 7


class _Logger(Logger):
    def __init__(self) -> None:
        self.experiment = _Run()
        self.metrics: list[Any] = []

    name, version = "mine", 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((dict(metrics), step))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class _Talks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))
        self.said: list[Any] = []

    def print(self, *values: Any, **_: Any) -> None:
        self.said.append(tuple(float(value) for value in values))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[:2](x)
        self.print(hidden.mean(), 2)  # between blocks: it is no call of the step
        hidden = hidden + x
        out = self.net[2:](hidden)
        loss = F.mse_loss(out, y)
        assert isinstance(self.logger, _Logger)
        for logger in self.loggers:
            logger.experiment.add_scalar("loss", loss.item(), self.global_step)
            logger.experiment.add_histogram("out", out, global_step=logger.experiment.get_step())
        self.logger.log_metrics({"direct": float(loss), "two": 2.0}, step=self.global_step)
        self.log("rate", 0.1)  # a float of the precision that the step has
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("flag", 0.3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(devices: int, strategy: dict[str, Any] | None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(10, n, generator=generator, dtype=torch.float64) for n in (8, 1))
    module, logger = _Talks(), _Logger()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        max_epochs=2,
        precision="64-true",
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    trainer.fit(module, loader, loader)
    rate = trainer.callback_metrics["rate"]
    return {
        "calls": logger.experiment.calls,
        "metrics": logger.metrics,
        "said": module.said,
        "rate": (rate.dtype, rate.item(), trainer.callback_metrics["flag"].item()),
    }


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for key in value for part in (key, *_flat(value[key]))]
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _flat(item)]
    return [pytest.approx(value, rel=1e-9)] if isinstance(value, float) else [value]


def test_loggers_hear_each_step_once_with_the_values_of_the_whole_batch() -> None:
    expected = _flat(run_ranks(1, _fit, 1, None)[0])
    alone = {"virtual_stages": 2, "num_microbatches": 2}
    assert _flat(run_ranks(1, _fit, 1, alone)[0]) == expected
    assert _flat(run_ranks(2, _fit, 2, {"num_microbatches": 2})[0]) == expected


class _Grows(_Talks):
    """Changes its weights after the first epoch."""

    def __init__(self, change: Callable[[_Grows], None]) -> None:
        super().__init__()
        self.change = change

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.change(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.net(batch[0])
        return F.mse_loss(self.extra(out) if hasattr(self, "extra") else out, batch[1])


def _adds(module: _Grows) -> None:
    module.extra = nn.Linear(1, 1)


def _replaces(module: _Grows) -> None:
    module.net[-1] = nn.Linear(8, 1)


def _changed(change: Callable[[_Grows], None], name: str) -> None:
    loader = DataLoader(TensorDataset(torch.randn(4, 8), torch.randn(4, 1)), batch_size=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipelineStrategy(virtual_stages=2, num_microbatches=2),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with pytest.raises(CutError, match=rf"weight {name}, which was made or replaced"):
        trainer.fit(_Grows(change), loader)


def test_weights_that_come_after_the_cut_are_refused() -> None:
    run_ranks(1, _changed, _adds, "extra.weight")
    run_ranks(1, _changed, _replaces, "net.4.weight")
