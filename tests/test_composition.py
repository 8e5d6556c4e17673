"""Features together: the combinations of `tests/composition.py`, and the page that it writes."""

from __future__ import annotations

import functools
import re
from itertools import combinations
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from tests import composition, lit
from tests.composition import COMBINATIONS, FEATURES, Combination
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

COPIES, PIECES, SIZE = 2, 4, 2  # copies, micro-batches, and rows of each
EPOCHS, BATCH = 2, COPIES * PIECES * SIZE  # epochs of one step; rows of a batch of one device
ROWS = 2 * BATCH


class _Tied(pl.LightningModule):
    """A language model with a tied head; a mean over valid tokens, of which rows have other
    numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = lit.TiedLM(width=8, depth=3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (tokens,) = batch
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] > 2 + tokens[:, :1], -100)
        logits = self.net(tokens[:, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten())
        return {"loss": loss, "loss_weight": (targets != -100).sum()}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class _Norms(_Tied):
    """Blocks with batch norms between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def _tokens() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, 11, (ROWS, 7), generator=generator))


def _rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 8, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (ROWS,), generator=generator))


MODELS: dict[str, Any] = {"tied": (_Tied, _tokens), "norms": (_Norms, _rows)}


def _trainer(given: Combination, strategy: Any, max_epochs: int, folder: str) -> pl.Trainer:
    arguments = {**given.trainer, "use_distributed_sampler": False}
    if arguments.get("precision") == "16-mixed":  # which is bf16 on a CPU
        arguments |= {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu")]}
    if strategy is None:
        arguments.pop("sync_batchnorm", None)
    limits = {"max_epochs": max_epochs, "default_root_dir": folder}
    return lit.trainer(strategy, lit.world(), **limits, **arguments)


def _train(name: str, strategy: Any, folder: str) -> dict[str, torch.Tensor]:
    """Trains over stages and copies."""
    given = COMBINATIONS[name]
    cls, dataset = MODELS[given.model]
    number = torch.distributed.get_rank() // 2
    order = torch.arange(ROWS).view(-1, PIECES, COPIES, SIZE)[:, :, number].flatten()
    loader = DataLoader(Subset(dataset(), order.tolist()), batch_size=BATCH // COPIES)
    pl.seed_everything(1, verbose=False)
    module = cls()
    used = _trainer(given, strategy, EPOCHS, folder)
    used.fit(module, loader)
    assert used.global_step == EPOCHS
    return {key: value.clone() for key, value in module.state_dict().items()}


def _references(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    found = {}
    for name, given in COMBINATIONS.items():
        pieces = {"num_microbatches": PIECES, "batchnorm": "deferred"}
        # batch norms normalise micro-batches: those of one device are those of all copies
        found[name] = _train_one(name, pieces if given.model == "norms" else None, folder)
    return found


def _train_one(name: str, pieces: Any, folder: str) -> dict[str, torch.Tensor]:
    given = COMBINATIONS[name]
    cls, dataset = MODELS[given.model]
    pl.seed_everything(1, verbose=False)
    module = cls()
    used = _trainer(given, pieces, EPOCHS, folder)
    used.fit(module, DataLoader(dataset(), batch_size=BATCH))
    return {key: value.clone() for key, value in module.state_dict().items()}


def _combined(folder: str) -> dict[str, dict[str, torch.Tensor]]:
    size = {"pipeline_parallel_size": 2, "data_parallel_size": COPIES}
    return {
        name: _train(name, {**given.strategy, **size}, folder)
        for name, given in COMBINATIONS.items()
    }


@functools.cache
def _results(folder: str) -> Any:
    """All combinations, one after the other in the same processes."""
    return run_ranks(1, _references, folder)[0], run_ranks(4, _combined, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return _results(str(tmp_path_factory.mktemp("composition")))


@pytest.mark.parametrize("name", COMBINATIONS)
def test_features_run_together_as_one_device(name: str, results: Any) -> None:
    expected, found = results
    tolerance = COMBINATIONS[name].tolerance
    for rank in found:
        assert rank[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            torch.testing.assert_close(
                rank[name][key], value, rtol=tolerance, atol=tolerance, msg=key
            )


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
