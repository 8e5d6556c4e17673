"""Where to cut: which units make which stage.

Every function returns ``starts``: the index of the first unit of each part, so ``starts[0] == 0``
and part k is ``starts[k] .. starts[k + 1] - 1``. No part is ever empty and no unit is ever lost.
Costs are numbers in any one unit (seconds, FLOPs, bytes, parameters); only their ratio matters
here.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from lightning_pipe.errors import PlanError

__all__ = ["at_names", "explicit", "loads", "partition", "uniform"]


def partition(costs: Sequence[float], num_parts: int, *, min_per_part: int = 1) -> tuple[int, ...]:
    """Cuts a sequence so that the heaviest part is as light as possible, exactly.

    Among the cuts that reach the minimum it takes the smallest sum of squares, so the other parts
    are even too, and among those the one that starts parts earliest, since early stages hold more
    micro-batches in flight. Sums are exact (integers), whatever the magnitudes.

    Args:
        costs: Cost of each unit, finite and not negative.
        num_parts: Parts to make.
        min_per_part: Units that each part gets at least.

    Returns:
        The index of the first unit of each part, ``num_parts`` of them.

    Raises:
        PlanError: Too few units for so many parts, or a cost that is not a finite number >= 0.

    >>> partition([8, 1, 1, 1, 1, 8], 4)
    (0, 1, 3, 5)
    >>> partition([8, 1, 1, 1, 1, 8], 2)
    (0, 3)
    """
    _check_counts(len(costs), num_parts, min_per_part)
    sums = [0, *accumulate(_as_integers(costs))]
    limit = _smallest_limit(sums, num_parts, min_per_part)
    return _evenest(sums, num_parts, min_per_part, limit)


def uniform(num_units: int, num_parts: int) -> tuple[int, ...]:
    """Cuts by count: parts differ by one unit at most; later parts take the remainder.

    Raises:
        PlanError: Fewer units than parts.

    >>> uniform(10, 3)
    (0, 3, 6)
    """
    _check_counts(num_units, num_parts, 1)
    return tuple(num_units * part // num_parts for part in range(num_parts))


_LISTED = 40  # names of units that a message lists


def _listed(names: Sequence[str]) -> str:
    if len(names) <= _LISTED:
        return ", ".join(names)
    half = _LISTED // 2
    return f"{', '.join(names[:half])}, ..., {', '.join(names[-half:])}"


def explicit(counts: Sequence[int], num_units: int, names: Sequence[str] = ()) -> tuple[int, ...]:
    """Cuts where the user says: ``counts[k]`` units in part k.

    Args:
        counts: Units of each part.
        num_units: Units of the model.
        names: Their names, for the message.

    Raises:
        PlanError: A part would be empty, or the counts do not sum to ``num_units``.

    >>> explicit([2, 1, 1, 2], 6)
    (0, 2, 3, 4)
    """
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise PlanError(
            f"balance={list(counts)}: every stage needs a whole number of units, 1 at least"
        )
    if not counts or sum(counts) != num_units:
        units = f" ({_listed(names)})" if names else ""
        raise PlanError(
            f"balance={list(counts)}: the counts sum to {sum(counts)}, but the model has "
            f"{num_units} units{units}; list one count per stage that together make the model"
        )
    return (0, *accumulate(counts[:-1]))


def at_names(names: Sequence[str], split_points: Sequence[str]) -> tuple[int, ...]:
    """Cuts *after* the named units; a name stands for a unit or for a container of units.

    Args:
        names: Dotted name of each unit in the order of their calls; a unit called twice is there
            twice.
        split_points: Names after which a stage ends, in order. After the last call of a name that
            occurs more than once.

    Raises:
        PlanError: A name is unknown, out of order, repeated, or the last unit (after which no stage
            would follow).

    >>> at_names(["embed", "blocks.0", "blocks.1", "head"], ["embed", "blocks"])
    (0, 1, 3)
    """
    starts = [0]
    for point in split_points:
        found = [i for i, name in enumerate(names) if name == point or name.startswith(f"{point}.")]
        if not found:
            raise PlanError(
                f"split_points: {point!r} is not among the {len(names)} units; they are "
                f"{_listed(names)}"
            )
        start = found[-1] + 1
        if start >= len(names):
            raise PlanError(
                f"split_points: {point!r} ends the model at unit {found[-1]} of {len(names)}, so "
                "the next stage would be empty; leave it out"
            )
        if start <= starts[-1]:
            raise PlanError(
                f"split_points: {point!r} (unit {found[-1]}) does not come after the cut before "
                f"it (unit {starts[-1] - 1}); name them once each, in the order in which the step "
                "calls them"
            )
        starts.append(start)
    return tuple(starts)


def loads(costs: Sequence[float], starts: Sequence[int]) -> tuple[float, ...]:
    """The cost of each part.

    >>> loads([8, 1, 1, 1, 1, 8], (0, 1, 3, 5))
    (8, 2, 2, 8)
    """
    ends = [*starts[1:], len(costs)]
    return tuple(sum(costs[start:end]) for start, end in zip(starts, ends, strict=True))


def _check_counts(num_units: int, num_parts: int, min_per_part: int) -> None:
    if num_parts < 1 or min_per_part < 1:
        raise PlanError(
            f"cannot make {num_parts} stages of {min_per_part} units; both must be 1 at least"
        )
    if num_units < num_parts * min_per_part:
        each = f" of {min_per_part} units each" if min_per_part > 1 else ""
        raise PlanError(
            f"cannot make {num_parts} stages{each} out of {num_units} units; use at most "
            f"{num_units // min_per_part} stages"
        )


def _as_integers(costs: Sequence[float]) -> list[int]:
    """The same costs times a common power of two, exactly."""
    for unit, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise PlanError(f"the cost of unit {unit} is {cost}; it must be a finite number >= 0")
    ratios = [cost.as_integer_ratio() for cost in costs]
    scale = math.lcm(*(denominator for _, denominator in ratios))
    return [numerator * (scale // denominator) for numerator, denominator in ratios]


def _smallest_limit(sums: Sequence[int], num_parts: int, min_per_part: int) -> int:
    """The smallest number that some cut keeps all part sums under or at; by bisection."""
    low, high = -(-sums[-1] // num_parts), sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(sums, num_parts, min_per_part, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(sums: Sequence[int], num_parts: int, min_per_part: int, limit: int) -> bool:
    """Whether some cut has no part above the limit."""
    num_units = len(sums) - 1
    if (
        min_per_part == 1
    ):  # filling each part to the brim is then best; parts left over split others
        end = 0
        for _ in range(num_parts):
            end = bisect_right(sums, sums[end] + limit) - 1
            if end == num_units:
                return True
        return False
    reachable = [True] + [False] * num_units
    for _ in range(num_parts):
        counts = [0, *accumulate(reachable)]
        reachable = [
            end >= min_per_part
            and counts[end - min_per_part + 1]
            > counts[_first_start(sums, end, min_per_part, limit)]
            for end in range(num_units + 1)
        ]
    return reachable[num_units]


def _first_start(sums: Sequence[int], end: int, min_per_part: int, limit: int) -> int:
    """The first start of a part that ends before ``end`` and keeps the limit (or the last legal
    start plus one)."""
    return min(bisect_left(sums, sums[end] - limit), max(end - min_per_part + 1, 0))


def _evenest(sums: Sequence[int], num_parts: int, min_per_part: int, limit: int) -> tuple[int, ...]:
    """The cut of the smallest sum of squares under the limit, built from the back; first starts
    smallest."""
    num_units = len(sums) - 1
    # best[i]: the smallest sum of squares that makes `parts` parts of units i..; starts at parts
    # = 0
    best: list[int | None] = [None] * num_units + [0]
    choices: list[list[int]] = []
    for _ in range(num_parts):
        now: list[int | None] = [None] * (num_units + 1)
        choice = [0] * (num_units + 1)
        for start in range(num_units - min_per_part, -1, -1):
            last_end = bisect_right(sums, sums[start] + limit) - 1
            for end in range(start + min_per_part, last_end + 1):
                rest = best[end]
                if rest is None:
                    continue
                squares = rest + (sums[end] - sums[start]) ** 2
                known = now[start]
                if known is None or squares < known:
                    now[start], choice[start] = squares, end
        best = now
        choices.append(choice)
    starts = [0]
    for choice in reversed(choices[1:]):
        starts.append(choice[starts[-1]])
    return tuple(starts)
