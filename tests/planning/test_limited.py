"""Cuts under a memory limit and with priced communication: exact, against brute force."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.balance import loads, partition
from lightning_pipe.planning.limited import best_cuts, smallest_peak

numbers = st.integers(0, 20)


@given(
    units=st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=8),
    num_parts=st.integers(1, 4),
    cap=st.integers(5, 60),
    weights=st.lists(st.integers(1, 3), min_size=4, max_size=4),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_no_cut_is_better(
    units: list[tuple[int, int, int]], num_parts: int, cap: int, weights: list[int]
) -> None:
    """Of all cuts: within the memory, the slowest part as fast as can be, then the most even."""
    num_units = len(units)
    if num_units < num_parts:
        with pytest.raises(PlanError, match=f"{num_parts} stages out of {num_units} units"):
            best_cuts([1.0] * num_units, num_parts)
        return

    def extra(part: int, start: int, end: int) -> float:
        sent = units[end - 1][1] if end < num_units else 0
        return sent * weights[part] + (units[start - 1][1] if start else 0)

    def allowed(part: int, start: int, end: int) -> bool:
        return sum(unit[2] for unit in units[start:end]) * weights[part] <= cap

    def judge(starts: tuple[int, ...]) -> tuple[float, float]:
        edges = [*starts, num_units]
        costs = [
            sum(unit[0] for unit in units[a:b]) + extra(part, a, b)
            for part, (a, b) in enumerate(itertools.pairwise(edges))
        ]
        return max(costs), sum(cost * cost for cost in costs)

    legal = [
        starts
        for cuts in itertools.combinations(range(1, num_units), num_parts - 1)
        for starts in [(0, *cuts)]
        if all(
            allowed(part, a, b)
            for part, (a, b) in enumerate(itertools.pairwise([*starts, num_units]))
        )
    ]
    found = best_cuts([unit[0] for unit in units], num_parts, extra=extra, allowed=allowed)
    assert (found is None) == (not legal)
    if found is not None:
        assert found in legal
        assert judge(found) == pytest.approx(min(judge(starts) for starts in legal))


def test_without_extras_it_is_the_partition() -> None:
    rng = random.Random(0)
    for _ in range(100):
        costs = [rng.choice([0, 1, 2, 5]) for _ in range(rng.randint(3, 12))]
        ours, known = best_cuts(costs, 3), partition(costs, 3)
        assert ours is not None
        assert sorted(loads(costs, ours)) == sorted(loads(costs, known))


def test_many_units_are_fast() -> None:
    rng = random.Random(1)
    costs = [rng.random() for _ in range(400)]
    begin_s = time.process_time()
    starts = best_cuts(
        costs,
        64,
        extra=lambda part, start, end: 0.01 * (end % 3),
        allowed=lambda part, start, end: end - start < 30,
    )
    assert time.process_time() - begin_s < 1.0
    assert starts is not None


def test_the_smallest_peak() -> None:
    assert smallest_peak(5, 2, lambda part, start, end: (end - start) * (2 - part)) == (0, 1)
