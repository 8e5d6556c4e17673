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
from functools import cached_property
from typing import Any

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.home import CutStep, Home, buffers_outside, changing_places
from lightning_pipe.split.compiled import CompiledUnits
from lightning_pipe.split.cut import StepCut, place, place_like
from lightning_pipe.split.generators import generators_of
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.rng import Generator
from lightning_pipe.split.shapes import Family, Sample
from lightning_pipe.split.signature import Signature
from lightning_pipe.split.trace import Trace
from lightning_pipe.ways import Ways

_MAX_CUTS = 256
_MAX_FAMILIES = 64


class Cuts:
    """The cuts of the steps of one module, on one rank.

    Args:
        module: The user's module.
        position: This rank's.
        device_type: Where its stages live.
        compiled: Compiles its units, if that is asked for.
    """

    def __init__(
        self,
        module: nn.Module,
        position: int,
        device_type: str,
        compiled: CompiledUnits | None = None,
    ) -> None:
        self._compiled = compiled
        #: whether a trace may be made of others, and be tried
        self.derives = True
        self._module = module
        self._position = position
        self._device_type = device_type
        self._cuts: OrderedDict[Hashable, CutStep] = OrderedDict()
        self._families: OrderedDict[Hashable, Family] = OrderedDict()
        self.memo: UnitMemo = UnitMemo()
        self._new: list[CutStep] = []

    @cached_property
    def generators(self) -> tuple[Generator, ...]:
        """Those that the stages seed; to look for them takes longer than a small step."""
        return generators_of(self._module)

    def first(self, state: Hashable, batch: Signature, home: Home) -> None:
        """Begins with the cut that placed the weights."""
        self.memo.learn(self._module, home.cut.trace)
        step = self._prepared(home.cut, home.stage_to_rank, home, restless=home.cut.trace.restless)
        self._family(state, batch).add(Sample(batch.sizes, home.cut.trace, step))
        self._keep((state, batch), step)

    def get(
        self,
        state: tuple[str, bool, Hashable],
        batch: Signature,
        home: Home,
        trace: Callable[[UnitMemo | None], Trace],
        ways: Ways,
        agree: Callable[[CutStep | None], bool] = lambda derived: derived is not None,
    ) -> CutStep:
        """The cut for a batch.

        A trace takes all ranks. Each has its own earlier traces, with other modules run for real,
        and may derive what another cannot: nothing is derived unless all have derived the same.

        Args:
            state: Name of the step, whether it trains, and the state of the module.
            batch: Signature of the batch.
            home: Where the weights are.
            trace: Traces the step on this batch, with what is remembered of units or without.
            ways: Whether the step may take another way than it did.
            agree: Whether all ranks have derived this cut. Each asks at the same batches, also
                with None, for nothing.
        """
        key = (state, batch)
        if key in self._cuts:
            self._cuts.move_to_end(key)
            return self._cuts[key]
        family = self._family(state, batch)
        trusted = self.derives and family.is_trusted(batch.sizes)
        derived = self._derived(family, key, batch) if trusted else None
        if trusted and agree(derived) and derived is not None:
            return self._keep(key, derived)
        seen = trace(self.memo if trusted else None)
        cut, placement = lay(seen, home, training=state[1])
        step = self._prepared(
            cut,
            placement,
            home,
            unproven=key if seen.repeated else None,
            restless=ways.are_open(state[:2]),
        )
        family.add(Sample(batch.sizes, seen, step))
        return self._keep(key, step)

    def _derived(self, family: Family, key: Hashable, batch: Signature) -> CutStep | None:
        """The cut as it follows from this rank's earlier traces; None if it does not."""
        found = family.derive(batch.sizes)
        if found is None:
            return None
        like: CutStep = found.made
        cut = like.cut.with_shapes_of(found.trace)
        programs = {stage: program.at(cut) for stage, program in like.programs.items()}
        return replace(like, cut=cut, programs=programs, unproven=key)

    def along(
        self,
        way: Hashable | None,
        state: tuple[str, bool, Hashable],
        batch: Signature,
        home: Home,
        trace: Callable[..., Trace],
    ) -> CutStep:
        """The cut for a micro-batch that takes a way of its own.

        Args:
            way: Its way; None if only a trace can tell.
            state: Name of the step, whether it trains, and the state of the module.
            batch: Signature of the micro-batch.
            home: Where the weights are.
            trace: Traces the step on it; takes `memo`.
        """
        key: Any = (state, batch, way)
        if way is not None and key in self._cuts:
            self._cuts.move_to_end(key)
            return self._cuts[key]
        family = self._family(state, batch)
        seen = trace(memo=self.memo if family.is_trusted(batch.sizes) else None)
        self.memo.learn(self._module, seen)
        key = (state, batch, way or seen.digest_text())
        if key in self._cuts:
            return self._cuts[key]
        cut, placement = lay(seen, home, training=state[1], along=True)
        step = self._prepared(
            cut, placement, home, unproven=key if seen.repeated else None, way=key[2]
        )
        return self._keep(key, step)

    def take_new(self) -> list[CutStep]:
        """The cuts that were made since this was asked the last time."""
        new, self._new = self._new, []
        return new

    def confirm(self, cuts: Iterable[CutStep]) -> None:
        """What was derived has run and was right."""
        for cut in cuts:
            if cut.unproven is not None and self._cuts.get(cut.unproven) is cut:
                state, batch = cut.unproven[:2]
                self._family(state, batch).confirm()
                self._cuts[cut.unproven] = cut.confirmed()

    def reject(self, cuts: Iterable[CutStep]) -> None:
        """What was derived was wrong on one of the ranks: it is traced in full the next time."""
        for key in dict.fromkeys(cut.unproven for cut in cuts if cut.unproven is not None):
            self._cuts.pop(key, None)
            state, batch = key[:2]
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
        self._new.append(cut)
        if len(self._cuts) > _MAX_CUTS:
            self._cuts.popitem(last=False)
        return cut

    def _prepared(
        self,
        cut: StepCut,
        placement: tuple[int, ...],
        home: Home,
        *,
        unproven: Any = None,
        restless: bool = False,
        way: Hashable = None,
    ) -> CutStep:
        prepared = CutStep(
            cut,
            placement,
            changing_places(cut.trace),
            buffers_outside(self._module, cut.trace),
            unproven=unproven,
            restless=restless,
            way=way,
        )
        for stage, rank in enumerate(placement):
            if rank == self._position:
                prepared.programs[stage] = StageProgram(
                    cut,
                    stage,
                    self._module,
                    device_type=self._device_type,
                    watch=unproven is not None or restless,
                    again=home.again,
                    generators=self.generators,
                    compiled=self._compiled,
                )
        return prepared


