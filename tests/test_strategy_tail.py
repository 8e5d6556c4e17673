"""What the tail of a step leaves behind is the same on every rank, and what one device would have
left."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import Counter
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_pipe.errors import CutError, PeerError


def _logged(strategy, folder):
    module = lit.seeded(lit.Lit)
    trainer = lit.trainer(
        strategy,
        lit.world(),
        logger=CSVLogger(folder, version=0),
        callbacks=[LearningRateMonitor("step")],
        log_every_n_steps=1,
        max_epochs=2,
    )
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8), DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


def test_the_logger_of_rank_0_writes_what_one_device_writes(tmp_path):
    expected = run_ranks(1, _logged, None, str(tmp_path / "one"))[0]
    lit.assert_equal(run_ranks(2, _logged, {}, str(tmp_path / "two")), expected)
    one, two = (
        list(csv.DictReader(next((tmp_path / name).rglob("metrics.csv")).read_text().splitlines()))
        for name in ("one", "two")
    )
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert (a[key] == "") == (b[key] == "")
            if a[key]:
                assert float(b[key]) == pytest.approx(float(a[key]), rel=1e-6)


class _Scripted(lit.Lit):
    losses = (1.0, 0.5, 0.6, 0.7, 0.8)

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("val_loss", 0 * loss + self.losses[self.current_epoch])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }


def _decided(strategy, folder):
    module = lit.seeded(_Scripted)
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_top_k=1)
    trainer = lit.trainer(
        strategy,
        lit.world(),
        max_epochs=10,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[EarlyStopping("val_loss", patience=2), best],
    )
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8), DataLoader(lit.rows(), batch_size=8))
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return trainer.current_epoch, Path(best.best_model_path).name, best.best_model_score.item(), lr


def test_callbacks_decide_the_same_on_all_ranks(tmp_path):
    expected = run_ranks(1, _decided, None, str(tmp_path / "one"))[0]
    assert expected[:3] == (4, "epoch=1.ckpt", 0.5)
    assert run_ranks(2, _decided, {}, str(tmp_path / "two")) == [expected] * 2
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["epoch=1.ckpt"]


class _Keys(lit.Lit):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        four = 0 * loss + 4.0
        values = {"a": four, "b": 4.0, "c": four.detach()}
        self.log_dict(values, sync_dist=True, on_step=True, on_epoch=True)
        if batch_idx % 2:
            self.log("odd", float(batch_idx))
        self.log("rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("largest", batch[0].max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("sized", loss, batch_size=len(batch[0]), on_epoch=True)
        return loss


def _keys(strategy):
    module = lit.seeded(_Keys)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(36), batch_size=8))
    return lit.outcome(module, trainer)


def test_log_takes_all_its_arguments():
    expected = run_ranks(1, _keys, None)[0]
    results = run_ranks(2, _keys, {"num_microbatches": 3})
    lit.assert_equal(results, expected)
    assert {results[0]["metrics"][key] for key in ("a_epoch", "b_epoch", "c_step")} == {4.0}
    assert results[1]["metrics"]["rows"] == 36


class _Metrics(lit.Lit):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(4)
        self.both = MetricCollection({"f1": MulticlassF1Score(4), "acc": MulticlassAccuracy(4)})
        self.count, self.mean, self.cat = SumMetric(), MeanMetric(), CatMetric()
        self.by_hand = MulticlassAUROC(4, thresholds=None)
        self.plain = {"sum": SumMetric()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.both.update(logits, y)
        self.count(torch.ones(len(y)))
        self.log("count", self.count)
        self.mean.update(loss, len(y))
        self.cat.update(y)
        self.by_hand.update(logits.softmax(-1), y)
        self.plain["sum"].update(torch.ones(len(y)))
        return loss

    def on_validation_epoch_end(self):
        self.log_dict(self.both.compute())
        self.both.reset()
        self.log("mean", self.mean.compute())
        self.log("auroc", self.by_hand.compute())
        self.log("last_class", self.cat.compute()[-1].float())
        self.log("plain", self.plain["sum"].compute())
        for metric in (self.mean, self.by_hand, self.cat, self.plain["sum"]):
            metric.reset()


class _Steps(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((outputs.item(), pl_module.accuracy._forward_cache.item()))


def _metrics(strategy):
    module, steps = lit.seeded(_Metrics), _Steps()
    trainer = lit.trainer(strategy, lit.world(), max_epochs=2, callbacks=[steps])
    trainer.fit(
        module, DataLoader(lit.rows(40), batch_size=8), DataLoader(lit.rows(36), batch_size=8)
    )
    return lit.outcome(module, trainer), steps.seen


def test_metric_objects_count_every_sample_once():
    expected, steps = run_ranks(1, _metrics, None)[0]
    results = run_ranks(2, _metrics, {"num_microbatches": 3})
    assert expected["metrics"]["count"] == 36
    lit.assert_equal([result for result, _ in results], expected)
    for _, seen in results:
        assert seen == [pytest.approx(pair) for pair in steps]


class _Attributes(lit.Lit):
    def __init__(self):
        super().__init__()
        self.outputs, self.predictions, self.by_loader = [], [], {}
        self.num_batches = self.num_rows = self.num_right = 0
        self.names = []
        self.last = None

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        self.outputs.append({"loss": loss, "logits": logits, "rows": len(y)})
        self.predictions.extend(logits.argmax(-1).tolist())
        self.by_loader.setdefault("only", []).append(loss.detach())
        self.num_batches += 1
        self.num_rows += len(y)
        self.num_right += (logits.argmax(-1) == y).sum().item()
        self.last = logits
        return loss

    def on_validation_epoch_end(self):
        if self.trainer.sanity_checking:
            self.__init__()
            return
        self.kept = {
            "losses": [o["loss"].item() for o in self.outputs],
            "rows": [o["rows"] for o in self.outputs],
            "logits": torch.cat([o["logits"] for o in self.outputs]),
            "predictions": list(self.predictions),
            "by_loader": torch.stack(self.by_loader["only"]),
            "numbers": (self.num_batches, self.num_rows, self.num_right),
            "last": self.last,
        }


def _attributes(strategy):
    module = lit.seeded(_Attributes)
    loader = DataLoader(lit.rows(36), batch_size=8)
    lit.trainer(strategy, lit.world()).validate(module, loader, verbose=False)
    return module.kept


def test_attributes_are_those_of_one_device_on_all_ranks():
    expected = run_ranks(1, _attributes, None)[0]
    for kept in run_ranks(2, _attributes, {"num_microbatches": 3}):
        assert kept.keys() == expected.keys()
        assert kept["losses"] == pytest.approx(expected["losses"])
        assert kept["rows"] == expected["rows"]
        assert kept["predictions"] == expected["predictions"]
        assert kept["numbers"] == expected["numbers"]
        for name in ("logits", "by_loader", "last"):
            torch.testing.assert_close(kept[name], expected[name])


class _GlueState(lit.Lit):
    """Reads and writes an attribute in the glue before the first unit."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        x, y = batch
        loss = F.cross_entropy(self.net(x * self.calls), y)
        self.log("calls", float(self.calls))
        return loss


