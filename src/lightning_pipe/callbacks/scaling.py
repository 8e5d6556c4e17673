"""How learning rates follow the effective batch: the rules, and how optimizers and schedulers take
them.

A curve of learning rates is scaled as a whole: its peak, its floor and everything between. Warm-up
is kept constant in samples, so a batch that is k times larger warms up in 1/k of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from lightning_pipe.errors import ConfigError

Rule = Literal["linear", "sqrt", "none"]
RULES: tuple[Rule, ...] = get_args(Rule)

_GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
_SCHEDULER_KEYS = ("base_lrs", "max_lrs", "min_lrs", "eta_min", "_last_lr")


def lr_scale(rule: Rule, ratio: float) -> float:
    """What a learning rate is multiplied with when the effective batch grows by `ratio`.

    Args:
        rule: `"linear"` (Goyal et al., 2017, "Accurate, Large Minibatch SGD", for SGD), `"sqrt"`
            (Malladi et al., 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms",
            for Adam and its kind), or `"none"`.
        ratio: New over old effective batch.

    Raises:
        ConfigError: An unknown rule, or a ratio that is not positive.

    >>> lr_scale("linear", 4.0), lr_scale("sqrt", 4.0), lr_scale("none", 4.0)
    (4.0, 2.0, 1.0)
    """
    if rule not in RULES:
        raise ConfigError(f"rule={rule!r}: give one of {', '.join(map(repr, RULES))}")
    if not ratio > 0:
        raise ConfigError(f"the effective batch changes by a factor of {ratio}: it must be > 0")
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]


def scale_optimizer(optimizer: Optimizer, scale: float) -> None:
    """Multiplies every learning rate that the groups of an optimizer hold."""
    for group in optimizer.param_groups:
        for key in _GROUP_KEYS:
            value = group.get(key)
            if isinstance(value, torch.Tensor):
                value.mul_(scale)
            elif isinstance(value, (int, float)):
                group[key] = value * scale


def scale_adam(optimizer: Optimizer, ratio: float) -> None:
    """Moves Adam's betas and eps as its limit process asks: 1 - beta grows by `ratio`, eps shrinks
    by its root (Malladi et al., 2022, definition 2).

    Raises:
        ConfigError: A group has no betas, or the new ones would not be in [0, 1).
    """
    for group in optimizer.param_groups:
        if "betas" not in group:
            raise ConfigError(
                f"scale_betas=True: {type(optimizer).__name__} has no betas. Leave it out, or use "
                "an optimizer of Adam's kind"
            )
        betas = tuple(1 - ratio * (1 - beta) for beta in group["betas"])
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(
                f"scale_betas=True: a batch {ratio:g} times as large takes the betas "
                f"{group['betas']} to {betas}. Give scale_betas=False, or a smaller batch"
            )
        group["betas"] = betas
        group["eps"] = group["eps"] / math.sqrt(ratio)


def parts_of(scheduler: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of, the whole first.

    Raises:
        ConfigError: It does not hold its learning rates where they can be scaled.
    """
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if not plateau and not (isinstance(scheduler, LRScheduler) and _has_rates(scheduler)):
        raise ConfigError(
            f"the learning rates of {type(scheduler).__name__} cannot be rescaled: it has no "
            "`base_lrs`. Use a scheduler of torch.optim.lr_scheduler or a subclass of its "
            "LRScheduler, or rule='none'"
        )
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from parts_of(part)


def _has_rates(scheduler: Any) -> bool:
    return hasattr(scheduler, "base_lrs") or bool(getattr(scheduler, "_schedulers", ()))


def scale_scheduler(scheduler: Any, scale: float) -> None:
    """Multiplies every learning rate that a scheduler holds, and those of the ones in it."""
    for part in parts_of(scheduler):
        for key in _SCHEDULER_KEYS:
            value = getattr(part, key, None)
            if isinstance(value, list):
                setattr(part, key, [item * scale for item in value])
            elif isinstance(value, (int, float)):
                setattr(part, key, value * scale)


