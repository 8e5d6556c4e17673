"""What a module draws depends on its name and the number of its calls, not on the cut."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.split.parity import MICROBATCHES, compare, own_streams, piece
from tests.zoo.modules import Case
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.rng import is_draw
from lightning_pipe.split.streams import draw_in_vain

WIDTH, BLOCKS = 8, 3
CUTS = ((1, False), (2, True), (2, False))  # stages, and whether blocks run again


class Noise(nn.Module):
    """Draws from every kind of generator."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(7)
        self.numpy = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * self.numpy.random()
        return x * scale + 0.1 * torch.randn(x.shape, generator=self.own, dtype=x.dtype)


class Block(nn.Module):
    """A block whose own code draws, twice, with modules between that draw too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop, self.noise = nn.Dropout(0.3), Noise()

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.drop(self.up(x)).tanh(), 0.2, self.training)
        h = self.noise(self.down(h))
        return x + F.dropout(h, 0.4, self.training)


class Recomputed(Block):
    """The same, as a region that runs again."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    """With the older kind of region."""

    reentrant = True


class Attends(nn.TransformerEncoderLayer):
    """torch's own layer."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 2 * WIDTH, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, None])[:, 0]


class Net(nn.Module):
    """Blocks, one of them called twice, in code that draws as well."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x + 0.1 * torch.randn_like(x))
        for block in [*self.blocks, self.blocks[0]]:
            x = F.dropout(block(x), 0.1, self.training)
        return self.head(x).square().mean() * (1 + np.random.rand() + random.random())


KINDS = {kind.__name__: kind for kind in (Block, Recomputed, Reentrant, Attends)}


def _build(block: Callable[[], nn.Module]) -> Case:
    torch.manual_seed(0)
    net = Net(block).double()
    batch = torch.randn(4, WIDTH, dtype=torch.float64)
    return Case(net, net, batch)


def _plainly(case: Case, key: int, batch: Tensor) -> float:
    kinds = (Block, nn.Dropout, Noise, nn.MultiheadAttention)
    noises = [m for m in case.module.modules() if isinstance(m, Noise)]
    generators = [g for m in noises for g in (m.own, m.numpy)]
    with own_streams(case.module, key, lambda m: isinstance(m, kinds), generators):
        return case.loss(batch).item()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_cut_draws_what_a_plain_run_draws(kind: str) -> None:
    """Whole blocks, opened ones, and recomputation in the backward."""
    case = _build(KINDS[kind])
    plain = [_plainly(case, 11 + m, piece(case.batch, m)) for m in range(MICROBATCHES)]
    cuts = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_stages, again in ((1, False), (1, True), (2, True), (4, False), (6, False)):
            found = compare(lambda: _build(KINDS[kind]), num_stages, again=again)
            cuts.add(found.cut.trace.unit_names)
            assert found.losses == pytest.approx(plain, rel=1e-12)
            assert (found.missing, found.gradient_error < 1e-9) == ([], True)
    assert len(cuts) == (1 if "whole" in str(found.cut.trace.notes) else 2)


class Glue(nn.Module):
    """Draws for values that a stage may not have, in ways that it may not be able to repeat."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x)
            x = x + h.tanh() * self.draw(h) + 0.1 * torch.rand(WIDTH, dtype=x.dtype)
        return x.square().mean()


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda h: F.dropout(torch.ones_like(h), 0.5),
    "alpha": lambda h: F.alpha_dropout(h.detach(), 0.5),
    "bernoulli": lambda h: torch.bernoulli(h.detach().sigmoid()),
    "in place": lambda h: h.detach().clone().bernoulli_(0.5),
    "gumbel": lambda h: F.gumbel_softmax(h.detach()),
    "like": lambda h: torch.randn_like(h),
    "multinomial": lambda h: torch.multinomial(h.detach().exp(), 1).to(h.dtype),
    "normal": lambda h: torch.normal(h.detach(), 1.0),
    "poisson": lambda h: torch.poisson(h.detach().exp()),
    "gamma": lambda h: torch._standard_gamma(h.detach().exp()),
    "rrelu": lambda h: F.rrelu(h.detach(), training=True),
    "permutation": lambda h: h.detach()[:, torch.randperm(WIDTH)],
    "refused": lambda h: torch.binomial(9 * h.detach().abs().round(), torch.full_like(h, 0.5)),
}