def _glue_state(strategy):
    module = lit.seeded(_GlueState)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer), module.calls


def test_a_counter_in_the_glue_counts_steps():
    expected, calls = run_ranks(1, _glue_state, None)[0]
    assert calls == 5
    for result, found in run_ranks(2, _glue_state, {"virtual_stages": 2, "num_microbatches": 4}):
        assert found == calls
        lit.assert_equal([result], expected)


class _Meter:
    def __init__(self):
        self.sum, self.count, self.calls = 0.0, 0, 0

    def update(self, value, count):
        self.sum += value * count
        self.count += count
        self.calls += 1


class _State(lit.Lit):
    """Keeps state in objects, nested containers and buffers, in itself and in a submodule."""

    def __init__(self):
        super().__init__()
        self.meter, self.history = _Meter(), {"loss": [], "rows": 0}
        self.inner = torch.nn.Identity()
        self.inner.meter = _Meter()
        self.inner.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(()))
        self.classes, self.sizes = Counter(), []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.count += 1
        early = self.net(x * (1 + self.average))  # the value before this step, on the first stage
        loss = F.cross_entropy(early * (1 + self.average), y)
        self.average.data.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.inner.count.add_(len(x))
        for meter in (self.meter, self.inner.meter):
            meter.update(loss.item(), len(x))
        self.history["loss"].append(loss.item())
        self.history["rows"] += len(x)
        self.classes.update(y.tolist())
        self.sizes.append(float(len(x)))
        return loss

    def left(self):
        meters = [vars(self.meter), vars(self.inner.meter)]
        numbers = [v for meter in meters for v in meter.values()]
        numbers += [*self.history["loss"], self.history["rows"], *self.sizes]
        numbers += [count for _, count in sorted(self.classes.items())]
        return [*numbers, *(buffer.item() for buffer in self.buffers())]


