"""What cannot run over stages is refused before training, by name and with a way out."""

from __future__ import annotations

import pytest
import torch
from tests.split.parity import compare
from tests.zoo.modules import Case
from torch import Tensor, nn

from lightning_pipe.errors import CutError, PlanError
from lightning_pipe.layout import Layout
from lightning_pipe.placing import cut_step
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.profile import profile_of


def _cut(module: nn.Module, num_stages: int) -> None:
    x = torch.randn(4, 6)
    trace = trace_step(module, lambda b: module(b).sum(), x, num_stages=num_stages)
    cut_step(Layout(num_stages), trace, profile_of(module, trace, rows=4), 4)


class Bare(nn.Module):
    """All weights are parameters of the outermost module."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(6, 6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


def test_bare_parameters_are_no_units() -> None:
    with pytest.raises(PlanError, match=r"bare parameters.*Put the weights into submodules"):
        _cut(Bare(), 2)


def test_fewer_calls_than_stages_names_the_units() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    with pytest.raises(PlanError, match=r"2 calls of modules.*: 0, 2. Give at most 2 stages"):
        _cut(module, 3)


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()
        h = self.two(torch.tanh(self.one(x)))
        (slope,) = torch.autograd.grad(h.sum(), x, create_graph=True)
        return h + slope


def test_gradients_inside_the_step_are_refused() -> None:
    with pytest.raises(CutError, match=r"calls grad inside itself.*one device"):
        _cut(Penalised(), 2)


class Gate(nn.Module):
    """Returns a Python number that depends on its input."""

    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.fixed = fixed

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        h = self.linear(x)
        return h, 0.5 if self.fixed else h.mean().item()


class Gated(nn.Module):
    def __init__(self, *, fixed: bool) -> None:
        super().__init__()
        self.gate = Gate(fixed=fixed)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h, score = self.gate(x)
        for block in self.blocks:
            h = torch.tanh(block(h)) * score
        return h


def _gated(*, fixed: bool) -> Case:
    torch.manual_seed(0)
    module = Gated(fixed=fixed).double()
    return Case(module, lambda b: module(b["x"]).sum(), {"x": torch.randn(4, 6).double()})


def test_a_number_that_a_unit_returns_is_refused_if_it_is_a_value() -> None:
    assert compare(lambda: _gated(fixed=True), 2).loss_error < 1e-9
    with pytest.raises(CutError, match=r"what 'gate' returns.*return it as a tensor"):
        compare(lambda: _gated(fixed=False), 2)