@pytest.mark.parametrize("draw", sorted(DRAWS))
def test_draws_for_values_of_other_stages_move_the_stream_of_the_glue(draw: str) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        net = Glue(DRAWS[draw]).double()
        return Case(net, net, torch.randn(4, WIDTH, dtype=torch.float64))

    losses = []
    for num_stages in (1, 2, 4):
        found = compare(build, num_stages)
        assert (found.missing, found.gradient_error < 1e-9) == ([], True)
        losses.append(found.losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


class OpenedGlue(Glue):
    """The same around blocks that are opened for more stages."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__(draw)
        self.layers = nn.ModuleList(Block() for _ in range(2))


VALUES = {
    "gamma": DRAWS["gamma"],
    "refused": DRAWS["refused"],
    # its check of the values makes the trace a real one
    "categorical": lambda h: F.one_hot(Categorical(logits=h.detach()).sample(), WIDTH),
}


@pytest.mark.parametrize("draw", sorted(VALUES))
def test_code_of_the_step_that_draws_by_values_draws_the_same_around_opened_blocks(
    draw: str,
) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        net = OpenedGlue(VALUES[draw]).double()
        return Case(net, net, torch.randn(4, WIDTH, dtype=torch.float64))

    found = [compare(build, num_stages) for num_stages in (1, 4)]
    assert found[0].cut.trace.unit_names != found[1].cut.trace.unit_names
    assert all((one.missing, one.gradient_error < 1e-9) == ([], True) for one in found)
    assert found[1].losses == pytest.approx(found[0].losses, rel=1e-12)


GLOBAL = np.random.RandomState(5)


class Keeps:
    """An object that is no module, with generators of its own."""

    def __init__(self) -> None:
        self.inside = {"list": [torch.Generator().manual_seed(3)], "python": random.Random(3)}


class NoiseOfObject(nn.Module):
    """Draws from generators that are not attributes of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.keeps, self.linear = Keeps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inside: Any = self.keeps.inside
        scale = 1 + inside["python"].random() + GLOBAL.random_sample()
        return self.linear(x) * scale + torch.rand(WIDTH, generator=inside["list"][0]).to(x)


def test_generators_of_objects_and_of_files_are_seeded_too() -> None:
    """By each stage for itself, in the first run and when a block runs again."""
    before = GLOBAL.get_state()[1].copy()
    found = [compare(lambda: _build(NoiseOfObject), n, again=again) for n, again in CUTS]
    for one in found:
        assert (one.missing, one.loss_error, one.gradient_error < 1e-9) == ([], 0, True)
        assert one.losses == pytest.approx(found[0].losses, rel=1e-12)
    assert np.array_equal(GLOBAL.get_state()[1], before)


def test_what_no_made_up_values_can_draw_is_said() -> None:
    with FakeTensorMode():
        rates = torch.empty(3)
    before = torch.get_rng_state()
    assert not draw_in_vain(torch.index_select, (rates, 0, torch.tensor([9])), {})
    assert torch.equal(before, torch.get_rng_state())
    assert draw_in_vain(torch.bernoulli, (rates,), {})
    assert not torch.equal(before, torch.get_rng_state())


def test_dropout_that_begins_later_does_not_move_the_glue() -> None:
    """Its rate is zero when the step is traced."""

    def build() -> Case:
        case = _build(Block)
        for module in case.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return case

    def rate(case: Case) -> Case:
        for module in case.module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        return case

    case = build()
    losses = []
    for num_stages, starts in ((1, (0,)), (6, (0, 4))):
        trace = trace_step(case.module, case.loss, case.batch, num_stages=num_stages)
        cut = StepCut(trace, place(trace, starts))
        later, values = rate(build()), ()
        step = partial(later.loss, later.batch)
        for stage in range(cut.num_stages):
            values = StageProgram(cut, stage, later.module).run(step, values, key=5)
        assert isinstance(values, StepResult)
        losses.append(values.value.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


def test_attention_at_a_rate_of_zero_draws_nothing() -> None:
    drop = torch.ops.aten._scaled_dot_product_flash_attention.default
    some = [torch.ones(1, 1, 2, 8)] * 3
    assert [is_draw(drop, some), is_draw(drop, [*some, 0.0]), is_draw(drop, [*some, 0.1])] == [
        *(False, False, True)
    ]
    assert is_draw(drop, some, {"dropout_p": 0.1})
    assert is_draw(torch.ops.aten.bernoulli.default, [torch.ones(2)])
    assert not is_draw(torch.ops.aten.add.Tensor, some[:2])
