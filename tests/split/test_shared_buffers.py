"""A unit with running statistics that is called on several stages is pointed out."""

from __future__ import annotations

import torch
from torch import nn

from lightning_pipe.layout import Layout
from lightning_pipe.placing import cut_step
from lightning_pipe.planned import make_plan
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ownership import parameters_of_stages
from lightning_pipe.split.profile import profile_of


class _Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([self.tower(x), self.tower(x.flip(0))], 1)).mean()


def _notes(starts: tuple[int, ...], batchnorm: str = "micro-batch") -> str:
    module = _Siamese()
    trace = trace_step(module, module, torch.randn(4, 4), num_stages=2)
    cut = StepCut(trace, place(trace, starts))
    sizes = {n: (p.numel(), p.numel() * 4) for n, p in module.named_parameters()}
    held = parameters_of_stages(module, cut)
    profile, layout = profile_of(module, trace, rows=4), Layout(2, batchnorm=batchnorm)
    plan = make_plan(layout, trace, cut, held, profile, sizes=sizes, num_microbatches=8)
    return " ".join(plan.notes)


def test_statistics_of_a_unit_on_several_stages_are_pointed_out() -> None:
    assert "tower.1 updates buffers and is called on several stages" in _notes((0, 2))
    assert "updates buffers" not in _notes((0, 4))
    assert "updates buffers" not in _notes((0, 2), "deferred"), "the stages are put together"


class _Twice(nn.Module):
    """A small norm that is called on both sides of the most even cut."""

    def __init__(self, between: int) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.between = nn.ModuleList(nn.Linear(8, 8) for _ in range(between))
        self.after = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.before:
            x = layer(x)
        x = self.norm(x)
        for layer in self.between:
            x = layer(x)
        x = self.norm(x)
        for layer in self.after:
            x = layer(x)
        return x.mean()


def _stages_of_norm(between: int, layout: Layout) -> set[int]:
    module = _Twice(between)
    trace = trace_step(module, module, torch.randn(4, 8), num_stages=2)
    cut = cut_step(layout, trace, profile_of(module, trace, rows=4), 8)
    calls = zip(trace.calls, cut.stage_of_call, strict=True)
    return {stage for call, stage in calls if call.unit == "norm"}


def test_calls_of_a_norm_stay_on_one_stage_where_the_balance_allows_it() -> None:
    assert len(_stages_of_norm(2, Layout(2))) == 1
    assert len(_stages_of_norm(8, Layout(2))) == 2, "one stage would have nearly all of the work"
    assert len(_stages_of_norm(2, Layout(2, balance=(6, 6)))) == 2, "the user says where to cut"
