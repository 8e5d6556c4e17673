"""What the processes of a check are told to do. Their numbers stay in the first of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from lightning_pipe.checking import causes
from lightning_pipe.checking.numbers import Comparison, Numbers, compare
from lightning_pipe.checking.piecewise import Piecewise, Twice
from lightning_pipe.checking.subject import (
    SEED,
    Asked,
    Facts,
    Lay,
    one_device,
    over_stages,
    read,
)

#: what this process has found: what one device gives, and the last step over stages
_measures: dict[Any, Numbers] = {}
_staged: list[Numbers] = []


@dataclass(frozen=True, slots=True)
class Alone:
    """The step on one device.

    Attributes:
        loss: Of it.
        with_gradient: Parameters that have one, of how many that ask for one.
        not_finite: Parameters whose gradient is not a number.
        losses: Of the step taken twice from the same state.
    """

    loss: float
    with_gradient: tuple[int, int]
    not_finite: tuple[str, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A step over stages, compared.

    Attributes:
        comparison: With one device.
        in_sequence: Whether that took the micro-batches one by one.
    """

    comparison: Comparison
    in_sequence: bool


def facts_of(rank: int, asked: Asked) -> Facts:
    """Reads the config."""
    _measures.clear()
    return read(asked)


def alone(rank: int, asked: Asked, facts: Facts) -> Alone:
    """The step on one device, by itself."""
    twice = Twice()
    precision = facts.precision[0]
    found = one_device(asked, facts.batch, precision, piecewise=twice)
    _measures[0, precision] = found
    bad = [n for n, g in found.gradients.items() if not bool(g.isfinite().all())]
    some = sum(bool(g.any()) for g in found.gradients.values())
    counts = some, len(found.gradients)
    return Alone(found.loss, counts, tuple(bad), tuple(twice.losses))


def as_rank(rank: int, asked: Asked, facts: Facts) -> tuple[float, dict[str, float]]:
    """The step on one device that says it is this rank: its loss, and a number per gradient."""
    found = one_device(asked, facts.batch, facts.precision[0], rank=rank)
    sizes = {name: float(g.double().norm()) for name, g in found.gradients.items()}
    return found.loss, sizes


def staged(rank: int, asked: Asked, facts: Facts, lay: Lay, precision: str) -> bool:
    """The step over stages; the first process keeps what all of them have found.

    Returns:
        Whether anything drew random numbers.
    """
    found = over_stages(asked, facts, lay, precision)
    gathered: list[Any] = [None] * lay.processes
    if lay.processes > 1:
        own = found.gradients, found.drawing, found.draws, (found.loss, found.weight)
        dist.gather_object(own, gathered if rank == 0 else None)
    if rank == 0:
        others = list(filter(None, gathered))
        for gradients, drawing, draws, _ in others:
            found.gradients |= gradients
            found.drawing |= drawing
            found.draws |= draws
        if lay.copies > 1:  # each has the loss of its rows, on all of its ranks
            found.loss = _joined([loss for *_, loss in others], lay.num_ranks)
        _staged[:] = [found]
    return found.draws


def _joined(losses: Sequence[tuple[float, Any]], times: int) -> float:
    """The loss of all copies, of what each rank says: its loss and what that divides by."""
    if losses[0][1] == "sum":
        return sum(loss for loss, _ in losses) / times
    weights = [1.0 if weight is None else float(weight) for _, weight in losses]
    pairs = zip(losses, weights, strict=True)
    return sum(loss * weight for (loss, _), weight in pairs if weight) / sum(weights)


def judged(rank: int, asked: Asked, facts: Facts, lay: Lay, precision: str) -> Judged:
    """Compares the last step over stages with one device."""
    got, whole = _staged[0], _measure(asked, facts, 0, precision)
    deferred = facts.given.get("batchnorm") == "deferred" and facts.norms
    if deferred or lay.copies > 1:
        whole, got = replace(whole, buffers={}), replace(got, buffers={})
    found = compare(whole, got, logged=lay.copies == 1)
    rows_differ = got.draws or (facts.norms and lay.num_microbatches > 1)
    if found.is_close or not rows_differ:
        return Judged(found, in_sequence=False)
    pieces = _measure(asked, facts, lay.num_microbatches, precision, got.drawing)
    return Judged(compare(replace(pieces, buffers=_shared(pieces, got)), got), in_sequence=True)


def why(rank: int, asked: Asked, facts: Facts, lay: Lay, precision: str) -> str:
    """What it comes from that a step over stages is another one."""
    return causes.cause(asked, facts, lay.num_microbatches, precision)


def _shared(pieces: Numbers, got: Numbers) -> Any:
    """Buffers that a step writes once are not those of a step per micro-batch."""
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name: value if name.endswith(kinds) else got.buffers.get(name, value)
        for name, value in pieces.buffers.items()
    }


def _measure(
    asked: Asked, facts: Facts, count: int, precision: str, drawing: Any = None
) -> Numbers:
    """What one device gives; 0 for the whole batch at once."""
    key = (count, precision)
    if key not in _measures:
        rules = facts.given.get("split_batch") or {}
        way = Piecewise(count, rules, drawing=drawing, seed=SEED) if count else None
        _measures[key] = one_device(asked, facts.batch, precision, piecewise=way)
    found = _measures[key]
    assert not math.isinf(found.loss)
    return found
