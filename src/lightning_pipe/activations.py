"""Activation checkpointing: which units run again for their backward, from what the user asked."""

from __future__ import annotations

from torch import nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.layout import Layout
from lightning_pipe.planning.checkpointing import calls_to_run_again
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.profile import Profile
from lightning_pipe.split.again import names_of_classes, repeatable_calls
from lightning_pipe.split.cut import StepCut

__all__ = ["units_to_run_again"]


def units_to_run_again(
    layout: Layout,
    module: nn.Module,
    cut: StepCut,
    profile: Profile,
    schedule: Schedule,
    cap_bytes: int,
) -> frozenset[str]:
    """The units that keep their inputs only.

    Args:
        layout: What was asked for.
        module: The user's module.
        cut: The cut training step.
        profile: The same, as the planner reads it.
        schedule: What is run.
        cap_bytes: Memory of a rank, for "auto".

    Raises:
        ConfigError: A class is asked for that no unit has.
    """
    wanted, trace = layout.activation_checkpointing, cut.trace
    able = repeatable_calls(trace, trace.unit_names)
    if wanted == "none":
        return frozenset()
    if wanted == "auto":
        starts = [cut.first_call(stage) for stage in range(cut.num_stages)]
        calls = calls_to_run_again(profile, starts, schedule, cap_bytes, allowed=able)
        return frozenset(trace.calls[i].unit for i in calls)
    units = list(dict.fromkeys(trace.calls[i].unit for i in sorted(able)))
    if wanted == "all":
        return frozenset(units)
    if isinstance(wanted, int):
        return frozenset(units[::wanted])
    found: set[str] = set()
    for name in wanted:
        of_class = names_of_classes(module, units, {name})
        if not of_class:
            kinds = {type(module.get_submodule(unit)).__name__ for unit in units}
            raise ConfigError(
                f"activation_checkpointing={list(wanted)}: no unit that can run again is a "
                f"{name} or inside of one; the units are of {', '.join(sorted(kinds))}"
            )
        found |= of_class
    return frozenset(found)
