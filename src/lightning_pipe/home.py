"""Where the weights of a cut module are, and how a step is laid over them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.ownership import Ownership
from lightning_pipe.split.parted import part_of
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.trace import Trace
from lightning_pipe.split.units import is_metric

#: (module name, name, whether it is a buffer)
Place = tuple[str, str, bool]


@dataclass(frozen=True, slots=True)
class CutStep:
    """A step of one batch structure, cut.

    Attributes:
        cut: Its stages or, in evaluation, segments.
        placement: Where they are.
        changing: Attributes and buffers that the code between units changes.
        watched: Buffers that it might.
        programs: The stages of this rank.
        unproven: Where it is kept, while it is derived and has not been seen to be right.
        restless: Whether another micro-batch may take another way, which nobody has seen yet.
        way: What tells this way through the step from others, where ways vary.
    """

    cut: StepCut
    placement: tuple[int, ...]
    changing: frozenset[Place] = frozenset()
    watched: frozenset[Place] = frozenset()
    programs: dict[int, StageProgram] = field(default_factory=dict)
    unproven: Any = None
    restless: bool = False
    way: Hashable = None

    def confirmed(self) -> CutStep:
        """The same, which was seen to be right."""
        for program in self.programs.values():
            program.watch = self.restless
        return replace(self, unproven=None)

    def units_of_others(self, stage: int) -> frozenset[str]:
        """Units that a micro-batch does not come to first on this rank in this stage."""
        before = (s for s in self.programs if s < stage)
        known = frozenset().union(*(self.cut.units_of(s) for s in before))
        first = frozenset(self.cut.units_of(stage)) - known
        return frozenset(self.cut.trace.unit_names) - first


@dataclass(frozen=True, slots=True)
class Home:
    """Where the weights are, since the first cut.

    Attributes:
        cut: The first cut.
        starts: First call of each of its stages.
        stage_to_rank: Position of each stage.
        held: Parameters of each stage, by their first names.
        stages_of_unit: Stages that hold each unit.
        ownership: What this rank keeps.
        again: Units that run again for their backward.
    """

    cut: StepCut
    starts: tuple[int, ...]
    stage_to_rank: tuple[int, ...]
    held: tuple[frozenset[str], ...]
    stages_of_unit: Mapping[str, frozenset[int]]
    ownership: Ownership
    again: frozenset[str] = frozenset()

    def owners(self, name: str) -> tuple[int, ...]:
        """Positions that hold a parameter, in the order of their stages; none if it was not there
        at the cut."""
        ranks = [self.stage_to_rank[s] for s, held in enumerate(self.held) if name in held]
        return tuple(dict.fromkeys(ranks))

    def owner_of_buffer(self, name: str) -> int:
        """The position whose copy of a buffer counts: of its unit, or of the tail."""
        best = ""
        for unit in self.stages_of_unit:
            if (name.startswith(unit + ".") or not unit) and len(unit) >= len(best):
                best = unit
        stages = self.stages_of_unit.get(best)
        return self.stage_to_rank[max(stages) if stages else -1]


@contextmanager
def whole_as_fakes(
    module: nn.Module, device: torch.device, *, is_absent: bool = False
) -> Iterator[None]:
    """Lets a module that is too large for a device be traced as if it were there.

    Buffers move to the device for good; parameters are fakes on it for the length of the trace.

    Args:
        module: The user's module.
        device: Where its stages will be.
        is_absent: Whether weights may not even be on the host.
    """
    if device.type == "cpu" and not is_absent:
        yield
        return
    for child in module.modules():
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else buffer.to(device)
    values = {name: part_of(parameter.data) for name, parameter in module.named_parameters()}
    ghosts = Ownership(module, frozenset())
    ghosts.drop_foreign(device)
    try:
        yield
    finally:
        ghosts.restore(values)


def refuse_strangers(module: nn.Module, trace: Trace, known: Mapping[str, nn.Parameter]) -> None:
    """Refuses weights that came to the step after the cut: they are on no stage.

    Args:
        module: The user's module.
        trace: Of a training step.
        known: The weights that were there at the cut.

    Raises:
        CutError: With what to do.
    """
    inside = tuple(f"{unit}." for unit in trace.unit_names)
    for name, parameter in module.named_parameters():
        is_read = name in trace.glue_parameters or name.startswith(inside)
        if is_read and parameter.requires_grad and known.get(name) is not parameter:
            raise CutError(
                f"the step uses the weight {name}, which was made or replaced after the model was "
                "cut into stages at its first step, so it is on no stage and nobody would sum its "
                "gradients. Make it before fit (in __init__, setup or configure_model) and leave "
                "it out of the step, or frozen, until it is wanted; or end this fit and call "
                "trainer.fit again"
            )


def changing_places(trace: Trace) -> frozenset[Place]:
    """What the code between units was seen to change."""
    inside = tuple(name + "." for name in _all_units(trace))
    attributes = {
        (module, name, False)
        for module, name in trace.changed_attributes
        if not f"{module}.".startswith(inside)
    }
    buffers = {(*_split(name), True) for name in trace.glue_buffers}
    return frozenset(attributes | buffers)


def buffers_outside(module: nn.Module, trace: Trace) -> frozenset[Place]:
    """Buffers that belong to no unit and no metric."""
    inside = tuple(name + "." for name in _all_units(trace))
    return frozenset(
        (owner, name, True)
        for owner, child in module.named_modules()
        if not f"{owner}.".startswith(inside) and not is_metric(child)
        for name in child._buffers
    )


def _all_units(trace: Trace) -> tuple[str, ...]:
    """Units that are called, and those that another way may call."""
    return (*trace.unit_names, *trace.units) if trace.restless else trace.unit_names


def _split(name: str) -> tuple[str, str]:
    owner, _, last = name.rpartition(".")
    return owner, last
