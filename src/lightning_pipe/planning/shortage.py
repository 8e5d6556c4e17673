"""Out of memory: what the stage holds, and what each of the three usual causes would give back.

In the order in which a practitioner looks: the schedule keeps too many micro-batches in flight; the
stage has an embedding or a head beside too many blocks; what one micro-batch keeps is too large.
Each is judged by a ledger with that one thing changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_pipe.errors import PlanError, ScheduleError
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.memory import Ledger, StageLedger, make_ledger
from lightning_pipe.planning.plan import format_bytes
from lightning_pipe.planning.profile import Again, Profile, ranges
from lightning_pipe.planning.request import Request, starts_for
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule

__all__ = ["Remedy", "describe_stage", "explain_shortage", "remedies"]

_WORTH = 0.05  # of a rank's peak: what saves less is not the cause


@dataclass(frozen=True, slots=True)
class Remedy:
    """One usual cause, judged.

    Attributes:
        cause: What it is about.
        saved_bytes: What the rank would hold less at its peak; 0 if that is not the cause.
        text: What was found and, where something is saved, what to type.
    """

    cause: Literal["in flight", "uneven", "activations"]
    saved_bytes: int
    text: str


def remedies(
    profile: Profile,
    starts: Sequence[int],
    schedule: Schedule,
    rank: int,
    *,
    checkpointing: Again = False,
) -> tuple[Remedy, ...]:
    """Judges the three usual causes, in their order.

    Args:
        profile: The model, for the rows of one micro-batch.
        starts: First call of each stage.
        schedule: What was run.
        rank: The position that has too little memory.
        checkpointing: The calls that run again for their backward already.
    """
    case = _Case(profile, tuple(starts), schedule, rank, checkpointing)
    return _fewer_in_flight(case), _another_cut(case), _smaller_activations(case)


@dataclass(frozen=True, slots=True)
class _Case:
    """A rank that has too little memory, as it was run."""

    profile: Profile
    starts: tuple[int, ...]
    schedule: Schedule
    rank: int
    again: Again

    def ledger(self, **changes: Any) -> Ledger:
        """The ledger, with one thing changed."""
        case = replace(self, **changes)
        return make_ledger(case.profile, case.starts, case.schedule, checkpointing=case.again)

    def peak_bytes(self, **changes: Any) -> int:
        """What the rank holds at its peak, with one thing changed."""
        return self.ledger(**changes).rank_peak_bytes[self.rank]


def explain_shortage(
    profile: Profile,
    starts: Sequence[int],
    schedule: Schedule,
    rank: int,
    *,
    stage: int | None = None,
    device_bytes: int | None = None,
    checkpointing: Again = False,
) -> str:
    """The ledger of a stage that ran out of memory, the causes in order, and what to do first.

    Args:
        profile: The model, for the rows of one micro-batch.
        starts: First call of each stage.
        schedule: What was run.
        rank: The position that has too little memory.
        stage: The stage that ran; all of the rank if None.
        device_bytes: Memory of the device.
        checkpointing: The calls that run again for their backward.
    """
    ledger = make_ledger(profile, starts, schedule, checkpointing=checkpointing)
    own = [s for s in ledger.stages if s.rank == rank and stage in (None, s.stage)]
    peak_bytes = ledger.rank_peak_bytes[rank]
    device = "" if device_bytes is None else f" of {format_bytes(device_bytes)}"
    found = remedies(profile, starts, schedule, rank, checkpointing=checkpointing)
    lines = [describe_stage(one, len(starts)) for one in own]
    lines.append(f"rank {rank} is expected to hold {format_bytes(peak_bytes)} at its peak{device}")
    lines.append("the usual causes, in the order in which to look:")
    lines += [f"  {number}. {remedy.text}" for number, remedy in enumerate(found, 1)]
    first = next((r for r in found if r.saved_bytes >= _WORTH * peak_bytes), None)
    if first is None:
        lines.append(
            "none of them gives much back: the state of its weights is what fills it. Use more "
            "devices, so that a stage has fewer layers, or an optimizer that keeps less"
        )
    else:
        lines.append(f"start with {found.index(first) + 1}: {format_bytes(first.saved_bytes)} less")
    return "\n".join(lines)


def describe_stage(stage: StageLedger, num_stages: int) -> str:
    """The ledger of one stage in a line."""
    return (
        f"stage {stage.stage} of {num_stages}, on rank {stage.rank}: weights "
        f"{format_bytes(stage.weight_bytes)}, gradients {format_bytes(stage.gradient_bytes)}, "
        f"optimizer {format_bytes(stage.optimizer_bytes)}, activations "
        f"{format_bytes(stage.activation_bytes)} x {stage.in_flight} in flight, boundary "
        f"{format_bytes(stage.boundary_bytes)}"
    )


def _fewer_in_flight(case: _Case) -> Remedy:
    schedule, rank, now = case.schedule, case.rank, case.ledger()
    now_bytes = now.rank_peak_bytes[rank]
    held = max(stage.in_flight for stage in now.stages if stage.rank == rank)
    best = min(_same_placement(schedule), key=lambda other: case.peak_bytes(schedule=other))
    lighter = case.ledger(schedule=best)
    saved_bytes = now_bytes - lighter.rank_peak_bytes[rank]
    if saved_bytes < _WORTH * now_bytes:
        return Remedy(
            "in flight",
            0,
            f"micro-batches in flight: no. {schedule.name} keeps {held} of "
            f"{schedule.num_microbatches}, and no schedule keeps clearly less",
        )
    kept = max(stage.in_flight for stage in lighter.stages if stage.rank == rank)
    return Remedy(
        "in flight",
        saved_bytes,
        f"micro-batches in flight: {schedule.name} keeps {held} of {schedule.num_microbatches}; "
        f"schedule={best.name!r} keeps {kept} and saves {format_bytes(saved_bytes)}",
    )


def _same_placement(schedule: Schedule) -> Iterator[Schedule]:
    """The schedules that put each stage where this one does."""
    yield schedule
    chunks = schedule.num_stages // schedule.num_ranks
    for name in SCHEDULES:
        try:
            other = make_schedule(
                name,
                num_ranks=schedule.num_ranks,
                num_microbatches=schedule.num_microbatches,
                virtual_stages=chunks,
                strict=False,
            )
        except ScheduleError:
            continue
        if other.stage_to_rank == schedule.stage_to_rank and name != "naive":
            yield other


def _another_cut(case: _Case) -> Remedy:
    profile, schedule, now_bytes = case.profile, case.schedule, case.peak_bytes()
    request = Request(rows=profile.rows, devices=schedule.num_ranks, balance="memory")
    try:
        better = starts_for(profile, request, schedule, checkpointing=case.again)
        lowest_bytes = max(case.ledger(starts=better).rank_peak_bytes)
    except PlanError:
        better, lowest_bytes = case.starts, now_bytes
    saved_bytes = now_bytes - lowest_bytes
    heaviest = _heaviest_unit(case)
    if saved_bytes < _WORTH * now_bytes:
        return Remedy(
            "uneven",
            0,
            f"a stage too full beside the others: no. Its heaviest unit is {heaviest}, and no "
            "other cut makes the fullest rank clearly less full",
        )
    counts = [end - start for start, end in ranges(better, len(profile.units))]
    return Remedy(
        "uneven",
        saved_bytes,
        f"a stage too full beside the others: it holds {heaviest}; balance={counts} (units per "
        f"stage; balance='memory' finds it) saves {format_bytes(saved_bytes)}",
    )


def _heaviest_unit(case: _Case) -> str:
    """The unit of a rank whose weights are most, and how many it is beside."""
    profile = case.profile
    own = [
        unit
        for stage, (start, end) in enumerate(ranges(case.starts, len(profile.units)))
        if case.schedule.stage_to_rank[stage] == case.rank
        for unit in profile.units[start:end]
    ]
    sizes = [sum(profile.weights[name].state_bytes for name in unit.weights) for unit in own]
    heaviest = max(range(len(own)), key=sizes.__getitem__)
    others = len(own) - 1
    beside = f" beside {others} other{'s' if others > 1 else ''}" if others else " alone"
    return f"{own[heaviest].unit} ({format_bytes(sizes[heaviest])} of state){beside}"


def _smaller_activations(case: _Case) -> Remedy:
    schedule, profile, now = case.schedule, case.profile, case.ledger()
    now_bytes = now.rank_peak_bytes[case.rank]
    saved_bytes = max(0, now_bytes - case.peak_bytes(again=True))
    ways = []
    if saved_bytes >= _WORTH * now_bytes:
        ways.append(
            f"recomputing them (activation_checkpointing='all', or "
            f"gradient_checkpointing_enable() of the model) saves {format_bytes(saved_bytes)}"
        )
    halved = _halved_bytes(case)
    halved_bytes = 0 if halved is None else max(0, now_bytes - halved)
    if halved_bytes >= _WORTH * now_bytes:
        ways.append(
            f"num_microbatches={2 * schedule.num_microbatches} for the same batch saves "
            f"{format_bytes(halved_bytes)}"
        )
    held = max(stage.activation_bytes for stage in now.stages if stage.rank == case.rank)
    text = f"activations: {format_bytes(held)} of a micro-batch of {profile.rows} rows"
    if not ways:
        return Remedy("activations", 0, f"{text}: no, smaller ones save little")
    return Remedy("activations", max(saved_bytes, halved_bytes), f"{text}; {', or '.join(ways)}")


def _halved_bytes(case: _Case) -> int | None:
    """The rank's peak with twice as many micro-batches of half the rows."""
    schedule, profile = case.schedule, case.profile
    if profile.rows < 2 or schedule.name not in SCHEDULES:
        return None
    finer = make_schedule(
        schedule.name,
        num_ranks=schedule.num_ranks,
        num_microbatches=2 * schedule.num_microbatches,
        virtual_stages=schedule.num_stages // schedule.num_ranks,
        strict=False,
    )
    return case.peak_bytes(schedule=finer, profile=profile.for_rows(math.ceil(profile.rows / 2)))
