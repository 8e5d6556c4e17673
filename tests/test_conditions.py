"""What decides on a new trace is compared between ranks: where it differs all say what, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from tests import lit
from tests.helpers import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe.conditions import Conditions
from lightning_pipe.errors import CutError
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.signature import signature


class _Alone(Callback):
    """Does something before a step, on global rank 1 alone."""

    def __init__(self, does: Callable[[Any, Any, Any], Any], step: int) -> None:
        self.does, self.step = does, step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == self.step:
            self.does(trainer, module, batch)


def _replace(trainer: Any, module: Any, batch: Any) -> None:
    module.net[2][1] = nn.Tanh()


def _shorten(trainer: Any, module: Any, batch: Any) -> None:
    batch[:] = [part[:4] for part in batch]


def _slice_more(trainer: Any, module: Any, batch: Any) -> None:
    trainer.strategy.num_microbatches = 4


CASES: dict[str, tuple[Callable[[Any, Any, Any], Any], int, str]] = {
    "mode": (
        lambda _, module, __: module.net[2].eval(),
        1,
        "module 'net.2' is in train mode on rank 0, in eval mode on rank 1",
    ),
    "frozen": (
        lambda _, module, __: module.net[1].requires_grad_(False),
        2,
        "weight 'net.1.0.weight' is trained on rank 0, frozen (requires_grad=False) on rank 1",
    ),
    "mode at first": (
        lambda _, module, __: module.eval(),
        0,
        "the LightningModule is in train mode on rank 0, in eval mode on rank 1",
    ),
    "replaced": (_replace, 1, "number 0 on rank 0, number 1, last changed at 'net.2.1' on rank 1"),
    "batch": (_shorten, 1, "the batch is list of 2 (0: a tensor of shape (8, 8)"),
    "micro-batches": (_slice_more, 1, "num_microbatches is 2 on rank 0, 4 on rank 1"),
}


def _fit(callback: Callback, module: Any) -> float:
    trainer = lit.trainer({"num_microbatches": 2}, 2, callbacks=[callback])
    trainer.fit(module, DataLoader(lit.rows(24), batch_size=8))
    return float(trainer.callback_metrics["train_loss"])


class _HasMore(Callback):
    """One rank has a module of its own from the start, which no step calls."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if trainer.is_global_zero:
            pl_module.seen = nn.Identity()


def _on_a_rank() -> tuple[dict[str, str], float, list[float]]:
    start_s, messages = time.monotonic(), {}
    for name, (does, step, _) in CASES.items():
        with pytest.raises(CutError) as raised:
            _fit(_Alone(does, step), lit.seeded(lit.Lit, depth=3))
        messages[name] = str(raised.value)
    duration_s = time.monotonic() - start_s
    return (
        messages,
        duration_s,
        [_fit(c(), lit.seeded(lit.Lit, depth=3)) for c in (Callback, _HasMore)],
    )


def test_a_rank_that_differs_is_an_error_on_all_ranks_with_its_name() -> None:
    for messages, duration_s, losses in run_ranks(2, _on_a_rank, timeout=120):
        for name, (_, _, expected) in CASES.items():
            assert expected in messages[name]
            assert "take a condition on the rank" in messages[name]
        assert duration_s < 60
        assert losses[0] == losses[1]


def test_states_of_a_module_are_known_again() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    conditions = Conditions(net, Ranks(1, 0, 0, 1, (0,)))
    keys = [conditions.key()]
    tanh = net[1]
    for change in (
        lambda: net.eval(),
        lambda: net[0].requires_grad_(False),
        lambda: net.__setitem__(1, nn.ReLU()),
    ):
        change()
        keys.append(conditions.key())
    assert len(set(keys)) == 4
    net[1] = tanh
    assert conditions.key() == keys[2]
    net.train().requires_grad_(True)
    assert conditions.key() == keys[0]
    # an object in the memory of one that is gone is another
    seen = set()
    for _ in range(50):
        net[1] = nn.Identity()
        seen.add(conditions.key())
    assert len(seen) == 50


def test_modules_are_named_only_when_some_were_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are what takes long; a look before a step does without them."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(5)))
    conditions = Conditions(net, Ranks(1, 0, 0, 1, (0,)))
    batch, looks = signature({}), []
    named = conditions._named
    monkeypatch.setattr(conditions, "_named", lambda: looks.append(0) or named())
    for _ in range(3):
        conditions.meet("runs", {}, batch, 2)
        net.train(not net.training)
    assert len(looks) == 1
    net[1] = nn.Identity()
    conditions.meet("runs", {}, batch, 2)
    assert len(looks) == 2
