"""A model as the planner sees it: its unit calls with their work, their bytes and their weights.

Made by ``lightning_pipe.split.profile`` from a trace; all numbers are those of one micro-batch of
``rows`` rows. What two calls share is listed by name or number, so that a stage that holds both
counts it once: tied weights, and tensors that neighbours both keep for their backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import CostTable, LinkCosts, StageCosts, UnitCosts

__all__ = ["Again", "Profile", "UnitProfile", "Weight", "all_reduce_s", "tensor_parallel"]

Saved = tuple[tuple[int, int], ...]
"""What is kept for a backward: (number of the storage, bytes)."""

Again = bool | AbstractSet[int]
"""Which calls keep their inputs only and run again for the backward: all, none, or by number."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter tensor and what training adds to it.

    Args:
        elements: Numbers in it.
        weight_bytes: Bytes of the tensor itself, and of a master copy if there is one.
        gradient_bytes: Bytes of its gradient; 0 if it is frozen.
        optimizer_bytes: Bytes that the optimizer keeps for it.
    """

    elements: int
    weight_bytes: int
    gradient_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """One unit call and one micro-batch.

    Args:
        unit: Dotted name of the module.
        flops: Of one forward.
        weights: Names of the parameters that it reads.
        saved: What it keeps for its backward.
        glue_saved: What the code between it and the next call, or the end, keeps.
        sends_glue: Whether a cut after this call sends what that code made, and not what went in.
        can_cut_after: Whether a stage may end with this call.
        input_bytes: Bytes of its arguments, which is what remains with checkpointing.
        output_bytes: Bytes that cross to the next stage if the model is cut after this call.
        gradient_bytes: Bytes that come back for them.
        forward_s: Seconds of F; ``input_s`` of I, ``weight_s`` of W.
    """

    unit: str
    flops: int = 0
    weights: tuple[str, ...] = ()
    saved: Saved = ()
    glue_saved: Saved = ()
    sends_glue: bool = False
    can_cut_after: bool = True
    input_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0
    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.input_s + self.weight_s

    @property
    def saved_bytes(self) -> int:
        """Bytes that it keeps for its backward."""
        return sum(num_bytes for _, num_bytes in self.saved)


@dataclass(frozen=True)
class Profile:
    """All unit calls of a step, in order.

    Args:
        units: The calls.
        weights: Every parameter by its first name.
        rows: Rows of the micro-batch that the numbers are for.
        overhead_s: Seconds of one action that are the engine's.
        forward_overhead_s: Seconds of a stage's forward that are not its units'.
        measured_on: The device whose clock the seconds are from; empty if they are from FLOPs.
        flops_per_s: What the seconds are from otherwise; 1 where they stand for FLOPs only.
        notes: What is uncertain, a sentence each.
    """

    units: tuple[UnitProfile, ...]
    weights: Mapping[str, Weight]
    rows: int = 1
    overhead_s: float = 0.0
    forward_overhead_s: float = 0.0
    measured_on: str = ""
    flops_per_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, each once."""
        return sum(weight.elements for weight in self.weights.values())

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state of the whole model."""
        return sum(weight.state_bytes for weight in self.weights.values())

    @property
    def basis(self) -> str:
        """Where the seconds are from, in words."""
        if self.measured_on:
            return f"from times measured on {self.measured_on}"
        if self.flops_per_s > 1:
            return f"guessed from FLOPs at {self.flops_per_s:.3g} per second; --measure tells"
        return "from FLOPs, so without seconds and without communication"

    @property
    def has_times(self) -> bool:
        """Whether seconds are known, measured or from FLOPs."""
        return any(unit.total_s for unit in self.units)

    def with_costs(self, table: CostTable) -> Profile:
        """The same calls with measured seconds; of a unit that was measured in pieces, their sum.

        Raises:
            PlanError: The table is of other calls.
        """
        costs = _matched([unit.unit for unit in self.units], table.units)
        scale = self.rows / table.rows if table.rows else 1.0
        units = tuple(
            replace(
                unit,
                forward_s=cost.forward_s * scale,
                input_s=cost.input_s * scale,
                weight_s=cost.weight_s * scale,
            )
            for unit, cost in zip(self.units, costs, strict=True)
        )
        device = table.device or "a device"
        return replace(
            self,
            units=units,
            overhead_s=table.overhead_s,
            forward_overhead_s=table.forward_overhead_s,
            measured_on=device,
        )

    def with_flops_per_s(self, flops_per_s: float) -> Profile:
        """The same calls with seconds from their FLOPs: I and W take as long as F."""
        units = tuple(
            replace(
                unit,
                forward_s=unit.flops / flops_per_s,
                input_s=unit.flops / flops_per_s,
                weight_s=unit.flops / flops_per_s if unit.weights else 0.0,
            )
            for unit in self.units
        )
        return replace(self, units=units, measured_on="", flops_per_s=flops_per_s)

    def for_rows(self, rows: int) -> Profile:
        """The numbers of a micro-batch of another size: all but the weights grow with it."""
        if rows == self.rows:
            return self
        if rows not in self._pieces:
            self._pieces[rows] = self._scaled(rows)
        return self._pieces[rows]

    @cached_property
    def _pieces(self) -> dict[int, Profile]:
        return {}

    def _scaled(self, rows: int) -> Profile:
        scale = rows / self.rows
        units = tuple(
            replace(
                unit,
                flops=math.ceil(unit.flops * scale),
                saved=_scaled(unit.saved, scale),
                glue_saved=_scaled(unit.glue_saved, scale),
                input_bytes=math.ceil(unit.input_bytes * scale),
                output_bytes=math.ceil(unit.output_bytes * scale),
                gradient_bytes=math.ceil(unit.gradient_bytes * scale),
                forward_s=unit.forward_s * scale,
                input_s=unit.input_s * scale,
                weight_s=unit.weight_s * scale,
            )
            for unit in self.units
        )
        return replace(self, units=units, rows=rows)

    def stage_weights(self, start: int, end: int) -> frozenset[str]:
        """Names of the parameters of the calls ``start .. end - 1``; the last stage holds those
        that no call reads."""
        names = frozenset(name for unit in self.units[start:end] for name in unit.weights)
        if end == len(self.units):
            read = {name for unit in self.units for name in unit.weights}
            names |= frozenset(self.weights) - read
        return names

    def stage_costs(
        self, starts: Sequence[int], *, checkpointing: Again = False
    ) -> tuple[StageCosts, ...]:
        """Sums calls to stages; with checkpointing a backward runs the forward again."""
        ends = [*starts[1:], len(self.units)]
        return tuple(
            self._stage_cost(start, end, checkpointing)
            for start, end in zip(starts, ends, strict=True)
        )

    def _stage_cost(self, start: int, end: int, checkpointing: Again) -> StageCosts:
        units = self.units[start:end]
        forward_s = sum(unit.forward_s for unit in units)
        again = [i for i in range(start, end) if runs_again(checkpointing, i)]
        weight_s = sum(unit.weight_s for unit in units)
        is_last = end == len(self.units)
        return StageCosts(
            forward_s=forward_s + self.overhead_s + self.forward_overhead_s,
            input_s=sum(unit.input_s for unit in units)
            + self.overhead_s
            + sum(self.units[i].forward_s for i in again)
            + (weight_s if again else 0.0),  # such a backward is not taken apart
            weight_s=0.0 if again else weight_s,
            activation_bytes=self.held_bytes(start, end, checkpointing=checkpointing),
            boundary_bytes=0 if is_last else units[-1].output_bytes,
            gradient_bytes=0 if is_last else units[-1].gradient_bytes,
        )

    def intervals(self, checkpointing: Again) -> Intervals:
        """Bytes of every run of calls; those that are asked for again and again are kept."""
        if not isinstance(checkpointing, bool):
            return Intervals(self, checkpointing=checkpointing)
        if checkpointing not in self._intervals:
            self._intervals[checkpointing] = Intervals(self, checkpointing=checkpointing)
        return self._intervals[checkpointing]

    @cached_property
    def _intervals(self) -> dict[bool, Intervals]:
        return {}

    def held_bytes(self, start: int, end: int, *, checkpointing: Again = False) -> int:
        """Bytes that calls ``start .. end - 1`` keep of one micro-batch until its backward."""
        held_bytes, stored = 0, set[int]()
        for index in range(start, end):
            held_bytes += self.new_bytes(index, start, stored, checkpointing)
        return held_bytes + self.end_bytes(end, stored)

    def new_bytes(self, index: int, start: int, stored: set[int], checkpointing: Again) -> int:
        """Bytes that a call adds to those of the calls before it, from ``start`` on."""
        unit = self.units[index]
        held_bytes = 0
        if index and (index > start or not self.units[index - 1].sends_glue):
            held_bytes += _new_bytes(self.units[index - 1].glue_saved, stored)
        if runs_again(checkpointing, index):
            return held_bytes + unit.input_bytes
        return held_bytes + _new_bytes(unit.saved, stored)

    def end_bytes(self, end: int, stored: set[int]) -> int:
        """Bytes of the code after the last call, where it belongs to the same stage."""
        last = self.units[end - 1]
        if end < len(self.units) and not last.sends_glue:
            return 0
        return sum(num_bytes for number, num_bytes in last.glue_saved if number not in stored)


def runs_again(checkpointing: Again, index: int) -> bool:
    """Whether a call keeps its inputs only."""
    return checkpointing if isinstance(checkpointing, bool) else index in checkpointing


def _matched(names: Sequence[str], measured: Sequence[UnitCosts]) -> list[UnitCosts]:
    """The measured costs of each call; consecutive calls inside of a unit are added up."""
    rest = list(reversed(measured))
    found = []
    for index, name in enumerate(names):
        pieces = []
        if rest and rest[-1].unit == name:
            pieces.append(rest.pop())
        else:
            while rest and rest[-1].unit.startswith(f"{name}."):
                pieces.append(rest.pop())
        if not pieces:
            there = repr(rest[-1].unit) if rest else "nothing more"
            raise PlanError(
                f"the costs are of another model: call {index} is {name!r} here and {there} there; "
                "measure this one again (--measure)"
            )
        found.append(
            UnitCosts(
                name,
                sum(piece.forward_s for piece in pieces),
                sum(piece.input_s for piece in pieces),
                sum(piece.weight_s for piece in pieces),
            )
        )
    if rest:
        raise PlanError(
            f"the costs are of another model: {rest[-1].unit!r} is not called here; measure this "
            "one again (--measure)"
        )
    return found


class Intervals:
    """Bytes of every run of calls, computed as it is asked for; each row in one pass."""

    def __init__(self, profile: Profile, *, checkpointing: Again) -> None:
        self._profile = profile
        self._checkpointing = checkpointing
        self._rows: dict[int, list[tuple[int, int, int]]] = {}
        read = {name for unit in profile.units for name in unit.weights}
        unread = [w.state_bytes for name, w in profile.weights.items() if name not in read]
        self._unread_bytes = sum(unread)

    def bytes_of(self, start: int, end: int) -> tuple[int, int, int]:
        """Of calls ``start .. end - 1``: state, held per micro-batch, and once while one runs."""
        if start not in self._rows:
            self._rows[start] = self._row(start)
        return self._rows[start][end - start - 1]

    def _row(self, start: int) -> list[tuple[int, int, int]]:
        profile, seen, stored = self._profile, set[str](), set[int]()
        state_bytes = held_bytes = working_bytes = 0
        row = []
        for index in range(start, len(profile.units)):
            unit = profile.units[index]
            for name in unit.weights:
                if name not in seen:
                    seen.add(name)
                    state_bytes += profile.weights[name].state_bytes
            held_bytes += profile.new_bytes(index, start, stored, self._checkpointing)
            if runs_again(self._checkpointing, index):
                working_bytes = max(working_bytes, unit.saved_bytes)
            end_bytes = profile.end_bytes(index + 1, stored)
            row.append((state_bytes, held_bytes + end_bytes, working_bytes))
        state_bytes, held_bytes, working_bytes = row[-1]
        row[-1] = (state_bytes + self._unread_bytes, held_bytes, working_bytes)
        return row


def _new_bytes(saved: Saved, stored: set[int]) -> int:
    num_bytes = 0
    for number, size in saved:
        if number not in stored:
            stored.add(number)
            num_bytes += size
    return num_bytes


def _scaled(saved: Saved, scale: float) -> Saved:
    return tuple((number, math.ceil(num_bytes * scale)) for number, num_bytes in saved)


def all_reduce_s(num_bytes: int, size: int, link: LinkCosts) -> float:
    """Seconds of a ring all-reduce over ``size`` ranks.

    >>> all_reduce_s(1000, 2, LinkCosts(0.0, 1000.0))
    1.0
    """
    if size <= 1:
        return 0.0
    hops = 2 * (size - 1)
    return hops * (link.latency_s + num_bytes / size / link.bytes_per_s)


def tensor_parallel(profile: Profile, size: int, link: LinkCosts) -> Profile:
    """The model with every unit spread over ``size`` ranks, as Megatron does it.

    Work, weights and activations of a unit are divided; its output is summed over the ranks twice
    per forward and twice per backward (after attention and after the MLP).
    """
    if size == 1:
        return profile
    units = tuple(
        replace(
            unit,
            flops=math.ceil(unit.flops / size),
            saved=_scaled(unit.saved, 1 / size),
            forward_s=unit.forward_s / size + 2 * all_reduce_s(unit.output_bytes, size, link),
            input_s=unit.input_s / size + 2 * all_reduce_s(unit.output_bytes, size, link),
            weight_s=unit.weight_s / size,
        )
        for unit in profile.units
    )
    weights = {
        name: Weight(*(math.ceil(n / size) for n in _numbers(weight)))
        for name, weight in profile.weights.items()
    }
    return replace(profile, units=units, weights=weights)


def _numbers(weight: Weight) -> tuple[int, int, int, int]:
    return weight.elements, weight.weight_bytes, weight.gradient_bytes, weight.optimizer_bytes


def prefix_sums(values: Sequence[float]) -> list[float]:
    """Sums of the first 0, 1, 2, ... values."""
    return [0.0, *accumulate(values)]


def ranges(starts: Sequence[int], num_units: int) -> list[tuple[int, int]]:
    """(start, end) of each part.

    >>> ranges((0, 2), 5)
    [(0, 2), (2, 5)]
    """
    return list(pairwise([*starts, num_units]))
