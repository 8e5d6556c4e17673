"""Does it fit? What every stage and every rank of a pipeline holds at its peak.

A rank holds, for each of its stages, weights, gradients and optimizer state; the activations of the
micro-batches that its schedule keeps in flight; and what is under way to and from its neighbours. A
part of the memory is left free as head-room: for the allocator's gaps, the kernels' workspaces and
the device's own context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.planning.limited import PartSize, smallest_peak
from lightning_pipe.planning.plan import format_bytes, format_count
from lightning_pipe.planning.profile import Again, Profile, ranges, runs_again

__all__ = [
    "HEADROOM",
    "Ledger",
    "StageLedger",
    "make_ledger",
    "most_held",
    "part_sizes",
    "smallest_pipeline",
    "stage_in_flight",
]

HEADROOM = 0.1
"""The share of a device's memory that a plan leaves free unless told otherwise."""


@dataclass(frozen=True, slots=True)
class StageLedger:
    """What one stage holds, in bytes.

    Args:
        stage: Index of the stage.
        rank: Position that holds it.
        parameters: Elements of its parameters.
        weight_bytes: Their bytes; ``gradient_bytes`` of their gradients, ``optimizer_bytes`` of
            the optimizer's state for them.
        activation_bytes: Kept of one micro-batch until its backward.
        in_flight: Micro-batches of which it keeps them at its peak.
        boundary_bytes: Of values and gradients on their way from and to the neighbours.
        working_bytes: Recomputed at a time with activation checkpointing.
    """

    stage: int
    rank: int
    parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    in_flight: int
    boundary_bytes: int
    working_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def bytes_per_parameter(self) -> float:
        """Of state; 12 to 16 is the rule of thumb for Adam."""
        return self.state_bytes / self.parameters if self.parameters else 0.0

    @property
    def total_bytes(self) -> int:
        """Everything, with all micro-batches in flight."""
        held_bytes = self.activation_bytes * self.in_flight
        return self.state_bytes + held_bytes + self.boundary_bytes + self.working_bytes


@dataclass(frozen=True, slots=True)
class Ledger:
    """What all ranks hold.

    Args:
        stages: One entry per stage.
        rank_peak_bytes: What each rank holds at its peak, over all its stages.
        cap_bytes: Memory of a device; None if nobody said.
        headroom_fraction: Share of it that stays free.
        checkpointing: Whether units keep their inputs only and are run again for the backward; some
            do if it is a set.
    """

    stages: tuple[StageLedger, ...]
    rank_peak_bytes: tuple[int, ...]
    cap_bytes: int | None = None
    headroom_fraction: float = HEADROOM
    checkpointing: Again = False

    @property
    def usable_bytes(self) -> float:
        """What may be used of a device."""
        if self.cap_bytes is None:
            return math.inf
        return self.cap_bytes * (1 - self.headroom_fraction)

    @property
    def fullest(self) -> int:
        """The rank that holds most."""
        return max(range(len(self.rank_peak_bytes)), key=self.rank_peak_bytes.__getitem__)

    @property
    def excess_bytes(self) -> int:
        """By how much the fullest rank is over what may be used; 0 if all fits."""
        over = self.rank_peak_bytes[self.fullest] - self.usable_bytes
        return math.ceil(over) if over > 0 else 0

    @property
    def fits(self) -> bool:
        """Whether every rank fits."""
        return self.excess_bytes == 0

    def table_rows(self) -> list[list[str]]:
        """The ledger as text: a header row, then one row per stage."""
        rows = [["stage", "rank", "parameters", "weights", "gradients", "optimizer", "B/param"]]
        rows[0] += ["activations", "in flight", "boundary", "peak of rank"]
        if self.checkpointing:
            rows[0].insert(9, "recomputed")
        for stage in self.stages:
            row = [
                str(stage.stage),
                str(stage.rank),
                format_count(stage.parameters),
                format_bytes(stage.weight_bytes),
                format_bytes(stage.gradient_bytes),
                format_bytes(stage.optimizer_bytes),
                f"{stage.bytes_per_parameter:.1f}",
                format_bytes(stage.activation_bytes),
                f"x {stage.in_flight}",
                format_bytes(stage.boundary_bytes),
                format_bytes(self.rank_peak_bytes[stage.rank]),
            ]
            if self.checkpointing:
                row.insert(9, format_bytes(stage.working_bytes))
            rows.append(row)
        return rows

    def verdict(self) -> str:
        """One line: whether it fits, and what the fullest rank has left or lacks."""
        peak_bytes = self.rank_peak_bytes[self.fullest]
        text = f"the fullest rank is {self.fullest} with {format_bytes(peak_bytes)}"
        if self.cap_bytes is None:
            return text
        share = f"{format_bytes(self.cap_bytes)} less {self.headroom_fraction:.0%} head-room"
        if self.fits:
            return f"{text}: fits in {share}"
        return f"{text}: does not fit in {share}, by {format_bytes(self.excess_bytes)}"


