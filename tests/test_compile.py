"""`compile=`: every unit of a stage runs compiled, with the numbers and the names of before.

Most tests compile with a backend that needs no compiler of C++ and counts what it compiles.
"""

from __future__ import annotations

import copy
import shutil
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from tests.test_activation_checkpointing import LitNoisy
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import ConfigError, PipelineStrategy, whole

_AOT = {"backend": "aot_eager"}  # forward and backward are made as for Inductor


class _Numbered(nn.Module):
    """A block that knows its number, which is part of the compiled code."""

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x))) * (1 + self.number / 16)


class LitNumbered(lit.Lit):
    """Counts the graphs that there are after each step."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__(depth=depth)
        self.graphs: list[int] = []
        self.twin: Any = None

    def make_net(self, width: int, depth: int) -> nn.Module:
        blocks = [_Numbered(width, number) for number in range(depth)]
        return nn.Sequential(*blocks, nn.Linear(width, 4))

    def on_train_batch_end(self, *_: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        self.twin = copy.deepcopy(self.net[0])  # nothing compiled is left in the modules

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def _train(strategy: dict[str, Any] | None, cls: Any = LitNumbered, **more: Any) -> dict[str, Any]:
    torch._dynamo.utils.counters.clear()
    pl.seed_everything(1, verbose=False)
    module = cls()
    x, y = lit.rows(24).tensors
    loader = DataLoader(TensorDataset(x.float(), y), batch_size=8)
    used = lit.trainer(strategy, lit.world(), **{"precision": "32-true", **more})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used.fit(module, loader, loader)
    return {
        **lit.outcome(module, used),
        "graphs": getattr(module, "graphs", []),
        "left": "forward" in vars(module.net[0]),
        "said": [str(w.message) for w in caught],
    }


_CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"compile": _AOT},
    "gpipe, again": {"compile": _AOT, "schedule": "gpipe", "activation_checkpointing": "all"},
    "interleaved": {"compile": _AOT, "schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zbv": {"compile": _AOT, "schedule": "zbv", "virtual_stages": 2},
}


def _cases() -> dict[str, dict[str, Any]]:
    torch._dynamo.reset()  # what one case has compiled is there for the next one
    return {name: _train({"num_microbatches": 4, **given}) for name, given in _CASES.items()}


def test_every_schedule_trains_compiled_as_one_device() -> None:
    expected = run_ranks(1, _train, None)[0]
    for results in run_ranks(2, _cases):
        for name, result in results.items():
            lit.assert_equal([result], expected, 1e-5)
            graphs = result["graphs"]
            assert graphs[0] > 0 or name != "1f1b"
            assert graphs[1] == graphs[-1], f"{name} compiles after its second step: {graphs}"
            assert not result["left"]


class LitMean(LitNoisy):
    """Blocks with dropout and running statistics, compiled or not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class LitShort(LitMean):
    """Over four stages, its norms are units."""

    def __init__(self) -> None:
        super().__init__(depth=2)


_MORE: list[dict[str, Any]] = [
    {},
    {"schedule": "gpipe", "activation_checkpointing": "all"},
    {"schedule": "interleaved_1f1b", "virtual_stages": 2},
]


def _noisy(cls: Any, **given: Any) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    given["num_microbatches"] = 4
    compiled = [{**given, "compile": _AOT, **more} for more in _MORE]
    return [_train(strategy, cls) for strategy in (given, *compiled)]


def test_dropout_and_running_statistics_are_those_of_units_that_are_not_compiled() -> None:
    for first, *others in run_ranks(2, _noisy, LitMean):
        for other in others:
            lit.assert_equal([other], first, 1e-5)


def _deferred() -> list[dict[str, Any]]:
    return _noisy(LitShort, batchnorm="deferred")


def test_deferred_statistics_are_those_of_units_that_are_not_compiled() -> None:
    for first, *others in run_ranks(2, _deferred):
        for other in others:
            lit.assert_equal([other], first, 1e-5)


