"""Losses of micro-batches, weighted as the step says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests import lit
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe.errors import BatchError
from lightning_pipe.tail.denominators import Denominators
from lightning_pipe.tail.logs import LogTape
from lightning_pipe.tail.losses import LossWeights, split_loss


def test_the_correction_makes_provisional_factors_exact():
    weights = LossWeights([2, 1, 1])
    factors = [weights.factor(w) for w in (3.0, 0.0, 5.0)]
    assert [f * weights.correction for f in factors] == pytest.approx([3 / 8, 0, 5 / 8])
    losses = [torch.tensor(2.0), torch.tensor(float("nan")), torch.tensor(4.0)]
    torch.testing.assert_close(weights.merged(losses), torch.tensor(26 / 8))


def test_without_weights_rows_count_and_sums_are_added():
    weights = LossWeights([2, 1])
    assert [weights.factor(None) for _ in range(2)] == pytest.approx([2 / 3, 1 / 3])
    assert (weights.correction, weights.merged([1.0, 4.0])) == (1.0, 2.0)
    sums = LossWeights([2, 1])
    assert [sums.factor("sum") for _ in range(2)] == [1.0, 1.0]
    assert (sums.correction, sums.merged([1.0, 4.0])) == (1.0, 5.0)
    out = [{"loss": 1.0, "loss_weight": "sum"}, {"loss": 4.0, "loss_weight": "sum"}]
    assert sums.merged_output(out) == {"loss": 5.0, "loss_weight": "sum"}


def test_a_batch_without_anything_that_counts_is_no_number_as_on_one_device():
    weights = LossWeights([1, 1])
    for _ in range(2):
        weights.factor(0.0)
    assert math.isnan(weights.correction)


@pytest.mark.parametrize("weight", ["mean", -1.0, float("nan"), torch.ones(2), [3]])
def test_other_weights_are_refused(weight):
    with pytest.raises(BatchError, match="what the mean divides by"):
        split_loss({"loss": torch.ones(()), "loss_weight": weight})


def test_micro_batches_agree_on_the_kind_of_weight():
    weights = LossWeights([1, 1])
    weights.factor(2.0)
    with pytest.raises(BatchError, match="different kinds"):
        weights.factor(None)


def test_the_logged_loss_has_the_weight_of_the_loss_and_other_values_have_not():
    tape = LogTape(lambda metric: 0)
    tape.start()
    for value, weight in ((1.0, 1.0), (3.0, 3.0)):
        loss = torch.tensor(value)
        tape.next_microbatch()
        tape.log("loss", loss)
        tape.log("number", loss.item())
        tape.log("double", 2 * loss)
        tape.weigh(loss, weight)
    values = {call.name: float(call.value) for call in tape.merged([1, 1])}
    assert values == {"loss": 2.5, "number": 2.5, "double": 4.0}


def test_a_batch_size_that_is_that_of_the_whole_batch_stays():
    tape = LogTape(lambda metric: 0)
    tape.start()
    for _ in range(2):
        tape.next_microbatch()
        tape.log("whole", 1.0, batch_size=4)
        tape.log("tokens", 1.0, batch_size=6)
    sizes = {call.name: call.kwargs["batch_size"] for call in tape.merged([2, 2])}
    assert sizes == {"whole": 4, "tokens": 12}


@pytest.mark.parametrize(
    ("arguments", "differ"),
    [
        ({}, False),
        ({"ignore_index": 2}, True),
        ({"ignore_index": 7}, False),
        ({"reduction": "sum"}, True),
        ({"reduction": "none"}, False),
        ({"weight": torch.tensor([1.0, 1.0, 5.0])}, True),
    ],
)
@pytest.mark.parametrize("function", [F.cross_entropy, F.nll_loss])
def test_what_losses_divide_by_is_seen(function, arguments, differ):
    logits, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    seen = Denominators()
    for rows in (slice(0, 2), slice(2, 4)):
        with seen:
            function(logits[rows], target[rows], **arguments)
            F.mse_loss(logits, logits)
    assert seen.differ([2, 2]) is differ


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"los": torch.ones(())}, "the dict that it returned has the keys 'los'"),
        ({}, "has the keys none"),
        ({"loss": 1.0}, "'loss' in what it returned is float"),
        (1.0, "it returned float"),
    ],
)
def test_what_is_no_loss_is_named_when_the_step_is_traced(value: Any, message: str) -> None:
    class Module(lit.Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.loss(batch)
            return value

    with pytest.raises(TypeError, match=message) as raised:
        lit.trainer({"num_microbatches": 2}, 1).fit(Module(), DataLoader(lit.rows(8), batch_size=8))
    assert "see_together" in [entry.name for entry in raised.traceback]
