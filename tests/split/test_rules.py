"""The rules of cutting, one by one, each with the smallest model that shows it.

What is not here is next door: `test_trace` (a trace leaves nothing behind, lost writes, another
order of calls, keyed randomness, frozen units, tied weights), `test_parity` (the models of
`tests.zoo.modules`: aliases, relays, hooks, checkpoints, routers, dataclasses), `test_unusual`.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.split.parity import compare, piece
from tests.zoo.modules import ROWS, Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.errors import CutError
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.program import StageProgram

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """An input layer, blocks, an output layer, and what a test does with them."""

    def __init__(self, run: Forward, blocks: list[nn.Module] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(16, 16) for _ in range(4)])
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def residuals(self, h: Tensor) -> Tensor:
        """All blocks, with residuals in the glue."""
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return h


def case(run: Forward, make: Callable[[], list[nn.Module]] | None = None) -> Callable[[], Case]:
    """A builder of a model that does ``run``."""

    def build() -> Case:
        torch.manual_seed(0)
        net = Net(run, make() if make else None)
        batch = {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 1)}
        return Case(net, lambda b: F.mse_loss(net(b["x"]), b["y"]), batch)

    return build


def exact(build: Callable[[], Case], starts: tuple[int, ...] = (0, 2, 4)) -> StepCut:
    """Cut, compare with one stage, and return the cut."""
    result = compare(build, len(starts), lambda n: starts)
    assert result.missing == []
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
    return result.cut


def uncut_gradients(build: Callable[[], Case]) -> dict[str, Tensor]:
    """Gradients of plain torch, without any of ours."""
    made = build()
    made.loss(piece(made.batch, 0)).backward()
    return {n: p.grad for n, p in made.module.named_parameters() if p.grad is not None}


# ---------------------------------------------------------------------- 1, 2, 3: writes and aliases


def _out(target: Tensor, h: Tensor) -> None:
    with torch.no_grad():
        torch.add(h, 1.0, out=target)


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "out=": _out,
    "foreach": lambda target, h: torch._foreach_add_([target], [h.detach()]),
    "data": lambda target, h: target.data.copy_(h.detach()),
    "a view": lambda target, h: target.view(-1).add_(h.detach().flatten()),
    "an index": lambda target, h: target.__setitem__((slice(None), 1), h.detach()[:, 1]),
}


@pytest.mark.parametrize("how", WRITES)
def test_a_value_of_an_early_block_written_into_a_plain_tensor_arrives(how: str) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h, memory = net.first(x), torch.zeros(len(x), 16)
        WRITES[how](memory, h)
        return net.last(net.residuals(h) + memory)

    exact(case(run))


def test_a_unit_that_writes_its_argument_sends_what_it_wrote() -> None:
    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, h: Tensor, log: Tensor) -> Tensor:
            out = torch.tanh(self.linear(h))
            log[:, 0].add_(out.detach().mean(1))
            return out

    def run(net: Net, x: Tensor) -> Tensor:
        h, log = net.first(x), torch.zeros(len(x), 2)
        for block in net.blocks:
            h = h + block(h, log)
        return net.last(h) * (1 + log.sum(1, keepdim=True))

    exact(case(run, lambda: [Writer() for _ in range(4)]))


def test_two_views_of_one_memory_are_not_torn_apart() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
            out = self.linear(h)
            return out, out[:, :8]

    def run(net: Net, x: Tensor, write: bool) -> Tensor:
        h = net.first(x)
        whole, half = net.blocks[0](h)
        for block in net.blocks[1:]:
            h = h + torch.tanh(block(h))
        return net.last(h + whole + F.pad(half.add_(1.0) if write else half, (0, 8)))

    def blocks() -> list[nn.Module]:
        return [Views(), *(nn.Linear(16, 16) for _ in range(3))]

    exact(case(functools.partial(run, write=False), blocks))
    with pytest.raises(CutError, match="two views of one memory"):
        exact(case(functools.partial(run, write=True), blocks))


# ---------------------------------------------------------------------- 5, 6: parameters, hooks


def test_a_parameter_of_someone_else_is_held_where_it_is_read() -> None:
    shared = nn.Parameter(torch.ones(16))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, h: Tensor) -> Tensor:
            return self.linear(h) * self.of[0]

    def run(net: Net, x: Tensor) -> Tensor:
        decay = sum(block.linear.weight.pow(2).sum() for block in net.blocks)
        return net.last(net.residuals(net.first(x)) * net.scale) + 0.01 * decay

    def build() -> Case:
        made = case(run, lambda: [Scaled() for _ in range(4)])()
        scale = nn.Parameter(shared.detach().clone())
        made.module.scale = scale
        for block in made.module.blocks:
            block.__dict__["of"] = _Box(made.module)
        return made

    exact(build)


class _Box:
    """Reaches a parameter of another module, past ``.parameters()``."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net

    def __getitem__(self, _: int) -> Tensor:
        return self._net.scale


