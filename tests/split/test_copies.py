"""Averages of weights live on the stage of what they average; compiled modules are opened."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from lightning_pipe.split._fake import run_eagerly
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.copies import copied_names, find_copies
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ownership import parameters_of_stages


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.average = AveragedModel(self.net)
        self.copied = nn.ModuleDict({"net": copy.deepcopy(self.net)})
        self.other = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum()  # type: ignore[no-any-return]


def test_the_outermost_copy_of_what_the_step_reads_is_found() -> None:
    model = _Model()
    read = frozenset(f"net.{name}" for name, _ in model.net.named_parameters())
    copies = find_copies(model, read)
    assert copies == {"average.module": "net", "copied.net": "net"}
    names = copied_names(["net.1", "other"], copies)
    assert names == {"average.module.1": "net.1", "copied.net.1": "net.1"}


def test_copies_are_held_where_their_sources_are_and_the_rest_on_the_last_stage() -> None:
    model = _Model()
    trace = trace_step(model, model, torch.ones(2, 4), num_stages=2)
    first, last = parameters_of_stages(model, StepCut(trace, place(trace, (0, 2))))
    of_net = {name for name in first if name.startswith("net.")}
    assert of_net == {f"net.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")}
    for prefix in ("average.module", "copied.net"):
        moved = {name for name in first if name.startswith(prefix)}
        assert moved == {name.replace("net", prefix, 1) for name in of_net}
    assert {"other.weight", "other.bias"} <= last
    assert not first & last
    assert first | last == {name for name, _ in model.named_parameters()}


def _no_backend(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled")


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_module_runs_eagerly_while_its_units_are_on_stages() -> None:
    model = _Model()
    expected = model(torch.ones(2, 4))
    model.alias = torch.compile(model.net[1], backend=_no_backend)
    undo = run_eagerly(model)
    called = []
    model.net[1].register_forward_hook(lambda *args: called.append(args[0]))
    h = model.net[0](torch.ones(2, 4))
    assert torch.equal(model.net[2:](model.alias(h)).sum(), expected)
    assert called == [model.net[1]]
    undo()
    with pytest.raises(Exception, match="compiled"):
        model.alias(h)
