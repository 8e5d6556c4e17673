"""From what was chosen to the plan that is printed, written to a file and taken by `fit`."""

from __future__ import annotations

from lightning_pipe.planning.choose import Outcome, Search, search
from lightning_pipe.planning.explain import explain, parts_of
from lightning_pipe.planning.plan import Plan, Prediction, StagePlan
from lightning_pipe.planning.profile import Profile, ranges
from lightning_pipe.planning.request import Request
from lightning_pipe.planning.simulate import ideal_bubble_fraction

__all__ = ["make_plan", "plan_of", "predict"]


def make_plan(profile: Profile, request: Request) -> Plan:
    """Chooses, and says why: the whole planner in one call.

    Args:
        profile: The model.
        request: What is given, and what is free.

    Raises:
        PlanError: Nothing fits; with the stage, the bytes and the smallest change that would.
        ScheduleError: A pinned schedule cannot run with the pinned numbers.
    """
    return plan_of(search(profile, request))


def plan_of(found: Search) -> Plan:
    """The plan of what was chosen, with the reasons as its notes."""
    chosen, request = found.chosen, found.request
    balance = request.balance if isinstance(request.balance, str) else "counts"
    if request.split_points is not None:
        balance = "split_points"
    return Plan(
        stages=_stages(chosen),
        schedule_name=chosen.candidate.schedule_name,
        num_ranks=chosen.candidate.num_ranks,
        virtual_stages=chosen.candidate.virtual_stages,
        num_microbatches=chosen.candidate.num_microbatches,
        balance=balance,
        ideal_bubble_fraction=ideal_bubble_fraction(chosen.schedule),
        notes=(*found.profile.notes, *explain(found)),
        checkpointing=bool(chosen.candidate.checkpointing),
        prediction=predict(chosen, request),
    )


def predict(outcome: Outcome, request: Request) -> Prediction:
    """What a step will take; seconds only where a clock has measured the units."""
    parts = parts_of(outcome, request)
    return Prediction(
        step_s=outcome.step_s if outcome.profile.measured_on else None,
        bubble_fraction=outcome.bubble_fraction,
        fill_drain_fraction=parts.fill_drain_fraction,
        imbalance_fraction=parts.imbalance_fraction,
        communication_fraction=parts.communication_fraction,
        peak_bytes=outcome.ledger.rank_peak_bytes,
        basis=outcome.profile.basis,
    )


def _stages(outcome: Outcome) -> tuple[StagePlan, ...]:
    profile, ledger = outcome.profile, outcome.ledger
    bounds = ranges(outcome.starts, len(profile.units))
    held = [profile.stage_weights(start, end) for start, end in bounds]
    stages = []
    for entry, (start, end) in zip(ledger.stages, bounds, strict=True):
        own = held[entry.stage]
        others = frozenset().union(*(h for s, h in enumerate(held) if s != entry.stage))
        units = profile.units[start:end]
        stages.append(
            StagePlan(
                stage=entry.stage,
                rank=entry.rank,
                first_unit=units[0].unit,
                last_unit=units[-1].unit,
                num_units=len(units),
                parameters=entry.parameters,
                parameter_bytes=entry.weight_bytes,
                flops=sum(unit.flops for unit in units),
                activation_bytes=entry.activation_bytes,
                boundary_bytes=0 if end == len(profile.units) else units[-1].output_bytes,
                replicated_parameters=tuple(sorted(own & others)),
                units_run_again=len(units) if outcome.candidate.checkpointing else 0,
            )
        )
    return tuple(stages)
