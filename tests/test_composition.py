"""Features together: the combinations of `tests/composition.py`, and the page that it writes.

The reference is one device that trains on the micro-batches of all copies, one after the other: it
rounds what the stages round, so that half precision is compared by no more than the order of sums.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tests import composition, lit
from tests.composition import COMBINATIONS, FEATURES, Combination
from tests.lit import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

COPIES, PIECES, SIZE = 2, 4, 4  # copies, micro-batches, and rows of each
STEPS, ACCUMULATED, BATCH = 2, 2, COPIES * PIECES * SIZE  # an epoch is a step of two batches
ROWS = ACCUMULATED * BATCH


class _Lit(pl.LightningModule):
    """Keeps the norms of gradients before they are clipped, and the loss scales.

    Args:
        alone: Whether it is the reference: its batches are micro-batches.
    """

    def __init__(self, *, alone: bool) -> None:
        super().__init__()
        self.alone, self.lacks = alone, False
        self.norms: list[float] = []
        self.scales: list[float] = []

    def on_after_backward(self) -> None:
        if self.lacks and self.trainer.global_step == self.trainer.fit_loop.batch_idx == 0:
            self.zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad.double() for p in self.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def on_train_epoch_end(self) -> None:
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler.get_scale() if scaler else 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class _Tied(_Lit):
    """A language model with a tied head; a mean over valid tokens, of which rows have other
    numbers."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__(alone=alone)
        self.net = lit.TiedLM(width=8, depth=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, total = batch
        targets = _targets(tokens)
        logits = self.net(tokens[:, :-1]).flatten(0, 1)
        loss, counted = F.cross_entropy(logits, targets.flatten()), (targets != -100).sum()
        if self.alone:  # its part of the mean over a batch, of which as many are accumulated
            return loss * (counted / total[0] * COPIES * PIECES)
        return {"loss": loss, "loss_weight": counted}


def _targets(tokens: Tensor) -> Tensor:
    return tokens[:, 1:].masked_fill(tokens[:, 1:] > 2 + tokens[:, :1], -100)


class _OfBatch(nn.BatchNorm1d):
    """Takes its running statistics from whole batches, and normalises micro-batches."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach())
        if len(self.seen) == PIECES:
            batch, self.seen = torch.cat(self.seen), []
            F.batch_norm(batch, self.running_mean, self.running_var, training=True)
            self.num_batches_tracked += 1
        return F.batch_norm(x, None, None, self.weight, self.bias, training=True)


class _Block(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class _Norms(_Lit):
    """Blocks with batch norms."""

    def __init__(self, *, alone: bool) -> None:
        super().__init__(alone=alone)
        blocks = [_Block(_OfBatch if alone else nn.BatchNorm1d) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def _tokens() -> Dataset:
    tokens = torch.randint(0, 11, (ROWS, 7), generator=torch.Generator().manual_seed(0))
    totals = (_targets(tokens) != -100).view(ACCUMULATED, -1).sum(1)
    return TensorDataset(tokens, totals.repeat_interleave(BATCH))


def _rows() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (ROWS,), generator=generator))


#: module, data, and the copies whose micro-batches are one of the reference
MODELS: dict[str, Any] = {"tied": (_Tied, _tokens, 1), "norms": (_Norms, _rows, COPIES)}


def _trainer(given: Combination, strategy: Any, **more: Any) -> pl.Trainer:
    arguments = {**given.trainer, **more, "use_distributed_sampler": False}
    if arguments.get("precision") == "16-mixed":  # which is bf16 on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
        arguments |= {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    return lit.trainer(strategy, lit.world(), **arguments)


def _seeded(given: Combination, seed: int, *, alone: bool) -> Any:
    cls, *_ = MODELS[given.model]
    exact = given.trainer["precision"] == "64-true"  # Lightning loads weights before it converts
    torch.set_default_dtype(torch.float64 if exact else torch.float32)
    try:
        pl.seed_everything(seed, verbose=False)
        return cls(alone=alone)
    finally:
        torch.set_default_dtype(torch.float32)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def _train(name: str, folder: str) -> Any:
    """Trains over stages and copies; each step in a Trainer of its own if it is stored between."""
    given = COMBINATIONS[name]
    _, dataset, _ = MODELS[given.model]
    number = torch.distributed.get_rank() // 2
    order = torch.arange(ROWS).view(-1, PIECES, COPIES, SIZE)[:, :, number].flatten()
    loader = DataLoader(Subset(dataset(), order.tolist()), batch_size=BATCH // COPIES)
    strategy = {**given.strategy, "pipeline_parallel_size": 2, "data_parallel_size": COPIES}
    stored = bool(given.strategy.get("save_distributed_checkpoint"))
    norms, path = [], None
    for epochs in (1, STEPS) if stored else (STEPS,):
        module = _seeded(given, epochs if stored else 1, alone=False)
        used = _trainer(given, strategy, max_epochs=epochs)
        used.fit(module, loader, ckpt_path=path)
        norms += module.norms
        if epochs < STEPS:
            path = f"{folder}/stored.ckpt"
            used.save_checkpoint(path)
    assert used.global_step == STEPS
    return {"state": _state(module), "norms": norms, "scale": module.scales[-1]}


def _train_one(given: Combination, *, lacks: bool = False) -> Any:
    """Trains one device; perhaps without a micro-batch of the first step."""
    _, dataset, together = MODELS[given.model]
    module = _seeded(given, 1, alone=True)
    module.lacks = lacks
    begin = _state(module)
    one = {key: value for key, value in given.trainer.items() if key != "sync_batchnorm"}
    pieces = ACCUMULATED * PIECES * COPIES // together
    used = _trainer(
        replace(given, trainer=one), None, max_epochs=STEPS, accumulate_grad_batches=pieces
    )
    used.fit(module, DataLoader(dataset(), batch_size=SIZE * together))
    found = {"state": _state(module), "norms": module.norms, "scale": module.scales[-1]}
    return {**found, "begin": begin}


def _references(name: str) -> Any:
    given = COMBINATIONS[name]
    return _train_one(given), _train_one(given, lacks=True)


def _distances(got: Any, expected: Any) -> dict[str, tuple[float, float]]:
    """How far each float is from the reference, and from where it began."""
    found = {}
    for name, value in expected["state"].items():
        other, begin = got["state"][name], expected["begin"][name]
        assert other.dtype == value.dtype, name
        if not value.is_floating_point():
            assert torch.equal(other, value), name
            continue
        far, way = (value.double() - t.double() for t in (other, begin))
        found[name] = (far.norm().item(), way.norm().item())
    return found


def _error(got: Any, expected: Any) -> float:
    """The distance of all weights, as a part of the way that they went."""
    pairs = [pair for name, pair in _distances(got, expected).items() if "running" not in name]
    far, way = (math.hypot(*values) for values in zip(*pairs, strict=True))
    return far / way


@pytest.mark.parametrize("name", COMBINATIONS)
def test_features_run_together_as_one_device(name: str, tmp_path: Path) -> None:
    tolerance = COMBINATIONS[name].tolerance
    expected, lacking = run_ranks(1, _references, name)[0]
    assert _error(lacking, expected) > 2 * tolerance, "one micro-batch of all would not be missed"
    for got in run_ranks(4, _train, name, str(tmp_path)):
        assert got["state"].keys() == expected["state"].keys()
        assert got["norms"] == pytest.approx(expected["norms"], rel=tolerance)
        assert got["scale"] == expected["scale"]
        assert _error(got, expected) < tolerance
        distances = _distances(got, expected)
        whole = math.hypot(*(way for _, way in distances.values()))
        for key, (far, way) in distances.items():  # rounding is all that some gradients are
            assert far <= tolerance * (3 * way + whole / 20), key


def test_no_pair_of_features_has_two_verdicts() -> None:
    for one, other in combinations(FEATURES, 2):
        composition.cell(one, other)
    known = set(FEATURES)
    for test, features in composition.places():
        assert features <= known, test
        for pair in map(frozenset, combinations(features, 2)):
            assert pair not in composition.REFUSED, f"{test} runs what is said to be refused"
            assert pair not in composition.APART, f"{test} runs what is said not to meet"


@pytest.mark.parametrize("test", sorted(composition.tests_named()))
def test_the_tests_that_the_table_names_are_there(test: str) -> None:
    assert composition.exists(test)


def test_the_page_is_that_of_the_table() -> None:
    text = composition.page()
    assert composition.PAGE.read_text() == text, "run: python -m tests.composition"
    for name in re.findall(r"`(tests/[\w/]+\.py)", text):
        assert (composition.PAGE.parents[1] / name).is_file(), name