class _Head(nn.Module):
    """Computes the loss too, as language models do that are large."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), y, ignore_index=2)


class LitWatched(LitNumbered):
    """What its loss divides by is watched: it is in a unit, or no value is small enough to keep."""

    def __init__(self, *, in_unit: bool) -> None:
        super().__init__(depth=4)
        self.head = _Head(8) if in_unit else nn.Linear(4, 4)
        if in_unit:
            self.net = self.net[:-1]

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        if isinstance(self.head, _Head):
            return self.head(self.net(x), y)
        return F.cross_entropy(self.head(self.net(x)), y, ignore_index=2)


def _watched(in_unit: bool) -> list[dict[str, Any]]:
    torch._dynamo.reset()
    most, whole._MOST_BYTES = whole._MOST_BYTES, 0
    plain = {"num_microbatches": 4}
    again = {**plain, "compile": _AOT, "activation_checkpointing": "all"}
    cls = partial(LitWatched, in_unit=in_unit)
    try:
        return [
            _train(strategy, cls, limit_val_batches=0)
            for strategy in (plain, {**plain, "compile": _AOT}, again)
        ]
    finally:
        whole._MOST_BYTES = most


@pytest.mark.parametrize("in_unit", [False, True])
def test_losses_are_watched_without_being_compiled_for_it(in_unit: bool) -> None:
    """What runs again for its backward has to be what ran, also while torch's losses are seen."""
    results = run_ranks(2, _watched, in_unit)
    for plain, once, again in results:
        lit.assert_equal([once, again], plain, 1e-5)
        graphs = once["graphs"]
        assert graphs[0] > 0
        assert graphs[0] == graphs[-1] or in_unit, f"compiles again: {graphs}"
        assert not again["graphs"][-1], f"the second run compiles: {again['graphs']}"
    for which in range(3):
        said = [text for rank in results for text in rank[which]["said"]]
        assert sum("is not the mean of those" in text for text in said) == 1


class LitSmall(LitNumbered):
    def __init__(self) -> None:
        super().__init__(depth=1)


def _one_rank(strategy: dict[str, Any] | None) -> dict[str, Any]:
    return _train(strategy, LitSmall, limit_val_batches=0)


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a compiler of C++")
def test_inductor_on_one_rank() -> None:
    (expected,) = run_ranks(1, _one_rank, None)
    (found,) = run_ranks(1, _one_rank, {"compile": True, "num_microbatches": 2})
    lit.assert_equal([found], expected, 1e-5)
    assert found["graphs"][1] == found["graphs"][-1]


def _autocast() -> list[dict[str, Any]]:
    given = {"num_microbatches": 2}
    return [
        _train(strategy, precision="bf16-mixed")
        for strategy in (given, {**given, "compile": {"backend": "eager"}})
    ]


def test_units_compile_under_autocast() -> None:
    plain, compiled = run_ranks(1, _autocast)[0]
    lit.assert_equal([compiled], plain, 1e-2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("fast", "compile='fast': give True, or one of default"),
        ({"bakend": "eager"}, "compile has 'bakend': give True, a mode, or a dict of"),
        ({"backend": "llvm"}, "compile has backend='llvm': give one of"),
        ("reduce-overhead", "CUDA graphs.*'max-autotune-no-cudagraphs'"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
        (3, "compile=3: give"),
    ],
)
def test_what_cannot_be_compiled_so_is_refused_at_once(given: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        PipelineStrategy(pipeline_parallel_size=2, compile=given)


@pytest.mark.parametrize("given", [None, False, True, {"backend": "eager"}])
def test_what_a_strategy_says_of_itself_can_be_given_again(given: Any) -> None:
    said = PipelineStrategy(pipeline_parallel_size=2, compile=given).given["compile"]
    assert PipelineStrategy(pipeline_parallel_size=2, compile=said).given["compile"] == said
