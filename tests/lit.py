"""LightningModules for tests of the strategy, and one function that trains them on any number of
ranks.

`fit` runs inside of worker processes: on one rank with Lightning's own strategy it makes the
reference.
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests import helpers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_pipe import PipelineStrategy


class Lit(pl.LightningModule):
    """A classifier of blocks; what it logs and how it trains is common to all models here."""

    def __init__(self, width: int = 8, depth: int = 6, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = self.make_net(width, depth)

    def make_net(self, width: int, depth: int) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
        return nn.Sequential(*blocks, nn.Linear(width, 4))

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Block(nn.Module):
    """Causal attention and an MLP, pre-norm, residuals inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.norm2(x))


class TiedLM(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int, depth: int, vocabulary: int = 11, length: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitTied(Lit):
    """Trains `TiedLM` on next tokens."""

    def make_net(self, width: int, depth: int) -> nn.Module:
        return TiedLM(width, depth)

    def loss(self, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        logits = self.net(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def run_ranks(num_ranks: int, fn: Any, *args: Any) -> list[Any]:
    """As `helpers.run_ranks`, with the time that a first import of Lightning takes on a busy
    machine."""
    return helpers.run_ranks(num_ranks, fn, *args, timeout=160)


def world() -> int:
    """Ranks of the body that runs now."""
    return torch.distributed.get_world_size()


def rows(count: int = 40, width: int = 8) -> Dataset:
    """Vectors and classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def tokens(count: int = 40, length: int = 9) -> Dataset:
    """Random sentences."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, 11, (count, length), generator=generator))


MODELS = {"mlp": (Lit, rows), "tied": (LitTied, tokens)}


def trainer(strategy: dict[str, Any] | None, devices: int, **arguments: Any) -> pl.Trainer:
    """A quiet fp64 Trainer on the CPU; `strategy` are arguments of `PipelineStrategy`, None is
    Lightning's."""
    warnings.simplefilter("ignore")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": devices,
        "strategy": "auto" if strategy is None else PipelineStrategy(**strategy),
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "precision": "64-true",
    }
    return pl.Trainer(**{**defaults, **arguments})


def loader_for(used: pl.Trainer, dataset: Dataset, batch_size: int) -> DataLoader:
    """Rows in their order, those of this copy; Lightning's own sampler of training shuffles."""
    if not getattr(used.strategy, "is_distributed", False):
        return DataLoader(dataset, batch_size=batch_size)
    sampler = DistributedSampler(dataset, **used.strategy.distributed_sampler_kwargs, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def fit_and_keep(
    strategy: dict[str, Any] | None,
    module: pl.LightningModule,
    loader: Any,
    folder: str,
    max_steps: int,
    ckpt_path: str | None = None,
    keep: int = -1,
) -> dict[str, Any]:
    """Trains, with a checkpoint after every third step; what it ended with."""
    save = ModelCheckpoint(folder, filename="{step}", save_top_k=keep, every_n_train_steps=3)
    used = trainer(
        strategy,
        world(),
        max_epochs=-1,
        max_steps=max_steps,
        enable_checkpointing=True,
        callbacks=[save],
    )
    used.fit(module, loader, ckpt_path=ckpt_path)
    return outcome(module, used)


def seeded(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """A module in fp64, made from seed 1."""
    pl.seed_everything(1, verbose=False)
    torch.set_default_dtype(torch.float64)
    try:
        return cls(*args, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(module: pl.LightningModule, used: pl.Trainer) -> dict[str, Any]:
    """What one run and another are compared by."""
    return {
        "weights": {name: value.clone() for name, value in module.state_dict().items()},
        "metrics": {name: value.item() for name, value in used.callback_metrics.items()},
        "steps": used.global_step,
    }


def fit(
    strategy: dict[str, Any] | None,
    devices: int,
    model: str = "mlp",
    *,
    batch_size: int = 8,
    shuffle: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Trains a model of `MODELS`."""
    cls, dataset = MODELS[model]
    module = seeded(cls)
    used = trainer(strategy, devices, **arguments)
    used.fit(
        module,
        DataLoader(dataset(), batch_size=batch_size, shuffle=shuffle),
        DataLoader(dataset(), batch_size=batch_size),
    )
    return outcome(module, used)


def assert_equal(
    results: list[dict[str, Any]], reference: dict[str, Any], tolerance: float = 1e-9
) -> None:
    """Every rank ended with the reference's weights, metrics and number of steps."""
    for result in results:
        assert result["steps"] == reference["steps"]
        assert list(result["weights"]) == list(reference["weights"])
        for name, value in reference["weights"].items():
            torch.testing.assert_close(
                result["weights"][name], value, rtol=tolerance, atol=tolerance, msg=name
            )
        assert result["metrics"].keys() == reference["metrics"].keys()
        for name, value in reference["metrics"].items():
            assert abs(result["metrics"][name] - value) <= tolerance * max(1, abs(value)), name
