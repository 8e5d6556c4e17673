"""A cut as a plan that is printed: stages, prediction and what the user should know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_pipe.layout import Layout
from lightning_pipe.placing import request_of, shared_units
from lightning_pipe.planning.choose import Candidate, try_one
from lightning_pipe.planning.conclude import predict
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import Plan, Prediction, StagePlan
from lightning_pipe.planning.profile import Profile, ranges
from lightning_pipe.planning.simulate import ideal_bubble_fraction
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.trace import Trace

_OF_BATCH_NORMS = frozenset(("running_mean", "running_var", "num_batches_tracked"))


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
            *_few_microbatches(layout, schedule, idle_fraction, profile.rows),
        ),
        checkpointing=bool(again),
        prediction=prediction,
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
    request = replace(request_of(layout, profile, pieces), balance=counts, split_points=None)
    candidate = Candidate(
        layout.num_ranks, layout.virtual_stages, pieces, layout.schedule_name(pieces), again
    )
    priced = profile if profile.measured_on else profile.with_flops_per_s(1.0)
    return predict(try_one(priced, request, candidate, strict=False), request)


def _shared_buffers(layout: Layout, trace: Trace, cut: StepCut) -> tuple[str, ...]:
    """A note where running statistics are those of some calls only."""
    shared = shared_units(trace, cut.stage_of_call)
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


def _few_microbatches(
    layout: Layout, schedule: Schedule, idle_fraction: float, rows: int
) -> tuple[str, ...]:
    """A note where more micro-batches of the `rows` that they have now would keep the ranks clearly
    busier."""
    good, now = 4 * layout.num_ranks, schedule.num_microbatches
    if layout.num_ranks == 1 or now >= good or idle_fraction < 0.1:
        return ()
    asked = layout.num_microbatches
    less = f", {asked} were asked for, and the batch has rows for no more" if asked != now else ""
    way = f"give num_microbatches={good}" if rows * now >= good else f"it takes {good} rows or more"
    if layout.microbatch_size is not None:
        way = "a step then draws as many more rows"
    return (
        f"{now} micro-batch{'es' if now > 1 else ''}{less if asked is not None else ''}: "
        f"{schedule.name} leaves {layout.num_ranks} ranks idle for {idle_fraction:.0%} of a step; "
        f"{good} micro-batches or more are good: {way}",
    )