class TimeMap:
    """Which step of a curve, written for the reference batch, belongs to a step that is taken.

    Piecewise linear and continuous: during warm-up a step counts for as many as its batch has more
    samples; what follows is stretched, so that the end stays where it is.

    Args:
        warmup_steps: Length of the warm-up at the reference batch.
        total_steps: Where the curve ends; infinite if unknown.
        points: (step taken, step of the curve), from an earlier run.
    """

    def __init__(
        self, warmup_steps: int, total_steps: float, points: Sequence[tuple[float, float]] = ()
    ) -> None:
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.points: list[tuple[float, float]] = [(a, b) for a, b in points] or [(0.0, 0.0)]

    def __call__(self, step: float) -> float:
        """The step of the curve.

        >>> halved = TimeMap(10, 100)
        >>> halved.change(0, 2.0)  # twice the samples a step: warm-up takes 5
        >>> halved(5), halved(100)
        (10.0, 100.0)
        """
        before = max((p for p in self.points if p[0] <= step), default=self.points[0])
        after = min((p for p in self.points if p[0] > step), default=None)
        if after is None:
            return before[1] + (step - before[0])
        slope = (after[1] - before[1]) / (after[0] - before[0])
        return before[1] + (step - before[0]) * slope

    def change(self, step: float, ratio: float) -> None:
        """From `step` on, a step has `ratio` times the samples of the reference batch."""
        now = self(step)
        points = [point for point in self.points if point[0] < step] + [(float(step), now)]
        if now < self.warmup_steps:
            end = step + (self.warmup_steps - now) / ratio
            points.append((end, float(self.warmup_steps)))
        if math.isfinite(self.total_steps) and max(points[-1]) < self.total_steps:
            points.append((float(self.total_steps), float(self.total_steps)))
        self.points = points


def warp(scheduler: LambdaLR, time: TimeMap) -> None:
    """Lets the lambdas of a scheduler be asked about the steps of their own batch size."""

    def warped(function: Callable[[Any], float]) -> Callable[[Any], float]:
        def at(step: int) -> float:  # a function, which `LambdaLR.state_dict` leaves out
            return function(time(step))

        return at

    scheduler.lr_lambdas = [warped(function) for function in scheduler.lr_lambdas]


def shorten_warmup(scheduler: Any, ratio: float) -> list[str]:
    """Gives what is left of a warm-up `ratio` times fewer steps; returns what was done.

    Knows `LinearLR` that rises, alone or as a part of `SequentialLR` (whose milestones move along),
    and the rising phase of `OneCycleLR` before it has begun.
    """
    notes: list[str] = []
    for part in parts_of(scheduler):
        if isinstance(part, SequentialLR):
            notes += _shorten_sequence(part, ratio)
        elif isinstance(part, OneCycleLR):
            notes += _shorten_cycle(part, ratio)
    if isinstance(scheduler, LinearLR):
        notes += _shorten_linear(scheduler, ratio)
    return notes


def _shorten_linear(scheduler: LinearLR, ratio: float) -> list[str]:
    rises = scheduler.start_factor < scheduler.end_factor
    if not rises or scheduler.last_epoch >= scheduler.total_iters:
        return []
    before = scheduler.total_iters
    done = scheduler.last_epoch / scheduler.total_iters
    rise = scheduler.end_factor - scheduler.start_factor
    # What is left begins anew from the factor that has been reached.
    scheduler.start_factor += done * rise
    scheduler.total_iters = max(1, round((before - scheduler.last_epoch) / ratio))
    left = before - scheduler.last_epoch
    scheduler.last_epoch = 0
    return [f"warm-up: {left} steps left became {scheduler.total_iters}"]


def _shorten_sequence(scheduler: SequentialLR, ratio: float) -> list[str]:
    first = scheduler._schedulers[0]
    milestones: list[int] = scheduler._milestones
    if not isinstance(first, LinearLR) or scheduler.last_epoch >= milestones[0]:
        return []
    notes = _shorten_linear(first, ratio)
    if not notes:
        return []
    left = milestones[0] - scheduler.last_epoch
    moved = max(1, round(left / ratio))
    scheduler._milestones = [scheduler.last_epoch + moved, *milestones[1:]]
    return notes


def _shorten_cycle(scheduler: OneCycleLR, ratio: float) -> list[str]:
    phase = scheduler._schedule_phases[0]
    if scheduler.last_epoch > phase["end_step"]:
        return []
    if scheduler.last_epoch > 0:
        return ["the warm-up of OneCycleLR has begun and keeps its steps"]
    before = phase["end_step"] + 1
    after = min(max(2.0, before / ratio), scheduler._schedule_phases[-1]["end_step"])
    shift = after - before
    # the cosine form has two phases, the form with three falls symmetrically: its second moves too
    for index, other in enumerate(scheduler._schedule_phases[:-1]):
        other["end_step"] += shift * (index + 1)
    return [f"warm-up: {before:g} steps became {after:g}"]
