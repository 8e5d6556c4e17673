"""Activation checkpointing: units run twice, and nobody can tell."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.split.parity import compare, piece
from tests.zoo.catalogue import ZOO
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.split.again import can_run_again, names_of_classes
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.program import StageProgram

SOME = (
    "auxiliary_attribute",
    "captured_by_hook",
    "checkpointed_region",
    "encoder_decoder",
    "frozen_middle",
    "inplace_residual",
    "module_hooks",
    "resnet",
    "siamese",
    "tensor_hook",
    "variational",
)


@pytest.mark.parametrize("name", SOME)
def test_units_that_run_again_give_the_same_gradients(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = compare(ZOO[name], 2, again=True)
    assert result.missing == []
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5


class _Counts(nn.Module):
    """A block whose result depends on a buffer that it changes, as a codebook's does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = self.scale + 1.0
        return self.norm(self.linear(x)).tanh() * self.scale


class _Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Counts() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.head(x).mean()


@contextmanager
def _kept() -> Iterator[list[int]]:
    """Bytes that autograd keeps; what a unit keeps that runs again does not get here."""
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield sizes


def _run(again: frozenset[str]) -> tuple[dict[str, torch.Tensor], int]:
    module, batch = _Chain(), torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    trace = trace_step(module, module, batch, num_stages=1)
    cut = StepCut(trace, place(trace, (0,)))
    program = StageProgram(cut, 0, module, again=again)
    with _kept() as sizes:
        losses = [
            program.run(lambda m=m: module(piece(batch, m)), (), key=m).value for m in range(2)
        ]
    for loss in losses:  # both are in flight, so the buffers have moved on
        loss.backward()
    numbers = {name: p.grad for name, p in module.named_parameters()}
    return {**numbers, **dict(module.named_buffers())}, sum(sizes)


def test_buffers_that_change_are_read_as_they_were_and_change_once() -> None:
    plain, plain_bytes = _run(frozenset())
    again, again_bytes = _run(frozenset(f"blocks.{i}" for i in range(3)))
    assert plain.keys() == again.keys()
    for name, value in plain.items():
        assert torch.equal(value, again[name]), name
    assert again_bytes < plain_bytes / 2


class _WritesLater(nn.Module):
    """The glue writes into what a block was given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        out = self.second(h.detach())
        h.mul_(2.0)
        return self.third(out + h).sum()


def test_a_unit_whose_argument_is_written_later_runs_once() -> None:
    module = _WritesLater()
    trace = trace_step(module, module, torch.randn(2, 4), num_stages=2)
    able = {call.unit: can_run_again(trace, call) for call in trace.calls}
    assert able == {"first": True, "second": False, "third": False}


def test_an_argument_that_was_written_unseen_is_named() -> None:
    module, batch = _Chain(), torch.randn(8, 4)
    trace = trace_step(module, module, batch, num_stages=1)
    program = StageProgram(
        StepCut(trace, place(trace, (0,))), 0, module, again=frozenset({"blocks.0"})
    )
    result = program.run(lambda: module(batch), (), key=0)
    batch.add_(1.0)
    with pytest.raises(CutError, match=r"unit 'blocks\.0' cannot run again .* in place"):
        result.value.backward()


def test_classes_name_units_and_what_is_inside_of_them() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    units = ["0.0", "0.1", "1"]
    assert names_of_classes(module, units, {"Linear"}) == {"0.0", "1"}
    assert names_of_classes(module, units, {"torch.nn.modules.activation.ReLU"}) == {"0.1"}
    assert names_of_classes(module, units, {"Sequential"}) == {"0.0", "0.1"}
    assert names_of_classes(module, units, {"Conv2d", "Module"}) == set()
