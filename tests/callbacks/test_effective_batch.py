"""Learning rates and warm-up follow the effective batch, against curves computed by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import ConfigError, EffectiveBatchRescaler
from lightning_pipe.callbacks.scaling import TimeMap, lr_scale

STEPS = 24
Make = Callable[[Optimizer], Any]


class _Module(pl.LightningModule):
    def __init__(self, make: Make | None, kind: type[Optimizer] = SGD) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.make, self.kind = make, kind
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean() * 0
        self.log("loss", loss)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))
        super().optimizer_step(*args, **kwargs)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        super().lr_scheduler_step(scheduler, metric)

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=0.1)  # type: ignore[call-arg]
        if self.make is None:
            return optimizer
        scheduler = self.make(optimizer)
        config = {"scheduler": scheduler, "interval": "step", "monitor": "loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


def _fit(
    make: Make | None,
    rows: int,
    *callbacks: pl.Callback,
    steps: int = STEPS,
    kind: type[Optimizer] = SGD,
    **kwargs: Any,
) -> _Module:
    module = _Module(make, kind)
    fit = {"ckpt_path": kwargs.pop("ckpt_path", None)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=steps,
            max_epochs=-1,
            callbacks=list(callbacks),
            enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            **kwargs,
        )
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=rows), **fit)
    return module


def _warmup_then_cosine(optimizer: Optimizer) -> Any:
    parts = [LinearLR(optimizer, 0.25, 1.0, 8), CosineAnnealingLR(optimizer, 16, 0.01)]
    return SequentialLR(optimizer, parts, [8])


def _lambda(step: int) -> float:
    return min(1.0, (step + 1) / 9) * (1 - step / (2 * STEPS))


FACTORS: dict[str, tuple[Make | None, Callable[[int], float]]] = {
    "none": (None, lambda t: 1.0),
    "lambda": (lambda o: LambdaLR(o, _lambda), _lambda),
    "exponential": (lambda o: ExponentialLR(o, 0.9), lambda t: 0.9**t),
    "cosine": (
        lambda o: CosineAnnealingLR(o, STEPS, eta_min=0.02),
        lambda t: 0.2 + 0.8 * (1 + math.cos(math.pi * t / STEPS)) / 2,
    ),
    "one_cycle": (lambda o: OneCycleLR(o, 0.1, STEPS + 1, pct_start=0.0001), lambda t: math.nan),
}


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
@pytest.mark.parametrize("name", FACTORS)
def test_the_whole_curve_is_scaled(name: str, rule: Any, factor: float) -> None:
    make, curve = FACTORS[name]
    plain = _fit(make, 8).rates
    scaled = _fit(make, 8, EffectiveBatchRescaler(rule, reference=2)).rates
    if name != "one_cycle":
        assert plain == pytest.approx([0.1 * curve(t) for t in range(STEPS)])
    assert scaled == pytest.approx([factor * rate for rate in plain])


RULES = pytest.mark.parametrize(("rule", "factor"), [("linear", 2), ("sqrt", 2**0.5), ("none", 1)])


@RULES
def test_warmup_is_kept_in_samples_and_the_peak_moves(rule: Any, factor: float) -> None:
    half = EffectiveBatchRescaler(rule, reference=4)
    rates = _fit(_warmup_then_cosine, 8, half).rates
    peak, floor = 0.1 * factor, 0.01 * factor
    warmup = [peak * (0.25 + 0.75 * t / 4) for t in range(4)]
    decay = [
        floor + (peak - floor) * (1 + math.cos(math.pi * t / 16)) / 2 for t in range(STEPS - 4)
    ]
    assert rates[:20] == pytest.approx((warmup + decay)[:20])
    assert half.history[0]["notes"] == ["warm-up: 8 steps left became 4"]


@RULES
def test_lambdas_warm_up_in_as_many_samples_and_end_where_they_did(
    rule: Any, factor: float
) -> None:
    def curve(step: float) -> float:
        return min(1.0, step / 8) * (1.0 if step < 8 else 1 - (step - 8) / 32)

    rescaler = EffectiveBatchRescaler(rule, reference=4, warmup_steps=8)
    rates = _fit(lambda o: LambdaLR(o, curve), 8, rescaler).rates
    time = [2 * t if t <= 4 else 8 + (t - 4) * 16 / 20 for t in range(STEPS)]
    assert rates == pytest.approx([0.1 * factor * curve(t) for t in time])


@RULES
def test_one_cycle_rises_in_half_the_steps(rule: Any, factor: float) -> None:
    rescaler = EffectiveBatchRescaler(rule, reference=4)
    rates = _fit(lambda o: OneCycleLR(o, 0.1, STEPS, pct_start=0.5), 8, rescaler).rates
    peak = 0.1 * factor
    start, end, top, last = peak / 25, peak / 25 / 1e4, 5, STEPS - 1  # the top was at step 11

    def between(low: float, high: float, part: float) -> float:
        return low + (high - low) * (1 - math.cos(math.pi * part)) / 2

    rise = [between(start, peak, t / top) for t in range(top)]
    fall = [between(peak, end, (t - top) / (last - top)) for t in range(top, STEPS)]
    assert rates == pytest.approx(rise + fall)


@RULES
def test_a_plateau_scheduler_goes_on_from_the_scaled_rate(rule: Any, factor: float) -> None:
    rescaler = EffectiveBatchRescaler(rule, reference=4)
    make: Make = lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0, min_lr=0.04)  # noqa: E731
    rates = _fit(make, 8, rescaler, steps=6).rates
    assert rates == pytest.approx([factor * rate for rate in (0.1, 0.1, 0.05, 0.04, 0.04, 0.04)])


def test_adam_moves_its_betas_too() -> None:
    rescaler = EffectiveBatchRescaler("sqrt", reference=4, scale_betas=True)
    group = _fit(None, 8, rescaler, kind=Adam).trainer.optimizers[0].param_groups[0]
    assert group["betas"] == pytest.approx((0.8, 0.998))
    assert group["eps"] == pytest.approx(1e-8 / math.sqrt(2))
    with pytest.raises(ConfigError, match="takes the betas"):
        _fit(None, 64, EffectiveBatchRescaler("sqrt", 4, scale_betas=True), kind=Adam)
    with pytest.raises(ConfigError, match="SGD has no betas"):
        _fit(None, 8, EffectiveBatchRescaler("sqrt", 4, scale_betas=True))


def test_a_change_during_training_is_followed() -> None:
    accumulate = GradientAccumulationScheduler({0: 1, 2: 2})  # 8 steps, then 4 an epoch
    rescaler = EffectiveBatchRescaler("linear")
    rates = _fit(None, 8, accumulate, rescaler).rates
    assert rates == pytest.approx([0.1] * 16 + [0.2] * 8)
    (entry,) = rescaler.history
    assert (entry["step"], entry["old"], entry["new"]) == (16, 8, 16)
    assert rescaler.effective_batch == 16


def test_a_change_in_the_middle_of_a_warmup_keeps_the_samples() -> None:
    accumulate = GradientAccumulationScheduler({0: 1, 1: 2})  # after 8 of 16 warm-up steps
    make: Make = lambda o: LinearLR(o, 0.2, 1.0, 16)  # noqa: E731
    rates = _fit(make, 8, accumulate, EffectiveBatchRescaler("none"), steps=16).rates
    first = [0.1 * (0.2 + 0.8 * t / 16) for t in range(8)]
    second = [0.1 * min(1.0, 0.6 + 0.4 * t / 4) for t in range(8)]
    assert rates == pytest.approx(first + second)


def test_a_resumed_run_compares_with_its_checkpoint(tmp_path: Any) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    first = EffectiveBatchRescaler("linear", reference=4, warmup_steps=8)
    make: Make = lambda o: LambdaLR(o, _lambda)  # noqa: E731
    whole = _fit(make, 8, first, save).rates
    again = EffectiveBatchRescaler("linear", reference=4, warmup_steps=8)
    path = str(tmp_path / "step=6.ckpt")
    rates = _fit(make, 8, again, ckpt_path=path).rates
    assert rates == pytest.approx(whole[6:])
    assert len(again.history) == 1
    doubled = EffectiveBatchRescaler("linear", reference=999, warmup_steps=8)
    rates = _fit(make, 16, doubled, ckpt_path=path).rates
    assert [(e["old"], e["new"]) for e in doubled.history] == [(4, 8), (8, 16)]
    assert rates[0] == pytest.approx(2 * whole[6])


def test_what_cannot_be_rescaled_is_refused_before_training() -> None:
    class Own:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None: ...
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigError, match="Own cannot be rescaled"):
        _fit(Own, 8, EffectiveBatchRescaler())
    with pytest.raises(ConfigError, match="give one of 'linear', 'sqrt', 'none'"):
        EffectiveBatchRescaler("cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reference=0"):
        EffectiveBatchRescaler(reference=0)
    with pytest.raises(ConfigError, match="must be > 0"):
        lr_scale("linear", 0.0)


def test_time_goes_on_from_where_it_was() -> None:
    time = TimeMap(8, 100)
    time.change(2, 3.0)
    assert [time(t) for t in (0, 2, 3, 4, 100)] == [0, 2, 5, 8, 100]
    time.change(3, 1.0)
    assert [time(t) for t in (2, 3, 6, 100)] == [2, 5, 8, 100]
    endless = TimeMap(8, math.inf)
    endless.change(0, 2.0)
    assert [endless(t) for t in (4, 5, 50)] == [8, 9, 54]
