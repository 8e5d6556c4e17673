"""Models that a check has to pass, and one for each fault that it has to name."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

WIDTH, ROWS = 8, 8


class Data(pl.LightningDataModule):
    """One batch of eight rows, beside which there is a vector of eight classes."""

    def train_dataloader(self) -> Any:
        source = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, WIDTH, generator=source)
        y = torch.randint(0, WIDTH, (ROWS,), generator=source)
        prior = torch.linspace(-1, 1, WIDTH)
        return DataLoader([{"x": x, "y": y, "prior": prior}] * 2, batch_size=None)


class Right(pl.LightningModule):
    """Layers and a loss that is a mean over rows; what others are variants of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(self.layer(i) for i in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))

    def layer(self, number: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits, batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.steps += 1
        loss = self.loss(self.head(self.layers(batch["x"])), batch)
        self.log("loss", loss, batch_size=len(batch["x"]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Dropout(Right):
    """Draws, in modules and between them."""

    def layer(self, number: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))


class Norms(Right):
    """Micro-batches are normalised by themselves."""

    def layer(self, number: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Contrastive(Right):
    """Compares rows with each other."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        z = F.normalize(logits, dim=-1)
        return F.cross_entropy(z @ batch["x"].t(), torch.arange(len(z)))


class Summed(Right):
    """Adds the rows up and does not say so."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits, batch["y"], reduction="sum")


class Masked(Right):
    """Divides by what counts, of which a copy may have more than the other, and says so."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.head(self.layers(batch["x"]))
        counts = batch["x"][:, 0] > -0.65  # two rows of the first four, three of the others
        losses = F.cross_entropy(logits, batch["y"], reduction="none") * counts
        number = counts.sum()
        return {"loss": losses.sum() / number.clamp(min=1), "loss_weight": number}


class Added(Right):
    """Adds the rows up and says so."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        logits = self.head(self.layers(batch["x"]))
        return {
            "loss": F.cross_entropy(logits, batch["y"], reduction="sum"),
            "loss_weight": "sum",
        }


class ByWorld(Right):
    """Does something else where there are more than two processes."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        scale = 1.0 + (self.trainer.world_size > 2)
        return super().training_step(batch, batch_idx) * scale


class Prior(Right):
    """A vector of classes has as many entries as the batch has rows."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits + batch["prior"], batch["y"])


class SilentPrior(Right):
    """The same where a part of it fits, too."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(logits, batch["y"]) * batch["prior"].square().sum()


class Cell(nn.Module):
    """Goes on where its last call ended."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.before: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        if self.before is not None:
            h = h + self.before
        self.before = h.detach().mean()
        return h


class State(Right):
    """A block finds what it left in the micro-batch before."""

    def layer(self, number: int) -> nn.Module:
        return Cell() if number == 1 else super().layer(number)


def _hidden() -> Any:
    """A generator that nobody can find."""
    generator = np.random.default_rng(5)
    return lambda: float(generator.normal())


_NOISE = _hidden()


class HiddenNoise(Right):
    """Draws from it."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(logits, batch) * (1 + 0.1 * _NOISE())


class ByRank(Right):
    """Does something else on another rank."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return super().training_step({**batch, "x": batch["x"] * (1 + self.global_rank)}, batch_idx)


class ByEnvironment(Right):
    """The same by the environment."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        scale = 1.0 + float(os.environ.get("RANK", "0"))
        return super().training_step(batch, batch_idx) * scale


class Infinite(Right):
    """Is wrong on one device already."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(logits, batch) / 0


class Fails(Right):
    """Raises on one device already."""

    def loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return super().loss(logits[:, :3], batch)


class Small(Right):
    """Has too few units for two stages."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.layers = torch.tanh  # type: ignore[assignment]


class Manual(Right):
    """Is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def sleeps(rank: int) -> None:
    """A job that gives no answer."""
    time.sleep(60)


def dies(rank: int) -> None:
    """A job that ends its process."""
    if rank == 1:
        os._exit(3)


def answers(rank: int) -> int:
    """A job that does."""
    return rank + 10
