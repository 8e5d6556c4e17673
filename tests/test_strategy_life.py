"""What happens around a step: loss scales, gathering, tuners."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.tuner import Tuner
from tests import lit
from tests.lit import run_ranks
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError


class _Scaled(MixedPrecision):
    """The loss scale of 16-mixed around a step in double precision, so that it can be exact."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**16))

    def autocast_context_manager(self):
        return nullcontext()


class _Overflowing(lit.LitTied):
    """A mean over valid tokens; the gradient of one block is infinite in the second step."""

    def __init__(self):
        super().__init__()
        self.scales, self.rates, self.before = [], [], {}

    def loss(self, batch):
        (tokens,) = batch
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] >= 4, -100)
        loss = F.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), targets.flatten())
        return {"loss": loss, "loss_weight": (targets != -100).sum()}

    def training_step(self, batch, batch_idx):
        output = self.loss(batch)
        self.log("train_loss", output["loss"])
        return output

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch)["loss"])

    def on_after_backward(self):
        if self.trainer.global_step == 1 and not self.before:
            self.before = {name: value.clone() for name, value in self.state_dict().items()}
            self.net.blocks[0].out.weight.grad[0, 0] = float("inf")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        if batch_idx == 1:
            now = self.state_dict()
            assert all(torch.equal(now[name], value) for name, value in self.before.items())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _overflow(strategy):
    module = lit.seeded(_Overflowing)
    arguments = {"precision": None, "plugins": [_Scaled()], "gradient_clip_val": 0.3}
    trainer = lit.trainer(strategy, lit.world(), **arguments)
    loader = DataLoader(lit.tokens(), batch_size=8)
    trainer.fit(module, loader, loader)
    return lit.outcome(module, trainer), module.scales, module.rates


def test_an_overflow_on_one_stage_skips_the_step_of_all_and_weighted_losses_stay_exact():
    expected, scales, rates = run_ranks(1, _overflow, None)[0]
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15]
    for result, *found in run_ranks(2, _overflow, {"num_microbatches": 4}):
        assert found == [scales, rates]
        lit.assert_equal([result], expected)


class _Gathers(lit.Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        gathered = self.all_gather({"loss": loss.detach(), "rows": torch.ones(2)})
        self.log("gathered", gathered["loss"].mean() + gathered["rows"].sum())
        return loss

    def on_validation_epoch_end(self):
        self.log("shape", float(self.all_gather(torch.ones(3, 2)).numel()))


def _gather(strategy):
    module = lit.seeded(_Gathers)
    trainer = lit.trainer(strategy, lit.world())
    loader = DataLoader(lit.rows(), batch_size=8)
    trainer.fit(module, loader, loader)
    return lit.outcome(module, trainer)


def test_all_gather_means_the_copies_of_the_pipeline():
    expected = run_ranks(1, _gather, None)[0]
    lit.assert_equal(run_ranks(2, _gather, {}), expected)


def _tuned():
    loader = DataLoader(lit.rows(), batch_size=8)
    trainer = lit.trainer({}, lit.world(), callbacks=[LearningRateFinder()])
    with pytest.raises(ConfigError, match=r"LearningRateFinder .*devices=1"):
        trainer.fit(lit.seeded(lit.Lit), loader)
    for method in ("fit", "validate"):
        module = lit.seeded(lit.Lit)
        module.batch_size = 8
        module.train_dataloader = module.val_dataloader = lambda: loader
        with pytest.raises(ConfigError, match=r"BatchSizeFinder .*devices=1"):
            Tuner(lit.trainer({}, lit.world())).scale_batch_size(module, method=method)


def test_tuners_are_refused_on_several_ranks_with_the_way_out():
    run_ranks(2, _tuned)
