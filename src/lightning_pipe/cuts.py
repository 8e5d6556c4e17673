"""The cut of a step for every structure of batch: traced, derived from other traces, or known.

A new structure costs a trace, in which equal units run once
(:mod:`lightning_pipe.split.memo`). A new size of a known structure mostly costs none: its shapes
are derived from those of other sizes (:mod:`lightning_pipe.split.shapes`). Both are watched when
they run for the first time, and are traced in full if they were wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.home import CutStep, Home, buffers_outside, changing_places
from lightning_pipe.split.cut import StepCut, place, place_like
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.shapes import Family, Sample
from lightning_pipe.split.signature import Signature
from lightning_pipe.split.trace import Trace

_MAX_CUTS = 128
_MAX_FAMILIES = 64


class Cuts:
    """The cuts of the steps of one module, on one rank.

    Args:
        module: The user's module.
        position: This rank's.
        device_type: Where its stages live.
    """

    def __init__(self, module: nn.Module, position: int, device_type: str) -> None:
        self._module = module
        self._position = position
        self._device_type = device_type
        self._cuts: OrderedDict[Hashable, CutStep] = OrderedDict()
        self._families: OrderedDict[Hashable, Family] = OrderedDict()
        self.memo: UnitMemo = UnitMemo()

    def first(self, state: Hashable, batch: Signature, home: Home) -> None:
        """Begins with the cut that placed the weights."""
        self.memo.learn(self._module, home.cut.trace)
        step = self._prepared(home.cut, home.stage_to_rank, home)
        self._family(state, batch).add(Sample(batch.sizes, home.cut.trace, step))
        self._keep((state, batch), step)

    def get(
        self,
        state: tuple[str, bool, Hashable],
        batch: Signature,
        home: Home,
        trace: Callable[[UnitMemo | None], Trace],
    ) -> CutStep:
        """The cut for a batch.

        Args:
            state: Name of the step, whether it trains, and the state of the module.
            batch: Signature of the batch.
            home: Where the weights are.
            trace: Traces the step on this batch, with what is remembered of units or without.
        """
        key = (state, batch)
        if key in self._cuts:
            self._cuts.move_to_end(key)
            return self._cuts[key]
        family = self._family(state, batch)
        derived = family.derive(batch.sizes)
        if derived is None:
            seen = trace(self.memo if family.is_trusted(batch.sizes) else None)
            cut, placement = lay(seen, home, training=state[1])
            unproven = key if seen.repeated else None
            step = self._prepared(cut, placement, home, unproven=unproven)
            family.add(Sample(batch.sizes, seen, step))
            return self._keep(key, step)
        like: CutStep = derived.made
        cut = like.cut.with_shapes_of(derived.trace)
        programs = {stage: program.at(cut) for stage, program in like.programs.items()}
        return self._keep(key, replace(like, cut=cut, programs=programs, unproven=key))

    def confirm(self, cuts: Iterable[CutStep]) -> None:
        """What was derived has run and was right."""
        for cut in cuts:
            if cut.unproven is not None and self._cuts.get(cut.unproven) is cut:
                state, batch = cut.unproven
                self._family(state, batch).confirm()
                self._cuts[cut.unproven] = cut.confirmed()

    def reject(self, cuts: Iterable[CutStep]) -> None:
        """What was derived was wrong on one of the ranks: it is traced in full the next time."""
        for key in dict.fromkeys(cut.unproven for cut in cuts if cut.unproven is not None):
            self._cuts.pop(key, None)
            state, batch = key
            self._family(state, batch).reject(batch.sizes)

    def _family(self, state: Hashable, batch: Signature) -> Family:
        key = (state, batch.skeleton)
        family = self._families.setdefault(key, Family())
        self._families.move_to_end(key)
        if len(self._families) > _MAX_FAMILIES:
            self._families.popitem(last=False)
        return family

    def _keep(self, key: Hashable, cut: CutStep) -> CutStep:
        self._cuts[key] = cut
        if len(self._cuts) > _MAX_CUTS:
            self._cuts.popitem(last=False)
        return cut

    def _prepared(
        self, cut: StepCut, placement: tuple[int, ...], home: Home, unproven: Any = None
    ) -> CutStep:
        prepared = CutStep(
            cut,
            placement,
            changing_places(cut.trace),
            buffers_outside(self._module, cut.trace),
            unproven=unproven,
        )
        for stage, rank in enumerate(placement):
            if rank == self._position:
                prepared.programs[stage] = StageProgram(
                    cut,
                    stage,
                    self._module,
                    device_type=self._device_type,
                    watch=unproven is not None,
                    again=home.again,
                )
        return prepared


def lay(trace: Trace, home: Home, *, training: bool) -> tuple[StepCut, tuple[int, ...]]:
    """Lays a step over the stages that hold its units; returns it and the position of each stage.

    Raises:
        CutError: The units are called in an order that no training schedule runs.
    """
    if [c.unit for c in trace.calls] == [c.unit for c in home.cut.trace.calls]:
        cut = StepCut(trace, place(trace, home.starts), num_stages=home.cut.num_stages)
        return cut, home.stage_to_rank
    segments = place_like(trace, home.stages_of_unit, num_stages=home.cut.num_stages)
    ranks = home.stage_to_rank
    if not training:
        cut = StepCut(trace, segments.segment_of_call, num_stages=len(segments.home))
        return cut, tuple(ranks[stage] for stage in segments.home)
    if list(segments.home) != sorted(set(segments.home)):
        raise CutError(
            "this batch takes another way through the model than the first one: its units are "
            f"called in the order of the stages {segments.home}, which no schedule runs. Give "
            "batches that call the same units in the same order"
        )
    stages = tuple(segments.home[segment] for segment in segments.segment_of_call)
    return StepCut(trace, stages, num_stages=home.cut.num_stages), ranks
