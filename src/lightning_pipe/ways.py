"""Steps that decide which units they call: layer drop, stochastic depth, exits by the batch.

A step is *restless* if it draws numbers that Python sees between its units, or asks the batch and
calls other units for another answer. Most such steps always take one way (mixup, masks): they run
on the cut of that way, watched, and a step that leaves it is undone. Once it is known that ways
*vary*, each micro-batch is looked at before it runs: its draws and its rows are known beforehand,
and so is its way, on all ranks. Each way has a cut of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.paths import Paths, TraceWith, ask, explore
from lightning_pipe.split.rng import Salts
from lightning_pipe.split.trace import Trace

#: name of a step, and whether it trains
Step = tuple[str, bool]


class Ways:
    """What is known of the ways of the steps of one module."""

    def __init__(self) -> None:
        self._restless: set[Step] = set()
        self._varying: set[Step] = set()

    def note(self, step: Step, trace: Trace) -> None:
        """Learns from a trace."""
        if trace.restless and step not in self._restless:
            self._restless.add(step)
            if self._varying:  # one that is known to vary speaks for the others
                self._varying.add(step)

    def are_open(self, step: Step) -> bool:
        """Whether the step may take a way that nobody has seen."""
        return step in self._restless and step not in self._varying

    def vary(self, step: Step) -> bool:
        """Whether micro-batches are to be looked at before they run."""
        return step in self._varying

    def varies(self, step: Step) -> None:
        """The step took another way than its cut."""
        self._varying.add(step)


def look_around(
    module: nn.Module, first: Trace, memo: UnitMemo, trace: Callable[..., Trace]
) -> Paths:
    """Looks for the ways of a step before it is cut.

    Args:
        module: The user's module, whole.
        first: The first trace of the step.
        memo: Where to remember what units do.
        trace: Traces the step: takes `key`, `salts`, `instead`, `like` and `memo`.

    Raises:
        CutError: Its ways depend on values of units too.
    """
    memo.learn(module, first)

    def other(key: int, salts: Salts, instead: Mapping[int, int] | None = None) -> Trace:
        found = trace(key=key, salts=salts, instead=instead, like=first, memo=memo)
        memo.learn(module, found)
        return found

    make: TraceWith = other
    paths = explore(first, make) if first.draws else Paths(first, seen=[first])
    ask(paths, make)
    if paths.vary:
        for seen in paths.seen:
            if any(segment < len(seen.calls) for segment, _ in seen.read_values):
                raise CutError(
                    "the step decides by random numbers or by the batch which modules it calls, "
                    "and reads values that modules compute between them (.item(), a condition on "
                    "a tensor): which modules a micro-batch calls would be known on one stage "
                    "only. Decide by random numbers or the batch only, or put the module that is "
                    "called or not, and what decides it, into one module."
                )
        steered = any(seen.steered for seen in paths.seen)
        if paths.best is not first:
            paths.best = trace(
                key=paths.key, salts=paths.salts, instead=paths.instead, like=None, memo=None
            )
        for seen in (first, paths.best):
            seen.steered = steered
    return paths


def more_parameters(
    module: nn.Module, paths: Paths, homes: Mapping[str, Iterable[int]], cut: StepCut
) -> list[frozenset[str]]:
    """For every stage the parameters that it may read on other ways than that of the cut.

    Those that the code between units reads are on all stages: which stage reads them depends on
    the way.
    """
    first = {id(p): n for n, p in module.named_parameters()}
    glue = frozenset().union(*(seen.glue_parameters for seen in paths.seen))
    found = [set(glue) for _ in range(cut.num_stages)]
    for unit, stages in homes.items():
        names = {first[id(p)] for p in module.get_submodule(unit).parameters()}
        for seen in paths.seen:
            names |= seen.glue_reads_by_unit.get(unit, frozenset())
        for stage in stages:
            found[stage] |= names
    return [frozenset(names) for names in found]
