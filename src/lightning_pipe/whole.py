"""The tail of a step on the whole batch: the answer to what micro-batches should add up to.

What a step leaves behind is merged from its micro-batches, which is exact for means and sums over
rows, lists, counters and metrics. For the first batches of each step the last stage also runs its
tail once, without gradients, on the outputs of all micro-batches put together, as one device would,
and compares. Where they agree nothing more is done; where they do not (a maximum, a standard
deviation, a queue that is written at an index) every later step takes what the tail leaves on the
whole batch.

The gradients of a loss cannot be had that way. A loss that is no mean over rows is said to be one,
and the loss that a training step shows is always the one whose gradients were taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.home import CutStep
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.microbatch import merge_tensors
from lightning_pipe.split.nest import copy_tensors
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.rng import mix
from lightning_pipe.split.trace import Trace, ValueKey
from lightning_pipe.tail import Tail
from lightning_pipe.tail.denominators import Denominators
from lightning_pipe.tail.kinds import kinds_of
from lightning_pipe.tail.losses import need_loss
from lightning_pipe.tail.notes import Notes
from lightning_pipe.work import StepRun

_CHECKS = 2
_MOST_KEPT = 64
_MOST_BYTES = 1 << 28  # of the outputs of a whole batch, to be kept for a comparison


class _Unknown(Exception):
    """The tail cannot be run on the whole batch."""


@dataclass(slots=True)
class _Known:
    """What is known of one step by its name.

    Attributes:
        checks: Comparisons still to make.
        replays: Whether later steps take what the tail leaves on the whole batch.
        is_off: Whether the tail cannot be run on the whole batch.
        warned: Whether it was said that the loss is no mean over rows.
        programs: It, by the structure of the batch.
    """

    checks: int = _CHECKS
    replays: bool = False
    is_off: bool = False
    warned: bool = False
    programs: dict[Any, tuple[StageProgram, Trace]] = field(default_factory=dict)


class WholeTail:
    """Compares the tail of micro-batches with that of the batch; on the rank of the last stage.

    Args:
        module: The user's module.
        tail: Where the micro-batches are noted.
        trace: Traces a step on a batch: takes its name, the batch, the rest of its arguments and
            whether it trains.
        device_type: Device whose random generator is keyed beside the CPU's.
    """

    def __init__(
        self, module: nn.Module, tail: Tail, trace: Callable[..., Trace], device_type: str
    ) -> None:
        self._module = module
        self._tail = tail
        self._trace = trace
        self._device_type = device_type
        self._steps: dict[str, _Known] = {}
        self._boundaries: dict[Any, tuple[CutStep, tuple[ValueKey, ...] | None]] = {}

    def watched(self, step: StepRun) -> StepRun:
        """The step, with what is to be kept of each micro-batch or what watches its losses."""
        rows = step.pieces.rows
        record = self._recorded(step.name, step.cuts, rows)
        watch = None if record is not None or not step.training else self._watch(step.name, rows)
        return replace(step, record=record, recorded=[], denominators=watch)

    def _known(self, name: str) -> _Known:
        """What is known of a step; a running extreme may begin to differ at any time."""
        if name not in self._steps:
            self._steps[name] = _Known(replays=bool(kinds_of(type(self._module)).rereads))
        return self._steps[name]

    def _recorded(
        self, name: str, cuts: Sequence[CutStep], rows: Sequence[int]
    ) -> tuple[ValueKey, ...] | None:
        """Which values of each micro-batch are to be kept; None if there is nothing to do."""
        known = self._known(name)
        if known.is_off or len(rows) == 1 or not (known.checks or known.replays):
            return None
        if any(cut.cut.trace.random_glue or cut.cut.trace.draws for cut in cuts):
            return None  # it would draw other numbers
        keys = {self._boundary(cut, size) for cut, size in zip(cuts, rows, strict=True)}
        boundary = next(iter(keys))
        if len(keys) != 1 or boundary is None:
            return None
        size = sum(cut.cut.trace.meta(key).wire_bytes for cut in cuts for key in boundary)
        return None if size > _MOST_BYTES and not known.replays else boundary

    def _watch(self, name: str, rows: Sequence[int]) -> Denominators | None:
        """What to watch losses with where the tail cannot be run on the whole batch."""
        known = self._known(name)
        if len(rows) == 1 or not known.checks or known.warned:
            return None
        known.checks -= 1
        return Denominators()

    def _judge(self, name: str, seen: Denominators, rows: Sequence[int]) -> None:
        """Says it if the losses that were watched divide by something else than rows."""
        if not self._tail.is_weighted and seen.differ(rows):
            self._steps[name].warned = True
            _warn_of_loss(name)

    def finish(self, step: StepRun, batch: Any, structure: Any) -> None:
        """Runs the tail on the whole batch, compares or takes over; after the micro-batches.

        Nothing is done where `watched` was not asked.

        Args:
            step: The step, with what was recorded.
            batch: The whole batch.
            structure: Equal for batches that may share a trace.
        """
        if step.denominators is not None:
            self._judge(step.name, step.denominators, step.pieces.rows)
        if step.record is None:
            return
        known = self._steps[step.name]
        try:
            whole = self._run(step, batch, structure, known)
        except Exception as error:  # what is merged from micro-batches stands
            known.is_off = True
            _warn_of_tail(step.name, error, needed=known.replays)
            return
        if known.checks:
            known.checks -= 1
            found = self._tail.differences(whole)
            # the value of a metric for one batch may be the mean of its micro-batches by chance
            known.replays |= bool(found) or self._tail.asks_metrics
        if step.training and not known.warned and self._tail.loss_differs(whole):
            known.warned = True
            _warn_of_loss(step.name)
        if known.replays:
            self._tail.use(whole, training=step.training)

    def _boundary(self, cut: CutStep, rows: int) -> tuple[ValueKey, ...] | None:
        """What the tail is made of; None if no values with rows are all of it."""
        key = (id(cut), rows)
        known = self._boundaries.get(key)
        if known is None or known[0] is not cut:  # cuts come and go, and so do their ids
            try:
                known = cut, cut.cut.tail_boundary(rows)
            except CutError:
                known = cut, None
            _keep(self._boundaries, key, known)
        return known[1]

    def _run(self, step: StepRun, batch: Any, structure: Any, known: _Known) -> Notes:
        if structure not in known.programs:
            trace = self._trace(step.name, batch, step.rest, training=step.training)
            made = self._program(trace, step.record or ()), trace
            _keep(known.programs, structure, made)
        program, trace = known.programs[structure]
        values = self._joined(step, trace)
        call = partial(getattr(self._module, step.name), copy_tensors(batch), *step.rest)

        def run() -> Any:
            with torch.no_grad(), step.context(step.name):
                result = program.run(call, values, key=mix(step.key, 0))
            assert isinstance(result, StepResult)
            if step.training:
                need_loss(result.value)
            return result.value

        return self._tail.whole(run)

    def _program(self, trace: Trace, boundary: Sequence[ValueKey]) -> StageProgram:
        """A last stage without units, after one that has them all."""
        cut = StepCut(trace, (0,) * len(trace.calls), num_stages=2)
        cut.crossing = (tuple(boundary),)
        return StageProgram(cut, 1, self._module, device_type=self._device_type)

    def _joined(self, step: StepRun, trace: Trace) -> tuple[Tensor, ...]:
        joined = []
        for key, column in zip(step.record or (), zip(*step.recorded, strict=True), strict=True):
            pieces = [value for value in column if value is not None]
            if len(pieces) != len(column):
                raise _Unknown
            value = merge_tensors(pieces, step.pieces.rows)
            if tuple(value.shape) != trace.meta(key).shape:
                raise _Unknown
            joined.append(value)
        return tuple(joined)


def _warn_of_loss(name: str) -> None:
    warnings.warn(
        f"the loss that {name} returns for the whole batch is not the mean of those of its "
        "micro-batches, weighted by rows, so its gradients are not those of one device; that mean, "
        "whose gradients are taken, is what is shown. If it divides by something else than rows "
        "(valid tokens, class weights, a mask), return "
        '{"loss": loss, "loss_weight": n} with the number it divides by; if it is a sum, '
        '{"loss": loss, "loss_weight": "sum"}. If it compares rows with each other, decides by '
        "values (`if loss > 10`) or reads what the step has written, use num_microbatches=1",
        stacklevel=2,
    )


def _warn_of_tail(name: str, error: Exception, *, needed: bool) -> None:
    reason = str(error) or "values of its micro-batches cannot be put together"
    known = "which it is known to leave" if needed else "if it leaves any"
    warnings.warn(
        f"the end of {name} cannot be run on the whole batch ({type(error).__name__}: {reason}), "
        "so what it leaves is put together from micro-batches, which is exact for means and sums "
        "over rows, lists and metrics. Values that are none of these (a maximum, a queue written "
        f"at an index), {known}, are averages from here on: use num_microbatches=1 for them",
        stacklevel=2,
    )


def _keep(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Remember a value, and forget the oldest: batches may come in any number of shapes."""
    table[key] = value
    if len(table) > _MOST_KEPT:
        table.pop(next(iter(table)))
