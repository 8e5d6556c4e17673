"""Models of the zoo over two processes, one for each rule of cutting, with every schedule.

Where nothing in a model is random and its loss is a mean over rows, the other side is Lightning on
one device; elsewhere it is the same micro-batches on one rank, which `test_transparency` compares
with one device.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.zoo.catalogue import ZOO, Plain
from tests.zoo.modules import Batch, Case
from tests.zoo.unusual import UNUSUAL
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy
from lightning_pipe.split.tree import map_tensors

MICROBATCHES, STEPS = 4, 2
SCHEDULES = {
    1: ("naive", "gpipe", "1f1b", "zero_bubble"),
    2: ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"),
}
#: compared with one device
EXACT = (
    "writes_into_a_buffer",  # in-place writes
    "inplace_residual",  # in-place units on received values
    "siamese",  # calls of one unit on two stages
    "weight_as_argument",  # parameters as arguments
    "gradient_reversal",  # custom autograd function
    "module_hooks",
    "tensor_hook",
    "branch_that_is_not_taken",  # control by values
    "recurrent_cell_with_kept_state",
    "frozen_first",
    "frozen_middle",
    "frozen_last",
    "llama",  # rotary tables
    "deberta_v2",  # weights of an embedding inside every block
)
#: random, or with a loss that is no mean over rows
SAME_MICROBATCHES = (
    "random_glue",
    "auxiliary_attribute",  # a router, experts by value, a loss in an attribute
    "dataclass_outputs",
    "captured_by_hook",  # inner tensors that escape
    "checkpointed_region",
    "llava",  # hooks that the first step installs
)


class Logged(Plain):
    """As in the zoo, and it logs."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _case(name: str) -> Case:
    made = {**ZOO, **UNUSUAL}[name]()
    inner = made.module.net if isinstance(made.module, Plain) else made.module
    assert isinstance(inner, nn.Module)
    loss = made.module.loss if isinstance(made.module, Plain) else made.loss
    return Case(inner.double(), loss, map_tensors(_double, made.batch))


def _train(name: str, **trainer: Any) -> dict[str, Tensor]:
    torch.set_default_dtype(torch.float64)  # what a model makes on its own is double, too
    try:
        case = _case(name)
        module = Logged(case)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = pl.Trainer(
                accelerator="cpu",
                max_epochs=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                **trainer,
            )
            fit.fit(module, DataLoader([case.batch] * STEPS, batch_size=None))
        assert fit.global_step == STEPS
        state = {key: value.detach().clone() for key, value in module.state_dict().items()}
        return {**state, "loss": torch.as_tensor(fit.callback_metrics["loss"])}
    finally:
        torch.set_default_dtype(torch.float32)


def _over_stages(name: str, devices: int, virtual_stages: int, schedules: Any) -> Any:
    """Runs in every rank."""
    pl.seed_everything(3, verbose=False)
    return {
        schedule: _train(
            name,
            devices=devices,
            strategy=PipelineStrategy(
                num_microbatches=MICROBATCHES, virtual_stages=virtual_stages, schedule=schedule
            ),
        )
        for schedule in schedules
    }


@functools.cache
def _expected(name: str) -> dict[str, Tensor]:
    return _train(name, devices=1)


def _assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], schedule: str) -> None:
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(
            got[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, k=key: f"{schedule} {k}: {m}"
        )


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("name", EXACT)
def test_two_processes_equal_one_device(name: str, virtual_stages: int, pool: Any) -> None:
    schedules = SCHEDULES[virtual_stages]
    for ranks in pool(2, _over_stages, name, 2, virtual_stages, schedules, timeout=120):
        for schedule, got in ranks.items():
            _assert_equal(got, _expected(name), schedule)


@pytest.mark.parametrize("name", SAME_MICROBATCHES)
def test_two_processes_equal_one_rank(name: str, pool: Any) -> None:
    expected = pool(1, _over_stages, name, 1, 1, ("naive",), timeout=60)[0]["naive"]
    for virtual_stages, schedules in SCHEDULES.items():
        for ranks in pool(2, _over_stages, name, 2, virtual_stages, schedules, timeout=120):
            for schedule, got in ranks.items():
                _assert_equal(got, expected, schedule)