def make_ledger(
    profile: Profile,
    starts: Sequence[int],
    schedule: Schedule,
    *,
    cap_bytes: int | None = None,
    headroom_fraction: float = HEADROOM,
    checkpointing: Again = False,
) -> Ledger:
    """Adds up what a cut makes every stage and rank hold.

    Args:
        profile: The model, for the rows of one micro-batch.
        starts: First call of each stage.
        schedule: What is run; it decides how many micro-batches are in flight.
        cap_bytes: Memory of a device.
        headroom_fraction: Share of it that stays free.
        checkpointing: Keep only the inputs of these units, and run them again.
    """
    flights = stage_in_flight(schedule)
    rank_of = schedule.stage_to_rank
    stages = []
    for stage, (start, end) in enumerate(ranges(starts, len(profile.units))):
        weights = [profile.weights[name] for name in profile.stage_weights(start, end)]
        again = [i for i in range(start, end) if runs_again(checkpointing, i)]
        stages.append(
            StageLedger(
                stage=stage,
                rank=rank_of[stage],
                parameters=sum(weight.elements for weight in weights),
                weight_bytes=sum(weight.weight_bytes for weight in weights),
                gradient_bytes=sum(weight.gradient_bytes for weight in weights),
                optimizer_bytes=sum(weight.optimizer_bytes for weight in weights),
                activation_bytes=profile.held_bytes(start, end, checkpointing=checkpointing),
                in_flight=flights[stage],
                boundary_bytes=_boundary_bytes(profile, start, end, flights[stage]),
                working_bytes=max((profile.units[i].saved_bytes for i in again), default=0),
            )
        )
    return Ledger(
        tuple(stages), _peaks(stages, schedule), cap_bytes, headroom_fraction, checkpointing
    )


def _boundary_bytes(profile: Profile, start: int, end: int, in_flight: int) -> int:
    """Outputs are kept until their gradients come; beside them one message each way is under
    way."""
    num_bytes = 0
    if start:
        before = profile.units[start - 1]
        num_bytes += before.output_bytes + before.gradient_bytes
    if end < len(profile.units):
        last = profile.units[end - 1]
        num_bytes += in_flight * last.output_bytes + last.gradient_bytes
    return num_bytes


def _peaks(stages: Sequence[StageLedger], schedule: Schedule) -> tuple[int, ...]:
    """The most that each rank holds at a time: its stages peak at different moments."""
    peaks = []
    for rank in range(schedule.num_ranks):
        own = [stage for stage in stages if stage.rank == rank]
        base_bytes = sum(stage.state_bytes + stage.boundary_bytes for stage in own)
        base_bytes += max((stage.working_bytes for stage in own), default=0)
        held_bytes = peak_bytes = 0
        for action in schedule.actions(rank) if schedule.has_backward else ():
            if action.op is Op.FORWARD:
                held_bytes += stages[action.stage].activation_bytes
                peak_bytes = max(peak_bytes, held_bytes)
            elif action.op is not Op.INPUT:
                held_bytes -= stages[action.stage].activation_bytes
        peaks.append(base_bytes + peak_bytes)
    return tuple(peaks)


