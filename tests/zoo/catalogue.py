"""All models of the zoo by name, each inside a plain LightningModule."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from tests.zoo.handmade import HANDMADE
from tests.zoo.huggingface import HUGGINGFACE
from tests.zoo.modules import MODELS, Batch, Case
from tests.zoo.timm_models import TIMM
from torch import Tensor


class Plain(pl.LightningModule):
    """What a user would write around a model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.net = case.module
        self.loss = case.loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _wrapped(build: Callable[[], Case]) -> Callable[[], Case]:
    def wrapped() -> Case:
        case = build()
        module = Plain(case)
        return Case(module, lambda b: module.training_step(b, 0), case.batch)

    return wrapped


ZOO = {
    name: _wrapped(build) for name, build in {**HUGGINGFACE, **TIMM, **HANDMADE, **MODELS}.items()
}
