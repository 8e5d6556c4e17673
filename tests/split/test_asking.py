"""Code between units that asks what a tensor is gets the answer of one device, or an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.split.parity import TanhBlock, compare
from tests.zoo.modules import Case
from torch import Tensor, nn

Question = Callable[[Tensor, nn.Module], bool]
QUESTIONS: dict[str, Question] = {
    "type is": lambda h, net: type(h) is Tensor,
    "type equals": lambda h, net: type(h) == Tensor,  # noqa: E721
    "type in": lambda h, net: type(h) in (Tensor, nn.Parameter),
    "type is parameter": lambda h, net: type(h) is nn.Parameter,
    "type of a weight": lambda h, net: type(net.blocks[0].linear.weight) is nn.Parameter,
    "is instance": lambda h, net: isinstance(h, Tensor) and not isinstance(h, nn.Parameter),
    "weight is instance": lambda h, net: isinstance(net.blocks[1].linear.weight, nn.Parameter),
    "is_leaf": lambda h, net: not h.is_leaf,
    "is_leaf, no gradient": lambda h, net: h.detach().is_leaf,
    "grad_fn": lambda h, net: h.grad_fn is not None,
    "grad_fn, no gradient": lambda h, net: h.detach().grad_fn is None,
    "requires_grad": lambda h, net: h.requires_grad,
    "id": lambda h, net: id(h) == id(net.kept),
    "data_ptr": lambda h, net: h.data_ptr() == net.kept.data_ptr(),
    "data_ptr of another": lambda h, net: h.data_ptr() == h.clone().data_ptr(),
    "storage of another": lambda h, net: (
        h.untyped_storage().data_ptr() == h.clone().untyped_storage().data_ptr()
    ),
    "data_ptr of a view": lambda h, net: h[1:].data_ptr() == h.data_ptr() + 6 * 8,
    "storage": lambda h, net: (
        h.untyped_storage().data_ptr() == net.kept.untyped_storage().data_ptr()
    ),
}


class Asking(nn.Module):
    """What the next block is given depends on an answer."""

    def __init__(self, question: Question) -> None:
        super().__init__()
        self.question = question
        self.blocks = nn.ModuleList(TanhBlock(6) for _ in range(6))
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for number, block in enumerate(self.blocks):
            h = block(h)
            self.kept = h
            h = h * (number + 2) if self.question(h, self) else h - 0.5
        self.kept = None
        return h.square().mean()


@pytest.mark.parametrize("name", sorted(QUESTIONS))
def test_an_answer_is_that_of_one_device(name: str) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        module = Asking(QUESTIONS[name]).double()
        return Case(module, lambda batch: module(batch["x"]), {"x": torch.randn(4, 6).double()})

    case = build()
    plain = [case.loss({"x": piece}).item() for piece in case.batch["x"].chunk(2)]
    found = compare(build, 3)
    assert found.missing == []
    assert found.loss_error < 1e-9
    assert found.gradient_error < 1e-9
    assert found.losses == pytest.approx(plain, rel=1e-12), "the reference asks nothing of ours"