def lay(
    trace: Trace, home: Home, *, training: bool, along: bool = False
) -> tuple[StepCut, tuple[int, ...]]:
    """Lays a step over the stages that hold its units; returns it and the position of each stage.

    Args:
        trace: The step.
        home: Where the weights are.
        training: Whether it goes backward too.
        along: Whether it is one of several ways, which should all run on the same stages.

    Raises:
        CutError: The units are called in an order that no training schedule runs.
    """
    if [c.unit for c in trace.calls] == [c.unit for c in home.cut.trace.calls]:
        cut = StepCut(trace, place(trace, home.starts), num_stages=home.cut.num_stages)
        return cut, home.stage_to_rank
    segments = place_like(trace, home.stages_of_unit, num_stages=home.cut.num_stages)
    ranks = home.stage_to_rank
    in_order = list(segments.home) == sorted(set(segments.home))
    if not training and not (along and in_order):
        cut = StepCut(trace, segments.segment_of_call, num_stages=len(segments.home))
        return cut, tuple(ranks[stage] for stage in segments.home)
    if not in_order:
        raise CutError(
            "this batch takes another way through the model than the first one: its units are "
            f"called in the order of the stages {segments.home}, which no schedule runs. Give "
            "batches that call the same units in the same order"
        )
    stages = tuple(segments.home[segment] for segment in segments.segment_of_call)
    return StepCut(trace, stages, num_stages=home.cut.num_stages), ranks
