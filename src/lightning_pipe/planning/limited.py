"""Where to cut if more than a sum counts: communication at the cuts, and what fits in memory.

``balance.partition`` minimises sums and is faster. Here a part also pays for what it sends, which
may differ from cut to cut and from rank to rank, and some runs of units are not allowed at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.balance import partition
from lightning_pipe.planning.profile import prefix_sums

__all__ = ["PartSize", "best_cuts", "smallest_peak"]

PartCost = Callable[[int, int, int], float]
"""(part, start, end) -> what the part pays beside its units."""
PartSize = Callable[[int, int, int], float]
"""(part, start, end) -> bytes that the part holds; never fewer with a larger end."""
PartAllowed = Callable[[int, int, int], bool]
"""(part, start, end) -> whether the part may be so; once not, then neither with a larger end."""

_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class _Problem:
    sums: Sequence[float]
    num_parts: int
    extra: PartCost
    allowed: PartAllowed
    #: whether a part never costs less with a larger end
    grows: bool = False

    @property
    def num_units(self) -> int:
        return len(self.sums) - 1

    def cost(self, part: int, start: int, end: int) -> float:
        return self.sums[end] - self.sums[start] + self.extra(part, start, end)

    def ends(self, part: int, start: int) -> range:
        """The ends of a part that leave units for the parts behind it."""
        last = self.num_units - (self.num_parts - part - 1)
        first = self.num_units if part == self.num_parts - 1 else start + 1
        return range(first, last + 1)


def best_cuts(
    costs: Sequence[float],
    num_parts: int,
    *,
    extra: PartCost = lambda part, start, end: 0.0,
    allowed: PartAllowed = lambda part, start, end: True,
) -> tuple[int, ...] | None:
    """Cuts so that the costliest part is as cheap as possible, exactly; then the parts as even.

    Args:
        costs: Cost of each unit.
        num_parts: Parts to make.
        extra: What a part pays beside its units, such as what it sends; not negative.
        allowed: Whether a part may hold these units.

    Returns:
        The index of the first unit of each part; None if no cut is allowed.

    Raises:
        PlanError: Fewer units than parts.

    >>> best_cuts([1, 1, 1, 1], 2)
    (0, 2)
    >>> best_cuts([1, 1, 1, 1], 2, extra=lambda part, start, end: 3.0 if end == 2 else 0.0)
    (0, 1)
    >>> best_cuts([1, 1, 1, 1], 2, allowed=lambda part, start, end: part > 0 or end - start < 2)
    (0, 1)
    """
    problem = _Problem(prefix_sums(costs), num_parts, extra, allowed)
    starts = partition(costs, num_parts)
    ends = [*starts[1:], len(costs)]
    limit = max(problem.cost(k, starts[k], ends[k]) for k in range(num_parts)) * _ROUNDING
    highest = problem.sums[-1] + max(limit, 1.0) * 4
    while True:
        best = _minimax(problem, limit)
        if best is not None:
            return _evenest(problem, best * _ROUNDING)
        if limit > highest:
            best = _minimax(problem, math.inf)
            return None if best is None else _evenest(problem, best * _ROUNDING)
        limit = limit * 2 if limit else 1.0


def _parts(
    problem: _Problem, part: int, starts: Iterable[int], limit: float
) -> Iterator[tuple[int, int, float]]:
    """(start, end, cost) of everything that a part may be under the limit."""
    sums = problem.sums
    for start in starts:
        for end in problem.ends(part, start):
            if sums[end] - sums[start] > limit or not problem.allowed(part, start, end):
                break
            cost = problem.cost(part, start, end)
            if cost <= limit:
                yield start, end, cost
            elif problem.grows:
                break


def _minimax(problem: _Problem, limit: float) -> float | None:
    """The cost of the costliest part of the best cut, if that is not above the limit."""
    num_units = problem.num_units
    best = [math.inf] * (num_units + 1)
    best[0] = 0.0
    for part in range(problem.num_parts):
        now = [math.inf] * (num_units + 1)
        starts = [start for start in range(part, num_units) if best[start] < math.inf]
        for start, end, cost in _parts(problem, part, starts, limit):
            now[end] = min(now[end], max(best[start], cost))
        best = now
    return best[num_units] if best[num_units] < math.inf else None


def _evenest(problem: _Problem, limit: float) -> tuple[int, ...]:
    """The cut of the smallest sum of squares under the limit."""
    num_units = problem.num_units
    best = [math.inf] * (num_units + 1)
    best[0] = 0.0
    choices: list[list[int]] = []
    for part in range(problem.num_parts):
        now, choice = [math.inf] * (num_units + 1), [0] * (num_units + 1)
        starts = [start for start in range(part, num_units) if best[start] < math.inf]
        for start, end, cost in _parts(problem, part, starts, limit):
            squares = best[start] + cost * cost
            if squares < now[end]:
                now[end], choice[end] = squares, start
        best = now
        choices.append(choice)
    if best[num_units] == math.inf:
        raise PlanError(f"no cut keeps every part at or under {limit}")
    found, end = [], num_units
    for choice in reversed(choices):
        end = choice[end]
        found.append(end)
    return tuple(reversed(found))


def smallest_peak(num_units: int, num_parts: int, size: PartSize) -> tuple[int, ...]:
    """Cuts so that the largest part is as small as possible, whatever a size is.

    Args:
        num_units: Units to cut.
        num_parts: Parts to make.
        size: (part, start, end) -> the size of a part; never smaller with a larger end.
    """
    # a cut by what each unit has alone is near enough to leave little to search
    alone = [size(num_parts - 1, unit, unit + 1) for unit in range(num_units)]
    starts = partition(alone, num_parts)
    ends = [*starts[1:], num_units]
    limit = max(size(k, starts[k], ends[k]) for k in range(num_parts)) * _ROUNDING
    nothing = [0.0] * (num_units + 1)
    problem = _Problem(nothing, num_parts, size, lambda part, start, end: True, grows=True)
    best = _minimax(problem, limit)
    assert best is not None, "the cut that the limit is of"
    return _evenest(problem, best * _ROUNDING)
