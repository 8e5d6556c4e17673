"""What users do with weights between steps gives on every rank what it gives on one device."""

from __future__ import annotations

import copy
import time
import traceback
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.utilities import grad_norm
from tests import lit
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from lightning_pipe._loops import silence_advice
from lightning_pipe.errors import ConfigError, MeetingError
from lightning_pipe.manners import refuse_tuners


class _Norms(lit.Lit):
    """Norms and sums of weights and gradients, by hand and with torch's and Lightning's helpers."""

    def on_after_backward(self) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.log("by_hand", torch.stack([g.norm() for g in grads]).norm())
        for gradient in grads:
            gradient.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))
        self.log("total", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        self.log("clipped", torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01))

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for number, p in enumerate(self.parameters()):
                self.log(f"weight_{number}", p.norm())
                p.data.clamp_(-0.3, 0.3)
                self.log(f"after_{number}", p.abs().sum())

    def on_train_epoch_end(self) -> None:
        vector = torch.nn.utils.parameters_to_vector(self.parameters())
        torch.nn.utils.vector_to_parameters(vector * 0.9, self.parameters())
        self.log("vector", vector.sum())


class _Noise(lit.Lit):
    """Draws on weights move the generator as one device does."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn_like(p) * 0.01)
            self.net[2][0].bias.normal_()
            nn.init.xavier_uniform_(self.net[5][0].weight)


class _Kept(lit.Lit):
    """A plain list of parameters, weights that are read as numbers, the net called in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = list(self.net.parameters())

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p in self.kept:
                p.mul_(0.99)

    def on_train_epoch_end(self) -> None:
        self.log("kept", sum(float(p.detach().abs().sum()) for p in self.kept))
        self.numbers = [p.detach().cpu().numpy().copy() for p in self.parameters()]
        self.copied = copy.deepcopy(self.net)
        with torch.no_grad():
            self.log("sample", self.net(torch.ones(2, 8)).sum())

    def on_validation_epoch_end(self) -> None:
        self.log("val_sample", self.net(torch.ones(2, 8)).sum())

    def on_train_end(self) -> None:
        self.states = {k: v.clone() for k, v in self.net.state_dict().items()}


class _Teacher(lit.Lit):
    """A copy of the net that follows it and is used in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        out = self.net(x)
        with torch.no_grad():
            soft = self.teacher(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, soft)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)


class _Averaged(lit.Lit):
    """An average of the net that is used in validation only, and one that is in no module."""

    def __init__(self) -> None:
        super().__init__()
        ema = get_ema_multi_avg_fn(0.9)
        self.average = AveragedModel(self.net, multi_avg_fn=ema)

    def on_fit_start(self) -> None:
        self.hidden = [copy.deepcopy(self.net)]

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)
        for p, q in zip(self.hidden[0].parameters(), self.net.parameters(), strict=True):
            p.data.lerp_(q.data, 0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("average", F.cross_entropy(self.average(x), y))
        self.log("hidden", F.cross_entropy(self.hidden[0](x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


class _StateAverage(Callback):
    """An average of the state dict, swapped in for validation."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.average = {k: v.detach().clone() for k, v in module.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        for name, value in module.state_dict().items():
            self.average[name].mul_(0.9).add_(value.detach(), alpha=0.1)

    def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
        self.saved = {k: v.detach().clone() for k, v in module.state_dict().items()}
        module.load_state_dict(self.average)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.load_state_dict(self.saved)


class _Thaw(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[:4])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[:4], optimizer, lr=1e-3)


class _Thawed(lit.Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class _OnOneRank(Callback):
    """The process that logs looks at weights alone."""

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.is_global_zero:
            self.norm = float(torch.stack([p.detach().norm() for p in module.parameters()]).norm())

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            with torch.no_grad():
                self.sample = float(module.net(torch.ones(2, 8)).sum())


class _Stops(Callback):
    """Each rank wants to stop at another step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == (3 if trainer.is_global_zero else 4):
            trainer.should_stop = True


class _Plateau(lit.Lit):
    """A scheduler that monitors a number that only this rank has."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("own", float(self.global_rank * self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
        config = {"scheduler": scheduler, "monitor": "own", "interval": "step", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class _ClippingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.01)
        super().step()
        return loss


class _ClipsInStep(lit.Lit):
    """An optimizer that clips by the norm of all gradients within its step."""

    def configure_optimizers(self) -> Any:
        return _ClippingSGD(self.parameters(), lr=0.5)


class _Normed(lit.Lit):
    """Running statistics are read in a hook, and copied with an average."""

    def make_net(self, width: int, depth: int) -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(width, 4))

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        self.average.update_parameters(self.net)
        for number, block in enumerate(self.net[:4]):
            self.log(f"mean_{number}", block[1].running_mean.sum())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.average(x), y))


