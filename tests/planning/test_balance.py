"""Cuts: every unit once, no empty part, the exact minimum (against brute force)."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.balance import at_names, explicit, loads, partition, uniform


def brute_force(costs: list[float], num_parts: int, min_per_part: int) -> tuple[float, float]:
    """The smallest (max, sum of squares) over all cuts."""
    best: list[tuple[float, float]] = []
    for cuts in itertools.combinations(range(1, len(costs)), num_parts - 1):
        edges = [0, *cuts, len(costs)]
        if min(b - a for a, b in itertools.pairwise(edges)) >= min_per_part:
            sums = loads(costs, edges[:-1])
            best.append((max(sums), sum(s * s for s in sums)))
    return min(best)


@pytest.mark.parametrize("min_per_part", [1, 2, 3])
def test_exact_against_brute_force(min_per_part: int) -> None:
    rng = random.Random(min_per_part)
    for _ in range(700):
        num_units = rng.randint(min_per_part, 10)
        num_parts = rng.randint(1, num_units // min_per_part)
        costs = [float(rng.choice([0, 1, 1, 2, 3, 8, 40])) for _ in range(num_units)]
        starts = partition(costs, num_parts, min_per_part=min_per_part)
        sums = loads(costs, starts)
        assert starts[0] == 0
        assert len(starts) == num_parts
        edges = [*starts, num_units]
        assert min(b - a for a, b in itertools.pairwise(edges)) >= min_per_part
        assert (max(sums), sum(s * s for s in sums)) == brute_force(costs, num_parts, min_per_part)


@pytest.mark.parametrize(
    ("num_units", "num_parts", "most"), [(5, 4, 2), (10, 3, 4), (30, 4, 8), (38, 8, 5), (7, 4, 2)]
)
def test_equal_units_leave_no_stage_empty(num_units: int, num_parts: int, most: int) -> None:
    for starts in (partition([1] * num_units, num_parts), uniform(num_units, num_parts)):
        sizes = loads([1] * num_units, starts)
        assert (sum(sizes), max(sizes)) == (num_units, most)
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


def test_embedding_and_head_stand_alone() -> None:
    costs = [8, 1, 1, 1, 1, 8]
    assert loads(costs, partition(costs, 4)) == (8, 2, 2, 8)
    assert loads(costs, partition(costs, 2)) == (10, 10)


def test_costs_of_any_magnitude_are_summed_exactly() -> None:
    assert partition([0.1, 0.1, 0.1, 0.1], 2) == (0, 2)
    assert partition([1e300, 1e-300, 1e300], 2) == (0, 1)
    assert partition([0.0, 0.0, 0.0], 3) == (0, 1, 2)
    assert partition([10**40, 1, 1, 10**40], 2) == (0, 2)


def test_many_units_are_fast() -> None:
    rng = random.Random(1)
    costs = [rng.random() for _ in range(400)]
    start_s = time.process_time()
    starts = partition(costs, 64)
    assert time.process_time() - start_s < 1.0
    assert max(loads(costs, starts)) < 1.5 * sum(costs) / 64


@pytest.mark.parametrize(
    ("num_units", "num_parts", "min_per_part", "message"),
    [
        (2, 4, 1, "cannot make 4 stages out of 2 units; use at most 2 stages"),
        (5, 3, 2, "cannot make 3 stages of 2 units each out of 5 units; use at most 2"),
        (5, 0, 1, "cannot make 0 stages"),
    ],
)
def test_more_stages_than_units_names_both(
    num_units: int, num_parts: int, min_per_part: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        partition([1] * num_units, num_parts, min_per_part=min_per_part)


def test_uniform_names_both_too() -> None:
    with pytest.raises(PlanError, match="4 stages out of 2 units"):
        uniform(2, 4)


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(PlanError, match=f"the cost of unit 1 is {cost}"):
        partition([1.0, cost], 1)


def test_explicit_counts_are_obeyed() -> None:
    assert explicit([2, 1, 1, 2], 6) == (0, 2, 3, 4)
    assert explicit([3], 3) == (0,)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([2, 1, 1, 1], "sum to 5, but the model has 6 units"),
        ([], "sum to 0, but the model has 6 units"),
        ([6, 0], r"balance=\[6, 0\]: every stage needs"),
        ([5, True], "whole number of units"),
        ([5.0, 1], "whole number of units"),
    ],
)
def test_wrong_counts_are_refused(counts: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        explicit(counts, 6)


NAMES = ["embed", "blocks.0", "blocks.1", "blocks.10", "norm", "blocks.1", "head"]


def test_names_cut_after_their_last_call() -> None:
    assert at_names(NAMES, ["embed", "norm"]) == (0, 1, 5)
    assert at_names(NAMES, ["blocks.0", "blocks.1"]) == (0, 2, 6)
    assert at_names(NAMES, ["blocks"]) == (0, 6)
    assert at_names(NAMES, []) == (0,)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (["block"], "'block' is not among the 7 units; they are embed, blocks.0"),
        (["norm", "embed"], r"'embed' \(unit 0\) does not come after the cut before it \(unit 4\)"),
        (["norm", "norm"], r"'norm' \(unit 4\) does not come after"),
        (["head"], "'head' ends the model at unit 6 of 7"),
    ],
)
def test_names_that_cannot_cut(points: list[str], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        at_names(NAMES, points)


def test_messages_list_the_units_and_not_hundreds_of_them() -> None:
    with pytest.raises(PlanError, match=r"the model has 3 units \(a, b, c\); list one count"):
        explicit([1, 1], 3, ["a", "b", "c"])
    names = [f"blocks.{i}" for i in range(500)]
    for ask in (lambda: explicit([1, 1], 500, names), lambda: at_names(names, ["block"])):
        with pytest.raises(PlanError) as raised:
            ask()
        assert "blocks.0, blocks.1, " in str(raised.value)
        assert ", ..., blocks.480, " in str(raised.value)
        assert len(str(raised.value)) < 700
