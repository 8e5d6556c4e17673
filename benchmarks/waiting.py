"""What benchmarks of time share: units that wait instead of computing, and a quiet run of them."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

SCHEDULES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_1f1b": 2, "looped_bfs": 2,
    "zbv": 2, "dualpipev": 2,
}  # fmt: skip
"""Every schedule with a number of virtual stages that it can have."""


class Wait(torch.autograd.Function):
    """Passes a value on, and takes so long forward and so long backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


def fit(
    module: pl.LightningModule,
    steps: int,
    rows: int,
    callbacks: list[Any],
    *,
    width: int = 16,
    logger: Any = False,
    **arguments: Any,
) -> Any:
    """Trains some steps on this job's ranks; returns the strategy, which takes the arguments."""
    from lightning_pipe import PipelineStrategy

    warnings.simplefilter("ignore")
    strategy = PipelineStrategy(**{"balance": "uniform", **arguments})
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy=strategy,
        max_steps=steps, logger=logger, callbacks=callbacks, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = TensorDataset(torch.ones(steps * rows, width))
    trainer.fit(module, DataLoader(data, batch_size=rows))
    return strategy