def test_hooks_that_a_step_installs_are_installed_once() -> None:
    collected: list[Tensor] = []

    def run(net: Net, x: Tensor) -> Tensor:
        collected.clear()
        if not getattr(net, "installed", False):
            for block in net.blocks:
                block.register_forward_hook(lambda m, args, out: collected.append(out))
            net.installed = True
        h = net.residuals(net.first(x))
        return net.last(h) + torch.stack(collected).sum(0).mean() * len(collected)

    build = case(run)
    cut = exact(build)
    assert "the step installs hooks" in cut.trace.notes[0]
    net = build().module
    trace_step(net, lambda b: net(b).mean(), torch.randn(2, 8), num_stages=2)
    net(torch.randn(2, 8))
    assert [len(block._forward_hooks) for block in net.blocks] == [1, 1, 1, 1]


def test_hooks_that_give_another_output_are_not_given_it_again() -> None:
    """A later stage has the last output only: a hook that made it of another one cannot run there,
    and one that comes after it can."""
    collected: list[Tensor] = []

    def run(net: Net, x: Tensor) -> Tensor:
        collected.clear()
        h = net.residuals(net.first(x))
        return net.last(h) + torch.stack(collected).sum(0).mean()

    build = case(run)

    def hooked() -> Case:
        made = build()
        for block in made.module.blocks:
            block.register_forward_hook(lambda m, args, out: {"h": out})
            block.register_forward_hook(lambda m, args, out: out["h"] * 0.5)
            block.register_forward_hook(lambda m, args, out: collected.append(out))
        return made

    exact(hooked)


# ---------------------------------------------------------------------- 7, 8: functions, recompute


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("spanning", [True, False])
def test_recomputed_regions_in_the_outer_glue_have_torchs_gradients(
    spanning: bool, reentrant: bool
) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        pairs = zip(net.blocks[::2], net.blocks[1::2], strict=True)
        groups = list(pairs) if spanning else [(block,) for block in net.blocks]
        for group in groups:

            def region(h: Tensor, group: Any = group) -> Tensor:
                for block in group:
                    h = h + torch.tanh(block(torch.sin(h)))
                return h * 1.5

            h = checkpoint(region, h, use_reentrant=reentrant)
        return net.last(h)

    build = case(run)
    exact(build, (0, 2, 4))
    exact(build, (0, 1, 3))
    made = build()
    trace = trace_step(made.module, made.loss, piece(made.batch, 0), num_stages=2)
    whole = StageProgram(StepCut(trace, place(trace, (0,))), 0, made.module)
    whole.run(lambda: made.loss(piece(made.batch, 0)), (), key=1).value.backward()
    for name, expected in uncut_gradients(build).items():
        torch.testing.assert_close(made.module.get_parameter(name).grad, expected)


@pytest.mark.parametrize("spanning", [True, False])
def test_a_region_of_one_unit_is_still_recomputed(spanning: bool) -> None:
    """A block runs twice where it is alone in its region, once in a region of several."""
    runs: list[Tensor] = []

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        pairs = zip(net.blocks[::2], net.blocks[1::2], strict=True)
        for group in list(pairs) if spanning else [(block,) for block in net.blocks]:

            def region(h: Tensor, group: Any = group) -> Tensor:
                for block in group:
                    h = h + torch.tanh(block(h))
                return h

            h = checkpoint(region, h, use_reentrant=False)
        return net.last(h)

    made = case(run)()
    trace = trace_step(made.module, made.loss, piece(made.batch, 0), num_stages=2)
    whole = StageProgram(StepCut(trace, place(trace, (0,))), 0, made.module)
    made.module.blocks[1].register_forward_pre_hook(lambda *_: runs.append(torch.ones(())))
    whole.run(lambda: made.loss(piece(made.batch, 0)), (), key=1).value.backward()
    assert len(runs) == (1 if spanning else 2)
    exact(case(run), (0, 1, 3))


def test_a_recomputed_region_with_dropout_in_the_glue_has_one_mask() -> None:
    """The backward has the mask of the forward."""
    masks: list[Tensor] = []

    def run(net: Net, x: Tensor) -> Tensor:
        def region(h: Tensor) -> Tensor:
            h = torch.tanh(net.blocks[0](h))
            mask = (torch.rand_like(h) < 0.5).float()
            masks.append(mask)
            return net.blocks[1](h * mask)

        return net.last(checkpoint(region, net.first(x), use_reentrant=False))

    made = case(run)()
    trace = trace_step(made.module, made.loss, piece(made.batch, 0), num_stages=2)
    masks.clear()
    whole = StageProgram(StepCut(trace, place(trace, (0,))), 0, made.module)
    whole.run(lambda: made.loss(piece(made.batch, 0)), (), key=1).value.backward()
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    exact(case(run), (0, 1, 3))


# ---------------------------------------------------------------------- 11, 12: values, randomness


def test_a_function_that_fails_on_fakes_gets_its_inputs_on_every_later_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        kept = h[h.detach().abs() > 0.1].sum()
        return net.last(net.residuals(h)) + kept

    cut = exact(case(run))
    assert cut.trace.control
    assert all(cut.trace.control & set(keys) for keys in cut.crossing)