def _state(strategy):
    module = lit.seeded(_State)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(36), batch_size=8))
    return lit.outcome(module, trainer), module.left()


def test_state_in_objects_containers_and_buffers_is_that_of_one_device_on_all_ranks():
    expected, left = run_ranks(1, _state, None)[0]
    for result, found in run_ranks(2, _state, {"num_microbatches": 3}):
        lit.assert_equal([result], expected)
        assert found == pytest.approx(left)


class _Tokens(lit.LitTied):
    """A mean over valid tokens, of which rows have very different numbers, some none."""

    weighted = True

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.net(tokens[:, :-1])
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] >= 4, -100)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        count = (targets != -100).sum()
        return {"loss": loss, "loss_weight": count} if self.weighted else loss

    def validation_step(self, batch, batch_idx):
        output = self.training_step(batch, batch_idx)
        self.log("val_loss", output["loss"])
        return output


class _Sum(_Tokens):
    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        logits = self.net(tokens[:, :-1])
        targets = tokens[:, 1:].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "loss_weight": "sum"}


class _Outputs(pl.Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def _weighted(strategy, cls):
    module, outputs = lit.seeded(cls), _Outputs()
    arguments = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}
    trainer = lit.trainer(strategy, lit.world(), callbacks=[outputs], **arguments)
    batch = lit.tokens(24).tensors[0].clone()
    batch[3], batch[16:18] = 9, 9  # rows, and a whole micro-batch, without a valid token
    loader = DataLoader(torch.utils.data.TensorDataset(batch), batch_size=8)
    trainer.fit(module, loader, loader)
    return lit.outcome(module, trainer), outputs.losses


@pytest.mark.parametrize("cls", [_Tokens, _Sum])
def test_loss_weight_makes_a_loss_that_is_no_mean_over_rows_exact(cls):
    """With clipping and accumulation, which see the gradients after the correction."""
    expected, losses = run_ranks(1, _weighted, None, cls)[0]
    strategy = {"num_microbatches": 4, "virtual_stages": 2}
    for result, found in run_ranks(2, _weighted, strategy, cls):
        lit.assert_equal([result], expected)
        assert found == pytest.approx(losses, rel=1e-9)