def stage_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches of which each stage holds activations.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> stage_in_flight(make_schedule("1f1b", num_ranks=4, num_microbatches=8))
    (4, 3, 2, 1)
    """
    held, peaks = [0] * schedule.num_stages, [0] * schedule.num_stages
    if not schedule.has_backward:
        return tuple(peaks)
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            if action.op is Op.FORWARD:
                held[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
            elif action.op is not Op.INPUT:
                held[action.stage] -= 1
    return tuple(peaks)


def most_held(schedule: Schedule, kept: Mapping[tuple[int, int], int]) -> tuple[int, ...]:
    """The most bytes that each stage holds at a time.

    Args:
        schedule: What is run.
        kept: What each (stage, micro-batch) keeps from its forward to its backward; 0 if unknown.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> most_held(make_schedule("gpipe", num_ranks=1, num_microbatches=2), {(0, 0): 3, (0, 1): 4})
    (7,)
    """
    held, peaks = [0] * schedule.num_stages, [0] * schedule.num_stages
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            stage, num_bytes = action.stage, kept.get((action.stage, action.microbatch), 0)
            if action.op is Op.FORWARD:
                held[stage] += num_bytes
                peaks[stage] = max(peaks[stage], held[stage])
            elif action.op is not Op.INPUT:
                held[stage] -= num_bytes
    return tuple(peaks)


def smallest_pipeline(
    profile: Profile,
    cap_bytes: int,
    *,
    headroom_fraction: float = HEADROOM,
    checkpointing: bool = False,
    most: int | None = None,
) -> int | None:
    """The smallest number of ranks whose fullest one fits, with 1F1B and enough micro-batches.

    For equal layers this is ceil(layers / layers that fit on one card), as long as the memory is
    that of the weights; activations in flight are counted too.

    Args:
        profile: The model, for the rows of one micro-batch.
        cap_bytes: Memory of a device.
        headroom_fraction: Share of it that stays free.
        checkpointing: Keep only the inputs of units.
        most: The most ranks to try; as many as there are units if None.

    Returns:
        None if no number of ranks helps.
    """
    usable_bytes = cap_bytes * (1 - headroom_fraction)
    highest = min(len(profile.units), most or len(profile.units))
    lower = max(1, math.ceil(profile.state_bytes / max(usable_bytes, 1)))
    for num_ranks in range(lower, highest + 1):
        flights = [num_ranks - rank for rank in range(num_ranks)]
        size = part_sizes(profile, flights, checkpointing=checkpointing)
        starts = smallest_peak(len(profile.units), num_ranks, size)
        parts = enumerate(ranges(starts, len(profile.units)))
        if max(size(part, start, end) for part, (start, end) in parts) <= usable_bytes:
            return num_ranks
    return None


def part_sizes(profile: Profile, flights: Sequence[int], *, checkpointing: Again) -> PartSize:
    """All that a stage holds at its peak, by its index and its calls.

    Args:
        profile: The model.
        flights: Micro-batches in flight on each stage.
        checkpointing: Keep only the inputs of units.
    """
    intervals = profile.intervals(checkpointing)
    units = profile.units
    outputs = [unit.output_bytes for unit in units[:-1]] + [0]
    arrives = [0, *(unit.output_bytes + unit.gradient_bytes for unit in units[:-1])]
    returns = [unit.gradient_bytes for unit in units[:-1]] + [0]

    def size(part: int, start: int, end: int) -> float:
        state, held, working = intervals.bytes_of(start, end)
        kept = (held + outputs[end - 1]) * flights[part]
        return state + kept + working + arrives[start] + returns[end - 1]

    return size
