"""What hooks make before the first step is there when the step runs, as on one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy


class _Prepared(pl.LightningModule):
    """Reads in its step what three hooks have made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 1))

    def on_fit_start(self) -> None:
        self.scale = 2.0

    def on_train_start(self) -> None:
        self.shift = torch.ones(1)

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self.net(x) * self.scale + self.shift, y)
        self.losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class _Broken(_Prepared):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise KeyError("never made")


def _fit(kind: type[_Prepared], devices: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 1, generator=generator)
    module = kind()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="auto" if devices == 1 else PipelineStrategy(num_microbatches=4),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    trainer.fit(module, loader, loader)
    numbers = {k: float(v) for k, v in trainer.callback_metrics.items()}
    return {**numbers, **{k: v.clone() for k, v in module.state_dict().items()}}


@pytest.mark.filterwarnings("ignore")
def test_a_step_finds_what_hooks_made_for_it() -> None:
    expected = _fit(_Prepared, 1)
    for got in run_ranks(2, _fit, _Prepared, 2, timeout=90):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            other = torch.as_tensor(got[name])
            assert torch.allclose(other, torch.as_tensor(value), atol=1e-6), name


def test_a_step_that_always_raises_raises_its_own_error() -> None:
    with pytest.raises(KeyError, match="never made"):
        run_ranks(2, _fit, _Broken, 2, timeout=90)