class _TwoRows(lit.Lit):
    """One valid target in the first row, three in the second."""

    def make_net(self, width, depth):
        return torch.nn.Sequential(*[torch.nn.Linear(4, 4, bias=False) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        return {"loss": loss, "loss_weight": (y != -100).sum().item()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _two_rows(strategy):
    module, outputs = lit.seeded(_TwoRows), _Outputs()
    x = torch.zeros(2, 4, 4, dtype=torch.float64)
    x[0, :, 0], x[1] = 1.0, 1.0
    y = torch.tensor([[1, -100, -100, -100], [2, 2, 2, -100]])
    parts = [
        F.cross_entropy(module.net(x[i].to(torch.float64)), y[i], ignore_index=-100).item()
        for i in (0, 1)
    ]
    trainer = lit.trainer(strategy, lit.world(), callbacks=[outputs])
    trainer.fit(module, DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2))
    return lit.outcome(module, trainer), outputs.losses[0], parts


def test_one_valid_token_and_three_give_the_mean_of_four():
    expected, loss, (a, b) = run_ranks(1, _two_rows, None)[0]
    assert loss == pytest.approx((a + 3 * b) / 4)
    for result, found, _ in run_ranks(2, _two_rows, {"num_microbatches": 2}):
        lit.assert_equal([result], expected)
        assert found == pytest.approx((a + 3 * b) / 4, rel=1e-9)


class _Skips(lit.Lit):
    when = 0

    def training_step(self, batch, batch_idx):
        return None if batch_idx == self.when else super().training_step(batch, batch_idx)


class _SkipsLate(lit.Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


class _SkipsLater(_Skips):
    when = 1


def _skips(strategy, cls):
    with pytest.raises((CutError, PeerError)) as caught:
        lit.trainer(strategy, lit.world()).fit(
            lit.seeded(cls), DataLoader(lit.rows(), batch_size=8)
        )
    return str(caught.value)


@pytest.mark.parametrize("cls", [_Skips, _SkipsLater, _SkipsLate])
def test_a_step_that_returns_none_is_refused_with_the_reason(cls):
    messages = run_ranks(2, _skips, {}, cls)
    assert any("returned None: is there a `return loss`" in text for text in messages)


class _Prints(lit.Lit):
    def training_step(self, batch, batch_idx):
        self.print("rows", len(batch[0]))
        loss = super().training_step(batch, batch_idx)
        self.print(f"loss {loss.item():.6f}", self.all_gather(loss).item())
        return loss


def _prints(strategy):
    module, out = lit.seeded(_Prints), io.StringIO()
    trainer = lit.trainer(strategy, lit.world())
    with contextlib.redirect_stdout(out):
        trainer.fit(module, DataLoader(lit.rows(16), batch_size=8))
    return [
        line.split()[:2] for line in out.getvalue().splitlines() if line[:4] in ("rows", "loss")
    ]


def test_print_is_heard_once_per_step():
    expected = run_ranks(1, _prints, None)[0]
    assert [words[0] for words in expected] == ["rows", "loss"] * 2
    assert run_ranks(2, _prints, {"num_microbatches": 4}) == [expected, []]


class _Truncated(lit.Lit):
    """Carries the hidden state of each row to the next batch."""

    state = None

    def make_net(self, width, depth):
        layers = {"first": nn.Linear(width, width), "last": nn.Linear(width, 4)}
        return nn.ModuleDict({**layers, "cells": nn.GRU(width, width, 2, batch_first=True)})

    def loss(self, batch):
        x, y = batch
        out, state = self.net["cells"](self.net["first"](x)[:, None], self.state)
        self.state = state.detach()
        return F.cross_entropy(self.net["last"](out[:, 0]), y)


def _truncated(strategy):
    module, said = lit.seeded(_Truncated), ""
    trainer = lit.trainer(strategy, lit.world())
    try:
        trainer.fit(module, DataLoader(lit.rows(16), batch_size=8))
    except (RuntimeError, PeerError) as error:
        said = f"{error} {getattr(error, '__notes__', '')}"
    return said, None if said else lit.outcome(module, trainer), module.state


def test_a_state_of_each_row_needs_whole_batches_and_says_so():
    _, expected, state = run_ranks(1, _truncated, None)[0]
    results = run_ranks(2, _truncated, {"num_microbatches": 1})
    lit.assert_equal([found for _, found, _ in results], expected)
    assert all(torch.allclose(found, state, rtol=1e-9) for _, _, found in results)
    for said, _, kept in run_ranks(2, _truncated, {"num_microbatches": 2}):
        assert kept.shape == state.shape  # of the batch, not a mean over micro-batches
        assert "Expected hidden size (2, 4, 8), got [2, 8, 8]" in said
        assert "use num_microbatches=1" in said
