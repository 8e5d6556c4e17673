"""Where the unit calls of a traced step go, as the user's layout says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_pipe.errors import PlanError
from lightning_pipe.layout import Layout
from lightning_pipe.planning.profile import Profile, ranges
from lightning_pipe.planning.request import Request, starts_for
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.trace import Trace

_MUCH = 1.5  # times the heaviest stage that calls of one unit on one stage may cost


def cut_step(layout: Layout, trace: Trace, profile: Profile, pieces: int) -> StepCut:
    """Cuts the training step as the layout says.

    Args:
        layout: What was asked for.
        trace: The traced step.
        profile: The same, as the planner reads it.
        pieces: Micro-batches of the first batch.
    """
    starts = stage_starts(layout, trace, profile, pieces)
    if _is_free(layout) and shared_units(trace, place(trace, starts)):
        starts = _with_calls_together(layout, trace, profile, pieces, starts)
    return StepCut(trace, place(trace, starts), num_stages=layout.num_stages)


def stage_starts(layout: Layout, trace: Trace, profile: Profile, pieces: int) -> tuple[int, ...]:
    """The first unit call of each stage."""
    if layout.num_stages == 1:
        return (0,)
    if len(trace.calls) < layout.num_stages:
        raise PlanError(_too_few_units(layout, trace))
    _check_units(layout, trace)
    priced = profile if profile.measured_on else profile.with_flops_per_s(1.0)
    return starts_for(priced, request_of(layout, profile, pieces), layout.make(pieces))


def request_of(layout: Layout, profile: Profile, pieces: int) -> Request:
    return Request(
        rows=profile.rows * pieces,
        devices=layout.num_ranks,
        balance=layout.balance,
        split_points=layout.split_points,
    )


def shared_units(trace: Trace, stage_of_call: Sequence[int]) -> list[str]:
    """Units that write buffers and are called on several stages."""
    stages: dict[str, set[int]] = {}
    for call, stage in zip(trace.calls, stage_of_call, strict=True):
        stages.setdefault(call.unit, set()).add(stage)
    return sorted(unit for unit in _updating_units(trace) if len(stages[unit]) > 1)


def _updating_units(trace: Trace) -> list[str]:
    """Units that write buffers of their own."""
    return [
        unit
        for unit in trace.unit_names
        if any(name.startswith(f"{unit}.") for name in trace.changed_buffers)
    ]


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

    together = not shared_units(trace, place(trace, found))
    return found if together and heaviest(found) <= _MUCH * heaviest(starts) else starts


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