def test_generators_of_its_own_draw_the_same_on_every_stage() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        for block in net.blocks:
            noise = torch.rand(16, generator=net.torch_generator)
            factor = net.generators["numpy"].random() + net.generators["python"].random()
            h = h + torch.tanh(block(h)) * noise * factor
        return net.last(h)

    def build() -> Case:
        made = case(run)()
        made.module.torch_generator = torch.Generator().manual_seed(3)
        made.module.generators = {"numpy": np.random.default_rng(3), "python": random.Random(3)}
        return made

    exact(build)
    made = build()
    before = made.module.torch_generator.get_state()
    trace_step(made.module, made.loss, piece(made.batch, 0), num_stages=2)
    assert torch.equal(made.module.torch_generator.get_state(), before)


def test_a_ghost_says_that_it_needs_a_gradient() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        for block in net.blocks:
            h = h + torch.tanh(block(h))
            h = h * 1.5 if h.requires_grad else h + 1.0
        return net.last(h)

    exact(case(run))


# ---------------------------------------------------------------------- 14: what a unit leaves


def _keeper(keep: Callable[[Any, Tensor], None], start: Any = None) -> list[nn.Module]:
    class Keeper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.kept = copy.copy(start)

        def forward(self, h: Tensor) -> Tensor:
            out = torch.tanh(self.linear(h))
            keep(self, out.pow(2).mean())
            return out

    return [Keeper() for _ in range(4)]


KEPT: dict[str, tuple[Callable[[Any, Tensor], None], Callable[[Any], Any]]] = {
    "an attribute": (lambda m, v: setattr(m, "kept", v), lambda m: m.kept),
    "a dict": (lambda m, v: m.kept.update(a=v), lambda m: m.kept["a"]),
}


@pytest.mark.parametrize("where", KEPT)
def test_a_tensor_that_a_unit_keeps_arrives_in_the_tail(where: str) -> None:
    keep, read = KEPT[where]

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.residuals(net.first(x))
        return net.last(h) * (1 + sum(read(block) for block in net.blocks))

    exact(case(run, lambda: _keeper(keep, {})))


def test_a_number_that_a_unit_keeps_is_refused_where_it_is_read() -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        h = net.residuals(net.first(x))
        return net.last(h) * (1 + net.blocks[0].kept)

    build = case(run, lambda: _keeper(lambda m, v: setattr(m, "kept", v.item())))
    with pytest.raises(CutError, match=r"'kept' of 'blocks\.0', a number"):
        exact(build)


# ---------------------------------------------------------------------- 15, 16, 17: units, outputs


def test_an_inner_module_that_is_also_called_from_outside_is_its_own_unit() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, h: Tensor) -> Tensor:
            return self.outer(torch.tanh(self.inner(h)))

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.residuals(net.first(x))
        return net.last(h + net.blocks[0].inner(h))

    exact(case(run, lambda: [Pair() for _ in range(4)]), (0, 2, 4))


def test_a_module_without_parameters_runs_on_every_stage_and_is_not_sent() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequency", torch.arange(16) / 16)

        def forward(self, h: Tensor) -> Tensor:
            return torch.cos(self.frequency * len(h)).to(h.dtype)

    def run(net: Net, x: Tensor) -> Tensor:
        h = net.first(x)
        turn = net.rotary(h)
        for block in net.blocks:
            h = h + torch.tanh(block(h)) * turn
        return net.last(h)

    def build() -> Case:
        made = case(run)()
        made.module.rotary = Rotary()
        return made

    assert [len(keys) for keys in exact(build).crossing] == [1, 1]


def test_nested_outputs_with_holes_are_rebuilt() -> None:
    class Nested(nn.Module):
        def __init__(self, more: bool) -> None:
            super().__init__()
            self.linear, self.more = nn.Linear(16, 16), more

        def forward(self, h: Tensor) -> dict[str, Any]:
            out = torch.tanh(self.linear(h))
            return {"h": out, "more": [None, (h * 2,)] if self.more else None, "n": 3}

    def run(net: Net, x: Tensor) -> Tensor:
        h, extra = net.first(x), 0.0
        for block in net.blocks:
            out = block(h)
            h = h + out["h"] * out["n"]
            extra = extra if out["more"] is None else extra + out["more"][1][0]
        return net.last(h + extra)

    exact(case(run, lambda: [Nested(index % 2 == 0) for index in range(4)]))


def test_a_backward_hook_keeps_its_module_whole() -> None:
    """It is given the gradients of the inputs and outputs of a call, and may change them."""

    def blocks() -> list[nn.Module]:
        made = [nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)]
        made[1].register_full_backward_hook(lambda _, grads, __: tuple(2 * g for g in grads))
        return list(made)

    found = compare(case(lambda net, x: net.last(net.residuals(net.first(x))), blocks), 4)
    assert (found.missing, found.gradient_error < 1e-6) == ([], True)
    assert {"blocks.0.0", "blocks.1", "blocks.2.2"} <= set(found.cut.trace.unit_names)
    assert "blocks.1 kept whole: blocks.1 stays whole: its backward hook" in str(
        found.cut.trace.notes
    )
