"""What the planner is told about a model: against what a real run counts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.lit import TiedLM
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from lightning_pipe.planning.profile import Profile
from lightning_pipe.runtime.backward import backward_full, backward_input
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.measure import measure_units
from lightning_pipe.split.ownership import Ownership, parameters_of_stages
from lightning_pipe.split.profile import optimizer_state_bytes, profile_of
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.trace import Trace


class Block(nn.Module):
    """Norm, and an MLP whose last step is a function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(h))))


class Residual(nn.Module):
    """Residual sums in the glue, dropout, a wide head."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            h = h + F.dropout(block(h), 0.1)
        return self.head(h.relu())


def step_of(model: nn.Module) -> Any:
    return lambda tokens: F.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


def traced(model: nn.Module) -> tuple[Trace, Tensor, Profile]:
    tokens = torch.randint(0, 11, (6, 9))
    trace = trace_step(model, step_of(model), tokens, num_stages=4)
    return trace, tokens, profile_of(model, trace, rows=6)


@pytest.mark.parametrize(
    "build",
    [Residual, lambda: Residual(4), lambda: TiedLM(16, 6)],
    ids=["residual", "opened blocks", "tied"],
)
def test_saved_bytes_are_those_that_a_stage_keeps(build: Any) -> None:
    """Within 10% of what autograd really keeps on each stage; the loss's own share included."""
    torch.manual_seed(0)
    model = build()
    trace, tokens, profile = traced(model)
    starts = (0, 2, 3, 6)
    cut = StepCut(trace, place(trace, starts))
    ignored = {p.untyped_storage().data_ptr() for p in model.parameters()}
    ignored.add(tokens.untyped_storage().data_ptr())
    received: tuple[Tensor, ...] = ()
    for stage, end in enumerate([*starts[1:], len(trace.calls)]):
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            if not is_fake(tensor):  # glue on values of other stages keeps nothing
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor.detach()

        program = StageProgram(cut, stage, model)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = program.run(lambda: step_of(model)(tokens), received, key=1)
        counted = sum(t.untyped_storage().nbytes() for k, t in kept.items() if k not in ignored)
        assert profile.held_bytes(starts[stage], end) == pytest.approx(counted, rel=0.1)
        if not isinstance(out, StepResult):
            received = tuple(t.detach().requires_grad_(t.requires_grad) for t in out)


def test_weights_are_those_that_stages_hold() -> None:
    """Also where they are tied, or read between units."""
    model = TiedLM(16, 6)
    trace, _, profile = traced(model)
    starts = (0, 3, 5)
    held = parameters_of_stages(model, StepCut(trace, place(trace, starts)))
    ends = [*starts[1:], len(trace.calls)]
    assert [profile.stage_weights(a, b) for a, b in zip(starts, ends, strict=True)] == list(held)
    assert profile.num_parameters == sum(p.numel() for p in model.parameters())


def test_checkpointed_units_keep_their_inputs() -> None:
    _, _, profile = traced(Residual())
    block = profile.units[2]
    assert block.unit == "blocks.1"
    assert block.input_bytes == 6 * 8 * 16 * 4
    held = profile.held_bytes(1, 3, checkpointing=True)
    glue_bytes = 2 * sum(num_bytes for _, num_bytes in block.glue_saved)  # the dropout outside
    assert glue_bytes == 2 * 6 * 8 * 16 * 4
    assert held == 2 * block.input_bytes + glue_bytes < profile.held_bytes(1, 3)


def test_what_crosses_a_cut_is_what_is_sent() -> None:
    trace, _, profile = traced(Residual())
    for call in range(1, len(trace.calls)):
        cut = StepCut(trace, place(trace, (0, call)))
        sent = sum(trace.meta(key).wire_bytes for key in cut.crossing[0])
        assert (
            profile.units[call - 1].output_bytes == sent == profile.units[call - 1].gradient_bytes
        )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {}),
        ("SGD", {"momentum": 0.9}),
        ("AdamW", {"fused": True}),
        ("Adam", {"amsgrad": True}),
        ("Adagrad", {}),
        ("Adafactor", {}),
        ("Muon", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_state_is_what_a_step_makes(
    name: str, arguments: dict[str, Any], dtype: torch.dtype
) -> None:
    model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 30, bias=False)).to(dtype)
    model[0].weight.requires_grad_(name != "SGD")
    optimizer = getattr(torch.optim, name)(model.parameters(), **{"lr": 0.1, **arguments})
    found = optimizer_state_bytes(model, optimizer)
    assert not any(state for state in optimizer.state.values() if len(state) > 2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for full_name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {}).values()
        made = [t for t in state if isinstance(t, Tensor) and t.dim()]
        assert found.get(full_name, 0) == sum(t.nbytes for t in made)


def test_the_optimizer_itself_is_not_touched() -> None:
    """Not through the wrapper of a scheduler, not by its hooks, and if a step cannot be tried."""

    class NeedsClosure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return closure()

    model = nn.Linear(10, 20, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(before)
    assert optimizer_state_bytes(model, optimizer) == {"weight": 2 * 200 * 4}
    assert torch.equal(model.weight, before)
    assert not calls
    assert not optimizer.state
    own = NeedsClosure(model.parameters(), lr=0.1)
    assert optimizer_state_bytes(model, own) == {"weight": 2 * 200 * 4}


def test_units_are_timed_one_at_a_time() -> None:
    """Heavier units take longer; the module, its buffers and gradients are as before; weights that
    are fakes are stood in for."""
    torch.manual_seed(0)
    widths = (64, 512, *[64] * 13)

    class Work(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(64, width), nn.BatchNorm1d(width)
            self.down = nn.Linear(width, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.norm(self.up(x)).relu())

    model = nn.Sequential(nn.Linear(8, 64), nn.ModuleList(map(Work, widths)))
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def step(x: Tensor) -> Tensor:
        time.sleep(0.02)  # glue that every stage runs again
        x = model[0](x)
        for block in model[1]:
            x = block(x)
        return x.sum()

    x = torch.randn(2000, 8)
    for drop in (False, True):
        if drop:
            Ownership(model, frozenset()).drop_foreign()
        table = measure_units(
            model,
            step,
            x,
            num_stages=2,
            device=torch.device("cpu"),
            rows=2000,
            backward=backward_full,
            halves=backward_input,
            repeats=3,
        )
        assert [u.unit for u in table.units] == ["0", *(f"1.{i}" for i in range(15))]
        heavy, light = table.units[2], table.units[3]
        assert heavy.forward_s > 2 * light.forward_s > 0  # 8 times the work
        assert heavy.input_s + heavy.weight_s > 2 * (light.input_s + light.weight_s)
        assert table.units[0].input_s < table.units[0].weight_s  # the data needs no gradient
        assert (table.rows, table.device) == (2000, "cpu")
        assert table.forward_overhead_s >= 0.02
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.named_buffers():
        assert torch.equal(value, state[name])
