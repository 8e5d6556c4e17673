"""What is said when a model does not fit: where, by how much, and what would help."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.memory import Ledger
from lightning_pipe.planning.plan import format_bytes
from lightning_pipe.planning.profile import Profile, ranges

__all__ = ["a_unit_is_too_large", "nothing_fits"]


def a_unit_is_too_large(profile: Profile, usable_bytes: float, rows: int) -> None:
    """Refuses a model of which one unit alone is more than a device can hold.

    Args:
        profile: The model.
        usable_bytes: What a device can hold.
        rows: Rows of the smallest micro-batch that is possible.

    Raises:
        PlanError: With the name of the unit, and what it holds.
    """
    intervals = profile.for_rows(rows).intervals(checkpointing=False)
    for index, unit in enumerate(profile.units):
        state_bytes, held_bytes, _ = intervals.bytes_of(index, index + 1)
        if state_bytes + held_bytes > usable_bytes:
            raise PlanError(
                f"{unit.unit!r} alone holds {format_bytes(state_bytes)} of weights, gradients and "
                f"optimizer state and {format_bytes(held_bytes)} of activations of {rows} row(s), "
                f"more than the {format_bytes(usable_bytes)} that may be used of a device; no "
                "number of stages helps, since a unit is not cut. Write it as smaller modules, use "
                "an optimizer or a precision with less state, or larger devices"
            )


def nothing_fits(
    ledger: Ledger,
    starts: Sequence[int],
    units: Sequence[str],
    tried: str,
    changes: Sequence[str],
) -> PlanError:
    """The error for a cap that no combination meets.

    Args:
        ledger: Of the combination that is nearest to fitting.
        starts: Its cut.
        units: Names of the unit calls.
        tried: Its name.
        changes: What would make it fit.
    """
    own = [stage for stage in ledger.stages if stage.rank == ledger.fullest]
    stage = max(own, key=lambda stage: stage.total_bytes)
    start, end = ranges(starts, len(units))[stage.stage]
    names = units[start] if end == start + 1 else f"{units[start]} .. {units[end - 1]}"
    help_text = (
        f"What would make it fit: {'; or '.join(changes)}"
        if changes
        else (
            "Neither more stages nor smaller micro-batches help; use an optimizer or a precision "
            "with less state, or larger devices"
        )
    )
    assert ledger.cap_bytes is not None, "without a cap everything fits"
    return PlanError(
        f"nothing fits in {format_bytes(ledger.cap_bytes)} less {ledger.headroom_fraction:.0%} "
        f"head-room. Nearest is {tried}: stage {stage.stage} ({names}) on rank {ledger.fullest} is "
        f"over by {ledger.excess_bytes} bytes ({format_bytes(ledger.excess_bytes)}). {help_text}"
    )
