"""A unit with running statistics that is called on several stages is pointed out."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipe.layout import Layout, make_plan
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ownership import parameters_of_stages


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.tower(x), self.tower(x.flip(0))], 1)).mean()


def _notes(starts: tuple[int, ...]) -> str:
    module = _Siamese()
    trace = trace_step(module, module, torch.randn(4, 4), num_stages=2)
    cut = StepCut(trace, place(trace, starts))
    sizes = {n: (p.numel(), p.numel() * 4) for n, p in module.named_parameters()}
    held = parameters_of_stages(module, cut)
    plan = make_plan(Layout(2), trace, cut, held, sizes=sizes, num_microbatches=8)
    return " ".join(plan.notes)


def test_statistics_of_a_unit_on_several_stages_are_pointed_out() -> None:
    assert "tower.1 updates buffers and is called on several stages" in _notes((0, 2))
    assert "updates buffers" not in _notes((0, 4))
