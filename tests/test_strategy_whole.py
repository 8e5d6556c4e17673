"""What micro-batches do not add up to is taken from the tail on the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

QUEUE = 12


class _Whole(lit.Lit):
    """Logs batch values of metrics and other things that are no means, keeps a queue."""

    def __init__(self):
        super().__init__()
        self.f1 = MulticlassF1Score(4)
        self.both = MetricCollection([MulticlassAUROC(4), MulticlassF1Score(4, average="micro")])
        self.register_buffer("queue", torch.zeros(QUEUE, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.largest, self.spread = 0.0, []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        similar = logits @ self.queue.clone().T
        loss = F.cross_entropy(logits, y) + 0.1 * similar.square().mean()
        self.log("f1", self.f1(logits, y), on_step=True, on_epoch=False)
        self.log_dict(self.both(logits.softmax(-1), y), on_step=True, on_epoch=False)
        self.log("std", logits.std())
        self.log("max", logits.max(), on_step=True, on_epoch=True)
        self.log("rmse", loss.detach().sqrt())
        self.largest = max(self.largest, logits.max().item())
        self.spread.append({"std": logits.std().item(), "rows": float(len(x))})
        start = int(self.pointer)
        self.queue[start : start + len(x)] = logits.detach()
        self.pointer[0] = (start + len(x)) % QUEUE
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_f1", self.f1(self.net(batch[0]), batch[1]))
        return F.cross_entropy(self.net(batch[0]), batch[1], weight=torch.arange(4.0).double())


def _whole(strategy):
    module = lit.seeded(_Whole)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = lit.trainer(strategy, lit.world(), max_epochs=2)
        warnings.simplefilter("always")
        loader = DataLoader(lit.rows(20), batch_size=4)
        trainer.fit(module, loader, loader)
    texts = [str(w.message) for w in said if "loss_weight" in str(w.message)]
    assert not texts, texts  # the mean over rows of all rows is what it is
    return lit.outcome(module, trainer), (module.largest, module.spread)


def test_batch_values_of_metrics_maxima_and_queues_are_those_of_one_device():
    expected, (largest, spread) = run_ranks(1, _whole, None)[0]
    for result, (found, history) in run_ranks(2, _whole, {"num_microbatches": 3}):
        lit.assert_equal([result], expected)
        assert found == pytest.approx(largest)
        for entry, other in zip(history, spread, strict=True):
            assert entry == pytest.approx(other)


class _Loss(lit.Lit):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        if self.kind == "mean":
            return F.cross_entropy(logits, y)
        if self.kind == "weighted":
            return F.cross_entropy(logits, y, weight=torch.arange(1.0, 5.0).double())
        if self.kind == "ignored":
            return {"loss": F.cross_entropy(logits, y, ignore_index=2)}
        if self.kind == "counted":
            loss = F.cross_entropy(logits, y, ignore_index=2)
            return {"loss": loss, "loss_weight": (y != 2).sum()}
        if self.kind == "contrast":
            similar = F.normalize(logits, dim=-1)
            return F.cross_entropy(similar @ similar.T, torch.arange(len(x)))
        if self.kind == "noisy":
            return (logits - torch.randn_like(logits)).square().mean()
        return F.cross_entropy(logits, y, reduction="sum")


KINDS = ("mean", "weighted", "ignored", "counted", "contrast", "noisy", "sum")


def _losses(strategy):
    said = {}
    for kind in KINDS:
        module = lit.seeded(_Loss, kind)
        trainer = lit.trainer(strategy, lit.world())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(lit.rows(32), batch_size=8))
        said[kind] = sum("is not the mean of those" in str(w.message) for w in caught)
    return said


def test_a_loss_that_is_no_mean_over_rows_is_said_to_be_one():
    """Once each, and not where it is one or says what it divides by."""
    counts = run_ranks(2, _losses, {"num_microbatches": 4})
    said = {kind: sum(count[kind] for count in counts) for kind in KINDS}
    assert {kind for kind, times in said.items() if times} == {
        "weighted",
        "ignored",
        "contrast",
        "sum",
    }
    assert max(said.values()) == 1


class _Few(lit.Lit):
    """Its end refuses more rows than a micro-batch has."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        if len(out) > 2:
            raise ValueError(f"{len(out)} rows")
        return F.cross_entropy(out, batch[1])


def test_an_end_that_cannot_run_on_the_whole_batch_is_said_once():
    module = lit.seeded(_Few)
    trainer = lit.trainer({"num_microbatches": 4, "virtual_stages": 2}, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    texts = [str(w.message) for w in said if "the end of" in str(w.message)]
    assert len(texts) == 1
    assert "training_step cannot be run on the whole batch (ValueError: 8 rows)" in texts[0]