CASES: dict[str, tuple[Any, Any, int]] = {
    "norms": (_Norms, None, 2),
    "noise": (_Noise, None, 1),
    "kept": (_Kept, None, 1),
    "teacher": (_Teacher, None, 2),
    "averaged": (_Averaged, None, 2),
    "state_average": (lit.Lit, _StateAverage, 2),
    "ema_callback": (lit.Lit, lambda: EMAWeightAveraging(decay=0.9), 2),
    "swa": (lit.Lit, lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1), 3),
    "thaw": (_Thawed, _Thaw, 2),
    "one_rank": (lit.Lit, _OnOneRank, 1),
    "stops": (lit.Lit, _Stops, 2),
    "clips_in_step": (_ClipsInStep, None, 1),
    "normed": (_Normed, None, 1),
    "accumulation": (lit.Lit, lambda: GradientAccumulationScheduler({0: 1, 1: 2}), 2),
    "plateau": (_Plateau, None, 1),
}


def _case(name: str, devices: int, sharded: bool = False) -> Any:
    cls, make, epochs = CASES[name]
    module = lit.seeded(cls)
    callback = make() if make is not None else None
    normed = cls is _Normed  # a BatchNorm sees micro-batches: compared with one rank that has them
    strategy: Any = None if devices == 1 and not normed else {"num_microbatches": 4}
    if sharded:  # two copies that see the same rows
        strategy = {"num_microbatches": 4, "data_parallel_size": 2, "data_parallel_sharding": True}
    trainer = lit.trainer(
        strategy,
        devices,
        max_epochs=epochs,
        callbacks=[] if callback is None else [callback],
        use_distributed_sampler=False,
    )
    loader = DataLoader(lit.rows(24), batch_size=8)
    torch.manual_seed(4)
    torch.set_default_dtype(torch.float64)
    try:
        trainer.fit(module, loader, loader)
    finally:
        torch.set_default_dtype(torch.float32)
    found = lit.outcome(module, trainer)
    found["kept"] = [
        *_tensors(vars(module).get("numbers", [])),
        *_tensors(vars(module).get("states", {}).values()),
        *(m.state_dict() for m in vars(module).get("hidden", [])),
        *(m.state_dict() for m in [module._modules.get("copied")] if m is not None),
        *_tensors(getattr(callback, "average", {}).values()),
    ]
    found["lr"] = [group["lr"] for group in trainer.optimizers[0].param_groups]
    found["one"] = [getattr(callback, "norm", 0.0), getattr(callback, "sample", 0.0)]
    return found


def _tensors(values: Any) -> list[Tensor]:
    return [torch.as_tensor(value) for value in values]


def _all(names: list[str], devices: int, sharded: bool = False) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = _case(name, devices, sharded)
        except Exception:
            results[name] = traceback.format_exc()
            if devices > 1:
                break
    return results


@pytest.fixture(scope="module")
def on_two_ranks() -> list[dict[str, Any]]:
    return lit.run_ranks(2, _all, list(CASES), 2)


@pytest.mark.parametrize("name", CASES)
def test_hooks_see_one_device(name: str, on_two_ranks: list[dict[str, Any]]) -> None:
    _compare(name, on_two_ranks)


@pytest.fixture(scope="module")
def on_two_sharded_copies() -> list[dict[str, Any]]:
    return lit.run_ranks(4, _all, [name for name in CASES if name not in ("plateau",)], 4, True)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("plateau",)])
def test_hooks_see_one_device_where_weights_are_in_parts(
    name: str, on_two_sharded_copies: list[dict[str, Any]]
) -> None:
    _compare(name, on_two_sharded_copies)


def _compare(name: str, of_ranks: list[dict[str, Any]]) -> None:
    reference = _case(name, 1)
    for rank, results in enumerate(of_ranks):
        result = results.get(name, "an earlier case failed")
        assert not isinstance(result, str), result
        for one in (result, reference):
            one["metrics"].pop("own", None)
        lit.assert_equal([result], reference)
        torch.testing.assert_close(result["kept"], reference["kept"], rtol=1e-9, atol=1e-9)
        assert result["lr"] == reference["lr"]
        if rank == 0:
            assert result["one"] == pytest.approx(reference["one"], rel=1e-9)


class _SavesAlone(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt")


def _save_alone() -> tuple[str, float]:
    trainer = lit.trainer({}, 2, callbacks=[_SavesAlone()])
    start_s = time.monotonic()
    with pytest.raises(MeetingError) as raised:
        trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(16), batch_size=8))
    return str(raised.value), time.monotonic() - start_s


def test_a_checkpoint_of_one_rank_alone_is_an_error_that_says_who_is_where() -> None:
    for message, duration_s in lit.run_ranks(2, _save_alone):
        assert "rank 1 (global rank 0) gathers the weights of the model (in on_train_e" in message
        assert "rank 0 (global rank 1) ends an epoch" in message
        assert duration_s < 60


def test_what_trains_and_takes_it_back_is_refused_with_the_way_out() -> None:
    refuse_tuners([_Stops()])
    with pytest.raises(ConfigError, match=r"LearningRateFinder .*Trainer\(devices=1\)"):
        refuse_tuners([LearningRateFinder()])


def test_nobody_is_told_to_synchronise_what_is_equal() -> None:
    advice = "It is recommended to use `self.log('x', ..., sync_dist=True)` when logging"
    undo = silence_advice()
    warnings.warn(advice, stacklevel=1)
    undo()
    with pytest.raises(UserWarning, match="sync_dist"):
        warnings.warn(advice, stacklevel=1)
