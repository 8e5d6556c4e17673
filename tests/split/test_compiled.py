"""A compiled submodule beside the plain one: two names of one module, in any step."""

from __future__ import annotations

import pytest
import torch
from tests.split.parity import TanhBlock, compare, evaluate
from tests.zoo.modules import Case
from torch import Tensor, nn

from lightning_pipe.split._fake import run_eagerly

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """One block, or the whole stack, is compiled too; training and evaluation may differ."""

    def __init__(self, what: str, train: str, other: str) -> None:
        super().__init__()
        self.net = nn.Sequential(*(TanhBlock(6) for _ in range(6)))
        plain = self.net if what == "net" else self.net[2]
        self.alias = torch.compile(plain, backend="eager")
        self.what = what
        self.ways = {True: train, False: other}

    def forward(self, x: Tensor) -> Tensor:
        way = self.ways[self.training]
        if self.what == "net":
            return (self.alias if way == "compiled" else self.net)(x)
        for number, block in enumerate(self.net):
            if number == 2 and way != "plain":
                x = self.alias(x)
            if number != 2 or way != "compiled":
                x = block(x)
        return x


@pytest.mark.parametrize("what", ["block", "net"])
@pytest.mark.parametrize("train", ["compiled", "plain", "both"])
@pytest.mark.parametrize("other", ["compiled", "plain"])
def test_either_name_may_be_called(what: str, train: str, other: str) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        module = Model(what, train, other).double()
        run_eagerly(module)
        return Case(
            module, lambda b: module(b["x"]).square().mean(), {"x": torch.randn(4, 6).double()}
        )

    if other == "compiled":
        found = compare(build, 3)
        assert (found.missing, found.loss_error) == ([], 0.0)
        assert found.gradient_error < 1e-12
    assert evaluate(build, lambda case, batch: case.module(batch["x"]), 3) < 1e-12
