"""What the user asked for: how many stages, micro-batches, which schedule, how to balance. Checked
at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_pipe.errors import ConfigError, PlanError, ScheduleError
from lightning_pipe.grouping import Grouped
from lightning_pipe.planning.choose import BALANCES, Candidate, Request, starts_for, try_one
from lightning_pipe.planning.conclude import predict
from lightning_pipe.planning.costs import CostTable
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import Plan, Prediction, StagePlan
from lightning_pipe.planning.profile import Profile, ranges
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule, validate_user
from lightning_pipe.planning.simulate import ideal_bubble_fraction
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.rows import Rule, check_rules
from lightning_pipe.split.trace import Trace
from lightning_pipe.statistics import POLICIES

_MUCH = 1.5  # times the heaviest stage that calls of one unit on one stage may cost
_OF_BATCH_NORMS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


@dataclass(frozen=True, slots=True)
class Layout:
    """The arguments of the strategy that decide how a model is laid over ranks.

    Attributes:
        num_ranks: P.
        virtual_stages: V.
        num_microbatches: M, or None: 4P where the batch allows.
        schedule: A name, the path of a CSV file, or "auto".
        balance: One of `BALANCES`, or a number of unit calls for each stage.
        split_points: Names of modules after which to cut.
        activation_checkpointing: Which units run again for their backward: "none", "all", "auto"
            (as few as fit the memory), every k-th one, or those of some classes.
        split_batch: What the user says about keys of the batch (:mod:`lightning_pipe.split.rows`).
        batchnorm: When running statistics are updated (:mod:`lightning_pipe.statistics`).
        microbatch_size: Rows of a micro-batch, where steps draw M of them; None: M splits a batch.
        plan: The file's plan that the other values are from, if any.
        costs: Measured costs of the units, if any.
        chunks_are_free: Whether V is decided on the traced step (:mod:`lightning_pipe.decide`).
    """

    num_ranks: int
    virtual_stages: int = 1
    num_microbatches: int | None = None
    schedule: str = "auto"
    balance: str | tuple[int, ...] = "auto"
    split_points: tuple[str, ...] | None = None
    activation_checkpointing: str | int | tuple[str, ...] = "auto"
    split_batch: Mapping[str, Rule] = field(default_factory=dict)
    batchnorm: str = "micro-batch"
    microbatch_size: int | None = None
    plan: Plan | None = None
    costs: CostTable | None = None
    chunks_are_free: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "virtual_stages", "num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                shown = "pipeline_parallel_size" if name == "num_ranks" else name
                raise ConfigError(f"{shown}={value!r}: give a whole number, 1 at least")
        if isinstance(self.balance, str) and self.balance not in BALANCES:
            raise ConfigError(
                f"balance={self.balance!r}: give one of {', '.join(BALANCES)}, or a list "
                "with the number "
                f"of unit calls of each of the {self.num_stages} stages"
            )
        if not isinstance(self.balance, str) and len(self.balance) != self.num_stages:
            raise ConfigError(
                f"balance={list(self.balance)}: {len(self.balance)} counts for "
                f"{self.num_stages} stages "
                f"({self.num_ranks} ranks x {self.virtual_stages}); give one count per stage"
            )
        if self.split_points is not None and len(self.split_points) != self.num_stages - 1:
            raise ConfigError(
                f"split_points: {len(self.split_points)} names make "
                f"{len(self.split_points) + 1} stages, "
                f"but there are {self.num_stages} ({self.num_ranks} ranks x "
                f"{self.virtual_stages}); give "
                f"{self.num_stages - 1} names"
            )
        _check_checkpointing(self.activation_checkpointing)
        if self.microbatch_size is not None and self.num_microbatches is None:
            raise ConfigError(
                f"microbatch_size={self.microbatch_size} without num_microbatches: a step draws "
                "num_microbatches x microbatch_size rows. Give num_microbatches too, or leave "
                "microbatch_size out: then each batch of the loader is split"
            )
        check_rules(self.split_batch)
        if self.batchnorm not in POLICIES:
            raise ConfigError(f"batchnorm={self.batchnorm!r}: give one of {', '.join(POLICIES)}")
        self._check_schedule()

    @property
    def num_stages(self) -> int:
        """P * V."""
        return self.num_ranks * self.virtual_stages

    def microbatches_for(self, rows: int, least_rows: int = 1) -> int:
        """How many micro-batches a batch of so many rows is split into.

        With `microbatch_size` a batch that is no whole step, one of an evaluation or the last of an
        epoch, is split into as many as have that size.

        Args:
            rows: Rows of the batch.
            least_rows: Rows that each needs; a batch that has fewer is one micro-batch.
        """
        wanted = self.num_microbatches
        if self.microbatch_size is not None:
            wanted = -(-rows // self.microbatch_size)
        elif wanted is None:
            wanted = 4 * self.num_ranks if self.num_ranks > 1 else 1
        return min(wanted, max(1, rows // least_rows))

    @property
    def rows_per_step(self) -> int | None:
        """Rows that a step draws; None where it takes a batch of the loader."""
        if self.microbatch_size is None or self.num_microbatches is None:
            return None
        return self.microbatch_size * self.num_microbatches

    def grouped(self, loader: Iterable[Any]) -> Grouped | None:
        """A training loader, read for whole steps; None where its batches are steps.

        Raises:
            ConfigError: Its batches do not make up a step.
        """
        if self.microbatch_size is None or self.num_microbatches is None:
            return None
        return Grouped(loader, self.num_microbatches, self.microbatch_size, self.split_batch)

    def schedule_name(self, num_microbatches: int) -> str:
        """The schedule to run; "auto" is decided by the number of micro-batches."""
        if self.schedule != "auto":
            return self.schedule
        if self.virtual_stages > 1:
            return "interleaved_1f1b"
        return "1f1b" if num_microbatches >= self.num_ranks else "gpipe"

    def make(self, num_microbatches: int, *, name: str | None = None) -> Schedule:
        """The schedule for any number of micro-batches, as a short batch may need."""
        return make_schedule(
            name or self.schedule_name(num_microbatches),
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=self.virtual_stages,
            strict=False,
        )

    def stage_to_rank(self) -> tuple[int, ...]:
        """The position that holds each stage."""
        return self.make(1 if _is_file(self.schedule) else 2 * self.num_ranks).stage_to_rank

    def _check_schedule(self) -> None:
        name = self.schedule
        if _is_file(name):
            make_schedule(
                name,
                num_ranks=self.num_ranks,
                num_microbatches=self.num_microbatches or 1,
                virtual_stages=self.virtual_stages,
                strict=False,
            )
            return
        if name != "auto" and name not in SCHEDULES:
            raise ScheduleError(
                f"schedule={name!r}: unknown; give 'auto', the path of a .csv file, or one of "
                f"{', '.join(sorted(SCHEDULES))}"
            )
        if self.chunks_are_free:
            return
        num_microbatches = self.num_microbatches or 4 * self.num_ranks
        validate_user(
            self.schedule_name(num_microbatches),
            self.num_ranks,
            num_microbatches,
            self.virtual_stages,
        )


def _check_checkpointing(wanted: object) -> None:
    names = isinstance(wanted, tuple) and bool(wanted) and all(isinstance(n, str) for n in wanted)
    number = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
    if wanted not in ("none", "all", "auto") and not names and not number:
        raise ConfigError(
            f"activation_checkpointing={wanted!r}: give 'none', 'all', 'auto', a number k (every "
            "k-th unit) or a list of the names of classes"
        )


def stage_starts(layout: Layout, trace: Trace, profile: Profile, pieces: int) -> tuple[int, ...]:
    """The first unit call of each stage."""
    if layout.num_stages == 1:
        return (0,)
    if len(trace.calls) < layout.num_stages:
        raise PlanError(_too_few_units(layout, trace))
    _check_units(layout, trace)
    priced = profile if profile.measured_on else profile.with_flops_per_s(1.0)
    return starts_for(priced, _request(layout, profile, pieces), layout.make(pieces))


def _request(layout: Layout, profile: Profile, pieces: int) -> Request:
    return Request(
        rows=profile.rows * pieces,
        devices=layout.num_ranks,
        balance=layout.balance,
        split_points=layout.split_points,
    )


def _check_units(layout: Layout, trace: Trace) -> None:
    """The plan of a file is for the calls that the step makes.

    Raises:
        PlanError: It is for others, with the first difference.
    """
    if layout.plan is None:
        return
    names, end = [call.unit for call in trace.calls], 0
    for stage in layout.plan.stages:
        start, end = end, end + stage.num_units
        found = names[start:end]
        if len(found) < stage.num_units or (found[0], found[-1]) != (
            stage.first_unit,
            stage.last_unit,
        ):
            there = f"{found[0]} .. {found[-1]}" if found else "nothing"
            raise PlanError(
                f"the plan is for another model: its stage {stage.stage} is {stage.num_units} "
                f"units, {stage.first_unit} .. {stage.last_unit}; here these are {there}. Make a "
                "plan for this one: lightning-pipe plan"
            )


def predict_step(
    layout: Layout,
    profile: Profile,
    starts: tuple[int, ...],
    pieces: int,
    again: frozenset[int] = frozenset(),
) -> Prediction | None:
    """What a step will take: as the plan's file says, or from FLOPs and the trace.

    Args:
        layout: What was asked for.
        profile: The model.
        starts: First call of each stage.
        pieces: Micro-batches.
        again: Calls that run again for their backward.
    """
    if layout.plan is not None and layout.plan.prediction is not None:
        return layout.plan.prediction
    if not any(unit.flops for unit in profile.units):
        return None
    counts = tuple(end - start for start, end in ranges(starts, len(profile.units)))
    request = replace(_request(layout, profile, pieces), balance=counts, split_points=None)
    candidate = Candidate(
        layout.num_ranks, layout.virtual_stages, pieces, layout.schedule_name(pieces), again
    )
    priced = profile if profile.measured_on else profile.with_flops_per_s(1.0)
    return predict(try_one(priced, request, candidate, strict=False), request)


def make_plan(
    layout: Layout,
    trace: Trace,
    cut: StepCut,
    held: Sequence[frozenset[str]],
    profile: Profile,
    *,
    sizes: Mapping[str, tuple[int, int]],
    num_microbatches: int,
    prediction: Prediction | None = None,
    again: frozenset[int] = frozenset(),
    reasons: Sequence[str] = (),
) -> Plan:
    """Describes a cut.

    Args:
        layout: What was asked for.
        trace: The traced step.
        cut: The cut of it.
        held: The parameters of each stage.
        profile: The trace, as the planner reads it.
        sizes: For each parameter its number of elements and of bytes.
        num_microbatches: Pieces of the first batch.
        prediction: What a step is expected to take.
        again: Calls that run again for their backward.
        reasons: Why it was decided so.
    """
    schedule = layout.make(num_microbatches)
    idle_fraction = ideal_bubble_fraction(schedule)
    stages = []
    for stage in range(cut.num_stages):
        indices = cut.calls_of(stage)
        calls = [trace.calls[i] for i in indices]
        replicated = sorted(
            name for name in held[stage] if any(name in h for s, h in enumerate(held) if s != stage)
        )
        outgoing = cut.crossing[stage] if stage < cut.num_stages - 1 else ()
        stages.append(
            StagePlan(
                stage=stage,
                rank=schedule.stage_to_rank[stage],
                first_unit=calls[0].unit if calls else "-",
                last_unit=calls[-1].unit if calls else "-",
                num_units=len(calls),
                parameters=sum(sizes[name][0] for name in held[stage]),
                parameter_bytes=sum(sizes[name][1] for name in held[stage]),
                flops=sum(call.flops for call in calls),
                activation_bytes=profile.held_bytes(
                    indices[0], indices[-1] + 1, checkpointing=again
                )
                if calls
                else 0,
                boundary_bytes=sum(trace.meta(key).wire_bytes for key in outgoing),
                replicated_parameters=tuple(replicated),
                units_run_again=len(again & set(indices)),
            )
        )
    balance = layout.balance if isinstance(layout.balance, str) else "counts"
    if layout.plan is not None:
        balance = f"the plan's {layout.plan.balance}"
    return Plan(
        stages=tuple(stages),
        schedule_name=schedule.name,
        num_ranks=layout.num_ranks,
        virtual_stages=layout.virtual_stages,
        num_microbatches=num_microbatches,
        balance="split_points" if layout.split_points is not None else balance,
        ideal_bubble_fraction=idle_fraction,
        notes=(
            *trace.notes,
            *reasons,
            *_shared_buffers(layout, trace, cut),
            *_few_microbatches(layout, schedule, idle_fraction),
        ),
        checkpointing=bool(again),
        prediction=prediction,
    )


def _too_few_units(layout: Layout, trace: Trace) -> str:
    asked = (
        f"{layout.num_stages} stages ({layout.num_ranks} ranks x {layout.virtual_stages}): "
        f"the step makes {len(trace.calls)} calls of modules that can be placed"
    )
    if not trace.calls:
        return (
            f"{asked}, because its weights are bare parameters or nothing with weights is called; "
            "a stage holds whole modules. Put the weights into submodules, or train on one device"
        )
    names = ", ".join(dict.fromkeys(call.unit for call in trace.calls))
    whole = f" ({', '.join(sorted(trace.keep_whole))} must stay whole)" if trace.keep_whole else ""
    return (
        f"{asked}: {names}{whole}. Give at most {len(trace.calls)} stages (devices x "
        "virtual_stages), or write the model as more and smaller modules"
    )


def _updating_units(trace: Trace) -> list[str]:
    """Units that write buffers of their own."""
    return [
        unit
        for unit in trace.unit_names
        if any(name.startswith(f"{unit}.") for name in trace.changed_buffers)
    ]


def _shared_units(trace: Trace, stage_of_call: Sequence[int]) -> list[str]:
    """Units that write buffers and are called on several stages."""
    stages: dict[str, set[int]] = {}
    for call, stage in zip(trace.calls, stage_of_call, strict=True):
        stages.setdefault(call.unit, set()).add(stage)
    return sorted(unit for unit in _updating_units(trace) if len(stages[unit]) > 1)


def _shared_buffers(layout: Layout, trace: Trace, cut: StepCut) -> tuple[str, ...]:
    """A note where running statistics are those of some calls only."""
    shared = _shared_units(trace, cut.stage_of_call)
    if layout.batchnorm == "deferred":  # puts those of all stages together
        others = [n for n in trace.changed_buffers if n.rpartition(".")[2] not in _OF_BATCH_NORMS]
        shared = [unit for unit in shared if any(n.startswith(f"{unit}.") for n in others)]
    if not shared:
        return ()
    return (
        f"{', '.join(shared)} updates buffers and is called on several stages: gradients are "
        f"exact, but each stage updates its own copy (BatchNorm statistics) from its own calls "
        f"only; give split_points or a balance that keep the calls on one stage, or "
        f"batchnorm='deferred'",
    )


def _few_microbatches(layout: Layout, schedule: Schedule, idle_fraction: float) -> tuple[str, ...]:
    """A note where more micro-batches would keep the ranks clearly busier."""
    good = 4 * layout.num_ranks
    if layout.num_ranks == 1 or schedule.num_microbatches >= good or idle_fraction < 0.1:
        return ()
    return (
        f"{schedule.num_microbatches} micro-batches: {schedule.name} leaves {layout.num_ranks} "
        f"ranks idle for {idle_fraction:.0%} of a step; {good} or more are good, which takes "
        f"batches of as many rows",
    )


def cut_step(layout: Layout, trace: Trace, profile: Profile, pieces: int) -> StepCut:
    """Cuts the training step as the layout says.

    Args:
        layout: What was asked for.
        trace: The traced step.
        profile: The same, as the planner reads it.
        pieces: Micro-batches of the first batch.
    """
    starts = stage_starts(layout, trace, profile, pieces)
    if _is_free(layout) and _shared_units(trace, place(trace, starts)):
        starts = _with_calls_together(layout, trace, profile, pieces, starts)
    return StepCut(trace, place(trace, starts), num_stages=layout.num_stages)


def _is_free(layout: Layout) -> bool:
    """Whether the cuts are ours to choose."""
    return isinstance(layout.balance, str) and layout.split_points is None and layout.plan is None


def _with_calls_together(
    layout: Layout, trace: Trace, profile: Profile, pieces: int, starts: tuple[int, ...]
) -> tuple[int, ...]:
    """Cuts that keep the calls of a unit that updates buffers on one stage, so that it sees them in
    their order; the given ones where that makes the heaviest stage much heavier."""
    calls: dict[str, list[int]] = {}
    for call in trace.calls:
        calls.setdefault(call.unit, []).append(call.index)
    inside = {
        place for unit in _updating_units(trace) for place in range(calls[unit][0], calls[unit][-1])
    }
    units = tuple(
        replace(unit, can_cut_after=unit.can_cut_after and place not in inside)
        for place, unit in enumerate(profile.units)
    )
    try:
        found = stage_starts(layout, trace, replace(profile, units=units), pieces)
    except PlanError:
        return starts

    def heaviest(chosen: tuple[int, ...]) -> int:
        bounds = ranges(chosen, len(units))
        return max(sum(1 + unit.flops for unit in units[start:end]) for start, end in bounds)

    together = not _shared_units(trace, place(trace, found))
    return found if together and heaviest(found) <= _MUCH * heaviest(starts) else starts


def _is_file(schedule: str) -> bool:
    return os.fspath(schedule).lower().endswith(".csv")
