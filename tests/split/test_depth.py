"""Steps of random depth: every micro-batch takes its own way through the stages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.split.parity import Parity, compare, own_streams
from tests.zoo.modules import Case
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe.errors import CutError, StageMismatchError
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.paths import merged_order
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.scout import find_way
from lightning_pipe.ways import look_around

WIDTH = 6
COINS: dict[str, Callable[[], Any]] = {
    "python": lambda: random.random() < 0.5,
    "numpy": lambda: np.random.rand() < 0.5,
    "torch": lambda: torch.rand(()) < 0.5,
    "torch item": lambda: torch.rand(1).item() < 0.5,
    "torch list": lambda: torch.rand(2).tolist()[1] < 0.5,
    "choices": lambda: random.choices([True, False])[0],
}


class Block(nn.Module):
    """A unit with noise inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.linear(x)), 0.2)


class Dropped(nn.Module):
    """Blocks that are left out by the throw of a coin, in the code between them."""

    def __init__(self, coin: Callable[[], Any], depth: int = 6) -> None:
        super().__init__()
        self.coin = coin
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, depth))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for number, block in enumerate(self.blocks):
            if not self.coin():
                h = h + self.scale[number] * block(h)
        return self.head(h)


def case_of(module: nn.Module) -> Case:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (8,), generator=generator)
    return Case(module, lambda b: F.cross_entropy(module(b["x"]), b["y"]), {"x": x, "y": y})


def build(make: Callable[[], nn.Module]) -> Callable[[], Case]:
    def built() -> Case:
        torch.manual_seed(0)
        return case_of(make().double())

    return built


def assert_exact(found: Parity) -> None:
    assert found.missing == []
    assert found.loss_error < 1e-9
    assert found.gradient_error < 1e-9
    assert found.wrong_buffers == []


@pytest.mark.parametrize(
    ("coin", "num_stages"), [("python", 2), *((coin, 4) for coin in sorted(COINS))]
)
def test_blocks_are_left_out_by_the_throw_of_a_coin(coin: str, num_stages: int) -> None:
    found = compare(build(lambda: Dropped(COINS[coin])), num_stages)
    assert_exact(found)
    names = found.cut.trace.unit_names
    assert any(way.trace.unit_names != names for way in found.ways), "other blocks are called"


def test_a_way_that_calls_nothing_on_a_stage_relays() -> None:
    found = compare(build(lambda: Dropped(lambda: random.random() < 0.8)), 4)
    assert_exact(found)
    assert any(not cut.calls_of(stage) for cut in found.ways for stage in (1, 2))


def test_the_numbers_are_those_of_a_plain_run_with_the_same_draws() -> None:
    """The reference knows nothing of traces."""
    key, case = 11, build(lambda: Dropped(COINS["python"]))()
    called: list[str] = []
    units = {"embed": case.module.embed, "head": case.module.head}
    units |= {f"blocks.{n}": block for n, block in enumerate(case.module.blocks)}
    handles = [
        unit.register_forward_pre_hook(lambda *_, name=name: called.append(name))
        for name, unit in units.items()
    ]
    with own_streams(case.module, key, lambda module: isinstance(module, Block)):
        expected = case.loss(case.batch)
    for handle in handles:
        handle.remove()
    seen = trace_step(case.module, case.loss, case.batch, num_stages=4, key=key)
    assert [call.unit for call in seen.calls] == called
    values: Any = ()
    cut = StepCut(seen, place(seen, (0, 1)))
    for stage in range(2):
        values = StageProgram(cut, stage, case.module).run(
            lambda: case.loss(case.batch), values, key=key
        )
    assert isinstance(values, StepResult)
    assert torch.equal(values.value, expected)


class Inside(nn.Module):
    """A block that returns what it was given, by the throw of a coin in its own forward."""

    def __init__(self, coin: Callable[[], Any]) -> None:
        super().__init__()
        self.coin = coin
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.coin():
            return x
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("coin", sorted(COINS))
def test_blocks_may_throw_the_coin_themselves(coin: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(Inside(COINS[coin]) for _ in range(6)), nn.Linear(WIDTH, 3))

    assert_exact(compare(build(make), 4))


class Switching(nn.Module):
    """Returns its argument for some values of it: no draw tells which."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.changes = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.changes else x


@pytest.mark.parametrize("watch", [False, True])
def test_a_unit_that_stops_returning_its_argument_is_noticed(watch: bool) -> None:
    switching = Switching()
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), switching, nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH)
    seen = trace_step(module, lambda b: module(b).sum(), x, num_stages=2)
    cut = StepCut(seen, place(seen, (0, 2)))
    switching.changes = True
    with pytest.raises(StageMismatchError, match="'1' returned a new tensor"):
        StageProgram(cut, 0, module, watch=watch).run(lambda: module(x).sum(), (), key=0)


class Shuffled(Dropped):
    """The order of the blocks is random."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in random.sample(list(self.blocks), len(self.blocks)):
            h = h + block(h)
        return self.head(h)


class Mixed(Dropped):
    """Whether a block is left out depends on a draw and on what the blocks before it made."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            if random.random() < 0.5 * float(h.mean() * 0 + 1.0):
                h = h + block(h)
        return self.head(h)


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Shuffled, "in which order its units are called"), (Mixed, "reads values that modules")],
)
def test_what_no_schedule_can_run_is_refused(kind: type[Dropped], message: str) -> None:
    with pytest.raises(CutError, match=message):
        compare(build(lambda: kind(COINS["python"])), 4)


def test_a_way_is_found_that_calls_every_block() -> None:
    case = build(lambda: Dropped(COINS["torch"], depth=10))()

    def other(**arguments: Any) -> Any:
        return trace_step(case.module, case.loss, case.batch, num_stages=4, **arguments)

    paths = look_around(case.module, other(), UnitMemo(), other)
    assert paths.vary
    assert len(paths.best.unit_names) == 12
    assert paths.best.repeated == frozenset(), "the planner is told what was seen"


def test_orders_of_parts_are_merged() -> None:
    units = list("abcdef")
    assert merged_order([["a", "d"], ["a", "b", "d"], ["c", "e"]], units) == units
    assert merged_order([["b", "a"]], ["a", "b"]) == ["b", "a"]
    assert merged_order([["b", "a"], ["a", "b"]], ["a", "b"]) == ["a", "b"]


def test_a_scout_finds_the_way_and_leaves_nothing_behind() -> None:
    class Counted(Dropped):
        def forward(self, x: Tensor) -> Tensor:
            self.steps = getattr(self, "steps", 0) + 1
            self.register_buffer("seen", torch.ones(1)) if self.steps > 5 else None
            return super().forward(x)

    case = build(lambda: Counted(COINS["torch"]))()
    first = trace_step(case.module, case.loss, case.batch, num_stages=4)
    memo = UnitMemo()

    def way(key: int) -> Any:
        return find_way(
            case.module,
            first,
            memo,
            case.loss,
            case.batch,
            key=key,
            device_type="cpu",
            generators=(),
        )

    assert way(0) is None, "nobody knows what units do"
    memo.learn(case.module, first)
    names: dict[Any, tuple[str, ...]] = {}
    for key in range(12):
        seen = trace_step(
            case.module, case.loss, case.batch, num_stages=4, key=key, like=first, memo=memo
        )
        memo.learn(case.module, seen)
        found = way(key)
        assert found is not None
        assert names.setdefault(found, seen.unit_names) == seen.unit_names
    assert len(names) == len(set(names.values())) > 3
    assert not hasattr(case.module, "steps")
