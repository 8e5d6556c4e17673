"""The ways that a step with random depth may take: which units it calls, and in which order.

Where the step draws numbers between its units (layer drop, stochastic depth), or asks the batch
(an early exit), another micro-batch may call other units than the one that was traced. All of them
need a home before training. So the step is traced with other numbers and other answers too: until a
way is found that calls every unit that was seen, if there is one, and enough to know in which order
units come.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from lightning_pipe.errors import CutError
from lightning_pipe.split.rng import Salts
from lightning_pipe.split.trace import Trace

_KEYS = 8  # traces with other random keys
_SALTS = 6  # other numbers at one place
_MOST_TRACES = 64
_QUESTIONS = 8  # reads of the batch that are answered in another way

#: number of a read of the batch to what it is taken for
Answers = Mapping[int, int]


class TraceWith(Protocol):
    """Traces the step with other random numbers."""

    def __call__(self, key: int, salts: Salts, instead: Answers | None = None) -> Trace:
        """Trace with a random key, other seeds at some places, and other answers of the batch."""


@dataclass(slots=True)
class Paths:
    """What was seen of the ways of a step.

    Attributes:
        best: The trace that calls most units.
        key: Its random key.
        salts: Its seeds at some places.
        instead: Its answers of the batch.
        seen: All traces.
    """

    best: Trace
    key: int = 0
    salts: Salts = field(default_factory=dict)
    instead: Answers = field(default_factory=dict)
    seen: list[Trace] = field(default_factory=list)

    @property
    def vary(self) -> bool:
        """Whether the step takes several ways."""
        return any(_steps(trace) != _steps(self.best) for trace in self.seen)

    def digest_text(self) -> str:
        """A text that is equal on two ranks exactly if they saw the same ways."""
        return self.best.digest_text() + repr([trace.unit_names for trace in self.seen])

    def order(self) -> list[str]:
        """All units in the order in which they are called; by their names' where that is open."""
        return merged_order([trace.unit_names for trace in self.seen], self.best.units)

    def homes(self, stages: Mapping[str, Iterable[int]]) -> dict[str, frozenset[int]]:
        """Give each unit that the best trace does not call the stage of the one before it.

        These are the units of other traces, and those beside them that were never drawn.

        Args:
            stages: Stages of the units that it calls.

        Raises:
            CutError: A way that was seen goes back to an earlier stage.
        """
        seen_units = {unit for trace in self.seen for unit in trace.unit_names}
        lists = {unit.rpartition(".")[0] for unit in seen_units}
        homes: dict[str, frozenset[int]] = {}
        here = 0
        for unit in self.order():
            known = frozenset(stages.get(unit, ()))
            here = max(known, default=here)
            if unit in seen_units or unit.rpartition(".")[0] in lists:
                homes[unit] = known or frozenset((here,))
        for trace in self.seen:
            at = 0
            for call in trace.calls:
                choices = [stage for stage in homes[call.unit] if stage >= at]
                if not choices:
                    raise CutError(
                        "the step decides by random numbers or by the batch in which order its "
                        f"units are called, and '{call.unit}' comes before and after units of "
                        "other stages: "
                        "no schedule runs that. Keep the order and leave units out only, or put "
                        "the modules whose order changes into one module that split_points keep "
                        "whole."
                    )
                at = min(choices)
        return homes


def merged_order(paths: Sequence[Sequence[str]], units: Sequence[str]) -> list[str]:
    """Merge orders of some of the units into one of all.

    >>> merged_order([["a", "d"], ["a", "b", "d"]], ["a", "b", "c", "d"])
    ['a', 'b', 'c', 'd']
    """
    number = {unit: index for index, unit in enumerate(units)}
    after: dict[str, set[str]] = {unit: set() for unit in units}
    before: dict[str, set[str]] = {unit: set() for unit in units}
    for path in paths:
        for one, other in pairwise(path):
            after[one].add(other)
            before[other].add(one)
    ready = [number[unit] for unit in units if not before[unit]]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        unit = units[heapq.heappop(ready)]
        order.append(unit)
        for other in after[unit]:
            before[other].discard(unit)
            if not before[other]:
                heapq.heappush(ready, number[other])
    left = set(units).difference(order)  # there is a circle
    return order + [unit for unit in units if unit in left]


def explore(first: Trace, trace: TraceWith) -> Paths:
    """Look for other ways of a step that draws numbers.

    Args:
        first: The trace with key 0.
        trace: Makes others; the same ones on every rank.
    """
    paths = Paths(first, seen=[first])
    for key in range(1, _KEYS + 1):
        _note(paths, trace(key, {}), key, {})
    if paths.vary:
        _climb(paths, trace)
    return paths


def _climb(paths: Paths, trace: TraceWith) -> None:
    """Change the numbers where a unit is passed over, from the first call to the last."""
    here, key, salts = paths.best, paths.key, dict(paths.salts)
    place = 0
    while place <= len(here.calls) and len(paths.seen) < _MOST_TRACES:
        rank = {unit: index for index, unit in enumerate(paths.order())}
        known = frozenset().union(*(seen.unit_names for seen in paths.seen))
        if known <= set(here.unit_names):
            return
        names = [call.unit for call in here.calls]
        low = rank[names[place - 1]] if place else -1
        high = rank[names[place]] if place < len(names) else len(rank)
        passed = [u for u in known - set(names) if low < rank[u] < high]
        for salt in range(1, _SALTS + 1) if passed else ():
            tried = {**salts, place: salt}
            other = trace(key, tried)
            _note(paths, other, key, tried)
            found = [call.unit for call in other.calls]
            nearer = place < len(found) and rank.get(found[place], high) < high
            if nearer and found[:place] == names[:place]:
                here, salts = other, tried
                break
        place += 1


def ask(paths: Paths, trace: TraceWith) -> None:
    """Look for other ways of a step that asks the batch: what if it had answered otherwise?

    What calls the same units is no other way, and what fails is none at all.

    Args:
        paths: What was seen by now.
        trace: Makes others; the same ones on every rank.
    """
    here, instead = paths.best, dict(paths.instead)
    asked = 0
    while asked < min(len(here.batch_reads), _QUESTIONS) and len(paths.seen) < _MOST_TRACES:
        for answer in _others(here.batch_reads[asked]):
            tried = {**instead, asked: answer}
            try:
                other = trace(paths.key, paths.salts, tried)
            except Exception:
                continue
            if [c.unit for c in other.calls] == [c.unit for c in here.calls]:
                continue
            here.steered = other.steered = True
            paths.seen.append(other)
            if len(other.unit_names) > len(paths.best.unit_names):
                paths.best = here = other
                paths.instead = instead = tried
        asked += 1


def _others(answer: int) -> tuple[int, ...]:
    """Other answers to try."""
    if isinstance(answer, bool):
        return (not answer,)
    return (0, answer + 1) if answer else (1,)


def _note(paths: Paths, seen: Trace, key: int, salts: Salts) -> None:
    paths.seen.append(seen)
    if len(seen.unit_names) > len(paths.best.unit_names):
        paths.best, paths.key, paths.salts = seen, key, salts


def _steps(trace: Trace) -> tuple[object, ...]:
    """What stages go by: the calls, what they read and make, and the calls of torch between."""
    calls = tuple((call.unit, call.inputs, repr(call.leaves)) for call in trace.calls)
    return calls, trace.script[: len(trace.calls)], trace.tail_inputs
