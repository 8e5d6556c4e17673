"""Gradients, clipping, accumulation and optimizers over stages: the numbers are those of one
device."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError
from lightning_pipe.gradients import total_norm
from lightning_pipe.runtime.ranks import make_ranks


class Chain2(pl.LightningModule):
    """loss = mean(w1 * w0 * x), so dw0 = w1 * mean(x) and dw1 = w0 * mean(x)."""

    def __init__(self, w0=1.0, w1=1.0):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(w0)
            self.second.weight.fill_(w1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).mean()

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(
            {n: p.grad.item() for n, p in self.named_parameters() if p.grad is not None}
        )

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def _chain(batches, arguments, weights=(1.0, 1.0), **trainer_arguments):
    module = lit.seeded(Chain2, *weights)
    batches = [torch.tensor(batch, dtype=torch.float64).reshape(-1, 1) for batch in batches]
    trainer = lit.trainer(arguments, lit.world(), **trainer_arguments)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.seen, (module.first.weight.item(), module.second.weight.item())


def _clipped(value, algorithm):
    return _chain(
        [[1.0, 1.0]],
        {"num_microbatches": 2},
        (4.0, 3.0),
        gradient_clip_val=value,
        gradient_clip_algorithm=algorithm,
    )[1]


def test_clipping_uses_the_norm_over_all_stages():
    for weights in run_ranks(2, _clipped, 1.0, "norm"):
        assert weights == pytest.approx((3.4, 2.2), rel=1e-6)


def _norms_of_types(types):
    ranks = make_ranks([0, 1], 2)
    own = [torch.tensor([3.0, 4.0], dtype=types[ranks.position])] if ranks.position == 0 else []
    norm = total_norm(own, ranks, [types[ranks.position]])
    return norm.item(), str(norm.dtype)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ((torch.float64, torch.float64), (5.0, "torch.float64")),
        ((torch.float32, torch.bfloat16), (5.0, "torch.float32")),
        ((torch.bfloat16, torch.float32), (5.0, "torch.float32")),
        ((torch.bfloat16, torch.bfloat16), (5.0, "torch.bfloat16")),
    ],
)
def test_the_norm_is_the_same_on_a_rank_that_counts_none(types, expected):
    assert run_ranks(2, _norms_of_types, types) == [expected] * 2


def test_clipping_by_value():
    for weights in run_ranks(2, _clipped, 1.0, "value"):
        assert weights == pytest.approx((3.0, 2.0), rel=1e-12)


def _accumulated():
    return _chain([[1.0] * 4, [3.0] * 4], {"num_microbatches": 4}, accumulate_grad_batches=2)[0]


def test_accumulated_gradients_are_divided_once():
    seen = [entry for rank in run_ranks(2, _accumulated) for entry in rank]
    assert seen == [{"first.weight": 2.0, "second.weight": 2.0}] * 2


def _uneven():
    return _chain([[1.0, 1.0, 1.0, 1.0, 7.0, 7.0]], {"num_microbatches": 4})[0]


def test_uneven_microbatches_are_weighted_by_rows():
    seen = [entry for rank in run_ranks(2, _uneven) for entry in rank]
    mean = pytest.approx(3.0)
    assert seen == [{"first.weight": mean, "second.weight": mean}] * 2


def _fit(strategy, model, arguments):
    return lit.fit(strategy, lit.world(), model, **arguments)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("mlp", {"accumulate_grad_batches": 2, "max_epochs": 2}),
        ("tied", {"gradient_clip_val": 0.1, "max_epochs": 2}),
    ],
    ids=["partial accumulation window", "tied weights clipped"],
)
def test_training_equals_one_device(model, arguments):
    expected = run_ranks(1, _fit, None, model, arguments)[0]
    lit.assert_equal(run_ranks(2, _fit, {"num_microbatches": 4}, model, arguments), expected)


def _sgd_step(strategy):
    module = lit.seeded(lit.Lit)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.5)
    trainer = lit.trainer(strategy, lit.world(), max_steps=1)
    sizes = []
    trainer.callbacks.append(_Sizes(sizes))
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    moved = {n: not torch.equal(p, before[n]) for n, p in module.named_parameters()}
    return moved, sum(sizes), lit.outcome(module, trainer)


class _Sizes(pl.Callback):
    def __init__(self, sizes):
        self.sizes = sizes

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.sizes += [p.numel() for p in held if p.grad is not None]


def test_every_parameter_of_every_stage_is_optimised():
    _, total, expected = run_ranks(1, _sgd_step, None)[0]
    results = run_ranks(4, _sgd_step, {})
    assert all(all(moved.values()) for moved, _, _ in results)
    assert [count for _, count, _ in results] == [total] * 4  # hooks see all gradients
    lit.assert_equal([result for _, _, result in results], expected)


class _Scheduled(lit.Lit):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("rows", float(outputs["rows"]), reduce_fx="sum", on_epoch=True, on_step=False)


def _scheduled(strategy):
    module = lit.seeded(_Scheduled)
    trainer = lit.trainer(strategy, lit.world(), max_epochs=2)
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


def test_schedulers_and_dict_outputs():
    expected = run_ranks(1, _scheduled, None)[0]
    assert expected["metrics"]["rows"] == 40
    lit.assert_equal(run_ranks(2, _scheduled, {}), expected)


class _Overrides(lit.Lit):
    def backward(self, loss):
        (2 * loss).backward()

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _overridden(strategy):
    module = lit.seeded(_Overrides)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


def test_overridden_backward_and_optimizer_step():
    expected = run_ranks(1, _overridden, None)[0]
    lit.assert_equal(run_ranks(2, _overridden, {}), expected)


class _Manual(lit.Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class _TwoOptimizers(lit.Lit):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class _Lbfgs(lit.Lit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class _Read(RuntimeError):
    pass


class _Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise _Read


def _refused(cls, error, message):
    module = lit.seeded(cls)
    trainer = lit.trainer({}, 2)
    with pytest.raises(error, match=message):
        trainer.fit(module, DataLoader(_Unreadable(), batch_size=4))
    return True


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (_Manual, ConfigError, "automatic_optimization=False"),
        (_TwoOptimizers, RuntimeError, "multiple optimizers"),
        (_Lbfgs, ConfigError, "LBFGS"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused_before_a_batch_is_read(cls, error, message):
    assert run_ranks(2, _refused, cls, error, message) == [True, True]


class _Frozen(lit.Lit):
    frozen = ()

    def configure_optimizers(self):
        for index in self.frozen:
            self.net[index].requires_grad_(False)
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class _FrozenFirst(_Frozen):
    frozen = (0, 1, 2, 3)


class _FrozenLast(_Frozen):
    frozen = (4, 5, 6)


def _frozen(strategy, cls):
    module = lit.seeded(cls)
    trainer = lit.trainer(strategy, lit.world(), gradient_clip_val=0.1)
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


@pytest.mark.parametrize("cls", [_FrozenFirst, _FrozenLast])
def test_whole_stages_may_be_frozen(cls):
    expected = run_ranks(1, _frozen, None, cls)[0]
    lit.assert_equal(run_ranks(2, _frozen, {"balance": [4, 3]}, cls), expected)


class _Drops(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return x + F.dropout(self.down(self.drop(self.up(x)).relu()), 0.2, self.training)


class _Dropout(lit.Lit):
    def make_net(self, width, depth):
        return nn.Sequential(*(_Drops(width) for _ in range(3)), nn.Linear(width, 4))


def _dropped(arguments):
    module = lit.seeded(_Dropout)
    trainer = lit.trainer(arguments, lit.world())
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8, shuffle=True))
    return lit.outcome(module, trainer)


def test_dropout_does_not_depend_on_the_number_of_stages():
    one = run_ranks(1, _dropped, {"num_microbatches": 4})[0]
    opened = {"schedule": "interleaved_1f1b", "virtual_stages": 3}
    for more in ({}, opened, {"activation_checkpointing": "all"}):
        lit.assert_equal(run_ranks(2, _dropped, {"num_microbatches": 4, **more}), one)


class _Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[:4])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[:4], optimizer, lr=1e-3)


class _Head(lit.Lit):
    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _finetuned(strategy):
    module = lit.seeded(_Head)
    trainer = lit.trainer(strategy, lit.world(), callbacks=[_Unfreeze()])
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


def test_layers_may_thaw_during_training():
    expected = run_ranks(1, _finetuned, None)[0]
    lit.assert_equal(run_ranks(2, _finetuned, {}), expected)
