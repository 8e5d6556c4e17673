"""The plan of a run: which stage is where, what it holds, and what to expect of the schedule.

Plain values that print as a table, go into YAML and come back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.plain import check_fields

__all__ = ["Plan", "Prediction", "StagePlan", "columns", "format_bytes", "format_count"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage.

    Args:
        stage: Index of the stage in the model, from 0.
        rank: Position in the pipeline that holds it.
        first_unit: Dotted name of its first unit; ``last_unit`` of its last.
        num_units: Unit calls that it owns.
        parameters: Elements of its parameters, replicas included.
        parameter_bytes: Bytes of its parameters.
        flops: Of one forward of one micro-batch.
        activation_bytes: Held for the backward, per micro-batch.
        boundary_bytes: Sent to the next stage, per micro-batch.
        replicated_parameters: Names of parameters that other stages hold as well (tied weights).
        units_run_again: Unit calls that keep their inputs only and run again for the backward.
    """

    stage: int
    rank: int
    first_unit: str
    last_unit: str
    num_units: int
    parameters: int
    parameter_bytes: int
    flops: int
    activation_bytes: int
    boundary_bytes: int
    replicated_parameters: tuple[str, ...] = ()
    units_run_again: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a step is expected to take.

    Args:
        step_s: Seconds of a step; None where only FLOPs are known, and no clock.
        bubble_fraction: Idle share of it, mean over the ranks.
        fill_drain_fraction: Of the step: filling and draining the pipeline.
        imbalance_fraction: Of the step: unequal stages.
        communication_fraction: Of the step: waiting for transfers.
        peak_bytes: What each rank holds at its peak.
        basis: Where the seconds are from.
    """

    step_s: float | None
    bubble_fraction: float
    fill_drain_fraction: float
    imbalance_fraction: float
    communication_fraction: float
    peak_bytes: tuple[int, ...]
    basis: str

    def describe(self) -> str:
        """One line."""
        step = "" if self.step_s is None else f"step {format_seconds(self.step_s)}, "
        return (
            f"predicted: {step}idle {self.bubble_fraction:.1%} (fill and drain "
            f"{self.fill_drain_fraction:.1%}, imbalance {self.imbalance_fraction:.1%}, "
            f"communication {self.communication_fraction:.1%}), fullest rank "
            f"{format_bytes(max(self.peak_bytes, default=0))}; {self.basis}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model is spread over a pipeline.

    Args:
        stages: Every stage, in model order.
        schedule_name: Name of the schedule.
        num_ranks: P, ranks per pipeline.
        virtual_stages: V, chunks per rank.
        num_microbatches: M, micro-batches per step.
        balance: What the cut evens out (``"flops"``, ``"parameters"``, ...).
        ideal_bubble_fraction: Idle share of the schedule with equal stages, 0 to 1.
        notes: What the user should know, a sentence each.
        checkpointing: Whether any units keep their inputs only and run again for the backward.
        prediction: What a step is expected to take, where that is known.
    """

    stages: tuple[StagePlan, ...]
    schedule_name: str
    num_ranks: int
    virtual_stages: int
    num_microbatches: int
    balance: str
    ideal_bubble_fraction: float
    notes: tuple[str, ...] = ()
    checkpointing: bool = False
    prediction: Prediction | None = None

    @property
    def unit_counts(self) -> tuple[int, ...]:
        """Unit calls of each stage."""
        return tuple(stage.num_units for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """FLOPs of the heaviest rank over the mean rank's: 1 is perfect, 1 also if unknown."""
        flops = [0] * self.num_ranks
        for stage in self.stages:
            flops[stage.rank] += stage.flops
        return max(flops) * self.num_ranks / sum(flops) if sum(flops) else 1.0

    def table_rows(self) -> list[list[str]]:
        """The stages as text, for any table printer: a header row, then one row per stage."""
        total_flops = sum(stage.flops for stage in self.stages)
        rows = [["stage", "rank", "units", "first .. last", "parameters", "weights", "FLOPs"]]
        rows[0] += ["activations", "sends"]
        again = any(stage.units_run_again for stage in self.stages)
        if again:
            rows[0].append("run again")
        for stage in self.stages:
            names = [stage.first_unit, stage.last_unit][: min(stage.num_units, 2)]
            share = f" ({stage.flops / total_flops:.0%})" if total_flops else ""
            rows.append(
                [
                    str(stage.stage),
                    str(stage.rank),
                    str(stage.num_units),
                    " .. ".join(names),
                    format_count(stage.parameters),
                    format_bytes(stage.parameter_bytes),
                    format_count(stage.flops) + share,
                    format_bytes(stage.activation_bytes),
                    format_bytes(stage.boundary_bytes) if stage.boundary_bytes else "-",
                    *([str(stage.units_run_again)] if again else []),
                ]
            )
        return rows

    def describe(self) -> str:
        """The plan as text: one line of summary, the table, the notes."""
        chunks = f" x {self.virtual_stages} chunks" if self.virtual_stages > 1 else ""
        ranks = f"{self.num_ranks} rank{'s' if self.num_ranks > 1 else ''}{chunks}"
        pieces = f"{self.num_microbatches} micro-batch{'es' if self.num_microbatches > 1 else ''}"
        summary = (
            f"{self.schedule_name}: {ranks}, {pieces}, balanced by "
            f"{self.balance} (heaviest rank {self.imbalance:.2f} x mean), ideal bubble "
            f"{self.ideal_bubble_fraction:.1%}"
        )
        notes = [f"note: {note}" for note in self.notes]
        if self.prediction is not None:
            notes.insert(0, self.prediction.describe())
        return "\n".join([summary, *columns(self.table_rows(), left=3), *notes])

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for YAML or JSON."""
        values = asdict(self)
        for stage in values["stages"]:
            stage["replicated_parameters"] = list(stage["replicated_parameters"])
        if values["prediction"] is not None:
            values["prediction"]["peak_bytes"] = list(values["prediction"]["peak_bytes"])
        return {**values, "stages": list(values["stages"]), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """Reads what ``to_dict`` made.

        Raises:
            PlanError: A field is missing, unknown or of another type, or the numbers
                do not fit together.
        """
        check_fields(cls, values, _OPTIONAL)
        entries, prediction = values["stages"], values.get("prediction")
        if not isinstance(entries, (list, tuple)):
            raise PlanError(f"the plan cannot be read: stages is {entries!r}; it must be a list")
        stages = []
        for entry in entries:
            check_fields(StagePlan, entry, _OPTIONAL)
            replicated = tuple(entry.get("replicated_parameters", ()))
            stages.append(StagePlan(**{**entry, "replicated_parameters": replicated}))
        notes = tuple(values.get("notes", ()))
        if prediction is not None:
            check_fields(Prediction, prediction)
            peaks = tuple(prediction["peak_bytes"])
            prediction = Prediction(**{**prediction, "peak_bytes": peaks})
        made = {"stages": tuple(stages), "notes": notes, "prediction": prediction}
        plan = cls(**{**values, **made})
        _check_sizes(plan)
        return plan


_OPTIONAL = {
    "notes",
    "replicated_parameters",
    "checkpointing",
    "prediction",
    "units_run_again",
}


def format_seconds(seconds: float) -> str:
    """Seconds for people.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(3e-5)
    ('12.3 ms', '2.50 s', '0.03 ms')
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e3:.2f} ms"


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in powers of 1024.

    >>> format_bytes(1536), format_bytes(80 * 1024**3)
    ('1.5 KiB', '80.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 1024 or unit == "TiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def format_count(count: float) -> str:
    """A large number for people, in powers of 1000.

    >>> format_count(999), format_count(124_400_000)
    ('999', '124.4 M')
    """
    for unit in ("", "K", "M", "G", "T", "P"):
        if abs(count) < 1000 or unit == "P":
            break
        count /= 1000
    return f"{count:.1f} {unit}" if unit else f"{count:.0f}"


def columns(rows: Sequence[Sequence[str]], *, left: int = -1) -> list[str]:
    """Lines with aligned columns; column ``left`` is flush left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            f"{cell:<{width}}" if index == left else f"{cell:>{width}}"
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _check_sizes(plan: Plan) -> None:
    """The numbers of a plan that was read fit together."""
    wanted = plan.num_ranks * plan.virtual_stages
    faults = {
        f"{len(plan.stages)} stages for {plan.num_ranks} ranks x {plan.virtual_stages} chunks": (
            wanted < 1 or len(plan.stages) != wanted
        ),
        f"num_microbatches is {plan.num_microbatches}": plan.num_microbatches < 1,
        f"its stages are numbered {[stage.stage for stage in plan.stages]}": (
            any(stage.stage != index for index, stage in enumerate(plan.stages))
        ),
        f"its stages are on ranks {[stage.rank for stage in plan.stages]}": (
            any(stage.rank >= plan.num_ranks for stage in plan.stages)
        ),
        f"its stages have {list(plan.unit_counts)} units": min(plan.unit_counts, default=0) < 1,
    }
    for text, is_so in faults.items():
        if is_so:
            raise PlanError(
                f"the plan cannot be read: {text}. It was edited, or a part of it is missing; "
                "write it anew with `lightning-pipe plan`"
            )
