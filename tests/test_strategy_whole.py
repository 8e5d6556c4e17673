"""What micro-batches do not add up to is taken from the tail on the whole batch."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

QUEUE = 12
MOST = 3.0  # of a micro-batch 1.4, of a batch 5.4


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


class _NoLoss(lit.Lit):
    """It gives no loss of values that are too large, as those of four micro-batches are."""

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        loss = F.cross_entropy(out, batch[1])
        return {"loss": None if out.square().sum() > MOST else loss}


@pytest.mark.parametrize(
    ("cls", "reason"), [(_Few, "ValueError: 8 rows"), (_NoLoss, "TypeError: In automatic")]
)
def test_an_end_that_cannot_run_on_the_whole_batch_is_said_once(cls, reason):
    module = lit.seeded(cls)
    trainer = lit.trainer({"num_microbatches": 4, "virtual_stages": 2}, 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    texts = [str(w.message) for w in said if "the end of" in str(w.message)]
    assert len(texts) == 1
    assert "training_step cannot be run on the whole batch (" in texts[0]
    assert reason in texts[0]


class _Shown(lit.Lit):
    """Leaves its loss in many places, and a maximum beside it."""

    def __init__(self, kind):
        super().__init__(lr=0.0)
        self.kind = kind
        self.mean = MeanMetric()
        self.history, self.last, self.shown = [], torch.zeros(()), []

    def loss(self, batch):
        x, y = batch
        logits = self.net(x)
        if self.kind == "ignored":
            loss = F.cross_entropy(logits, y, ignore_index=2)
        elif self.kind == "sum":
            loss = F.cross_entropy(logits, y, reduction="sum")
        else:
            loss = F.cross_entropy(logits, y)
            if loss > 1.45:  # of the batches one says no here, of the pieces some say yes
                loss = 0.5 * loss
        return loss, logits.max()

    def training_step(self, batch, batch_idx):
        loss, largest = self.loss(batch)
        self.log("loss", loss)
        self.log("number", loss.item())
        self.log("max", largest)
        self.mean.update(loss)
        self.history.append(loss.item())
        self.last = loss.detach().clone()
        return {"loss": loss, "again": {"loss": loss.detach().float()}}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        logged = self.trainer.callback_metrics
        shown = {name: float(logged[name]) for name in ("loss", "number", "max")}
        shown |= {"output": float(outputs["loss"]), "again": float(outputs["again"]["loss"])}
        shown |= {"history": self.history[-1], "last": float(self.last)}
        self.shown.append(shown | {"mean": float(self.mean.compute())})


@pytest.mark.parametrize("kind", ["ignored", "sum", "decides"])
def test_the_loss_that_is_shown_is_the_one_whose_gradients_were_taken(kind):
    module = lit.seeded(_Shown, kind)
    loader = DataLoader(lit.rows(32), batch_size=8)
    losses, largest, answers = [], [], []
    with torch.no_grad():
        for x, y in loader:
            whole, most = module.loss((x, y))
            pieces = [module.loss(piece)[0] for piece in zip(x.split(2), y.split(2), strict=True)]
            losses.append(float(torch.stack(pieces).mean()))
            largest.append(float(most))
            answers.append(abs(losses[-1] - float(whole)))
    assert max(answers) > 1e-3, "the whole batch has the same loss: it is no example"
    trainer = lit.trainer({"num_microbatches": 4, "virtual_stages": 2}, 1)
    with pytest.warns(UserWarning, match="that mean, whose gradients are taken, is what is shown"):
        trainer.fit(module, loader)
    for number, shown in enumerate(module.shown):
        assert shown.pop("max") == pytest.approx(largest[number], rel=1e-9)
        assert shown.pop("again") == pytest.approx(losses[number], rel=1e-6)
        assert shown.pop("mean") == pytest.approx(sum(losses[: number + 1]) / (number + 1))
        assert shown == pytest.approx(dict.fromkeys(shown, losses[number]), rel=1e-9)
