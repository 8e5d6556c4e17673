"""Thousands of schedules without a process: all complete, all free of deadlock, all cheap to hold.

The judge here is its own small interpreter of the text form, so that the package's checker is
tested too and not only trusted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.schedules import SCHEDULES, forward_only, make_schedule
from lightning_pipe.planning.simulate import (
    bubble_parts,
    ideal_bubble_fraction,
    peak_activation_bytes,
    simulate,
)

CHUNKS = {"zbv": (2,), "dualpipev": (2,), "looped_bfs": (1, 2, 3), "interleaved_1f1b": (1, 2, 3, 4)}
NAMES = sorted(set(SCHEDULES) - {"interleaved"})


def runs(orders: list[list[str]], num_stages: int) -> bool:
    """Executes the text form, a rank at a time, until all is done or nobody can go on."""
    done: set[str] = set()
    heads = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order) and _ready(order[heads[rank]], done, num_stages):
                done.add(order[heads[rank]])
                heads[rank] += 1
                moved = True
    return all(head == len(order) for head, order in zip(heads, orders, strict=True))


def _ready(text: str, done: set[str], num_stages: int) -> bool:
    op = next(letter for letter in text if letter.isalpha())
    stage, microbatch = map(int, text.split(op))
    if op == "F":
        return stage == 0 or f"{stage - 1}F{microbatch}" in done
    if op == "W":
        return f"{stage}I{microbatch}" in done
    gradient = {f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"}
    return f"{stage}F{microbatch}" in done and (stage == num_stages - 1 or bool(gradient & done))


def texts(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, schedule.actions(rank))) for rank in range(schedule.num_ranks)]


def assert_sound(schedule: Schedule) -> None:
    """Every (stage, micro-batch) goes forward once and backward once, and the judge gets
    through."""
    orders = texts(schedule)
    counts = Counter(action for order in orders for action in order)
    assert set(counts.values()) == {1}
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            assert f"{stage}F{m}" in counts
            if schedule.has_backward:
                ops = [op for op in "BIW" if f"{stage}{op}{m}" in counts]
                assert ops in (["B"], ["I", "W"])
    assert runs(orders, schedule.num_stages)


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_complete_and_free_of_deadlock(name: str) -> None:
    for num_ranks in range(1, 8):
        chunk_counts = CHUNKS.get(name, (1, 2, 3) if num_ranks == 1 else (1,))
        for chunks in chunk_counts:
            for m in (*range(1, 16), 21, 24):
                schedule = make_schedule(
                    name,
                    num_ranks=num_ranks,
                    num_microbatches=m,
                    virtual_stages=chunks,
                    strict=False,
                )
                assert_sound(schedule)
                assert (schedule.num_ranks, schedule.num_stages) == (num_ranks, num_ranks * chunks)


@pytest.mark.parametrize("name", NAMES)
def test_large_odd_sizes(name: str) -> None:
    rng = random.Random(17)
    for _ in range(6):
        num_ranks, m = rng.randint(8, 20), rng.randint(1, 50)
        chunks = rng.choice(CHUNKS.get(name, (1,)))
        assert_sound(
            make_schedule(
                name,
                num_ranks=num_ranks,
                num_microbatches=m,
                virtual_stages=chunks,
                strict=False,
            )
        )


def test_memory_does_not_grow_with_microbatches() -> None:
    for name in ("naive", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipev"):
        held = {
            make_schedule(
                name,
                num_ranks=4,
                num_microbatches=m,
                virtual_stages=2 if CHUNKS.get(name) else 1,
                strict=False,
            ).in_flight()
            for m in (16, 32, 100)
        }
        assert len(held) == 1, name


def test_evaluation_over_any_chain() -> None:
    rng = random.Random(3)
    for _ in range(500):
        num_ranks = rng.randint(1, 6)
        placement = [rng.randrange(num_ranks) for _ in range(rng.randint(1, 12))]
        schedule = forward_only(placement, rng.randint(1, 9), num_ranks=num_ranks)
        assert schedule.stage_to_rank == tuple(placement)
        assert_sound(schedule)


def test_csv_round_trips_for_all() -> None:
    for name in NAMES:
        chunks = max(CHUNKS.get(name, (1,)))
        schedule = make_schedule(name, num_ranks=3, num_microbatches=6, virtual_stages=chunks)
        assert Schedule.from_csv(schedule.to_csv(), schedule.name) == schedule
        aligned = schedule.aligned()
        assert Schedule.from_csv(aligned.to_csv(), schedule.name) == aligned


def _damaged(rng: random.Random, orders: list[list[str]]) -> list[list[str]]:
    """One random change: two actions swapped, one dropped, repeated, or moved to another rank."""
    orders = [list(order) for order in orders]
    order = rng.choice(orders)
    first, second = rng.randrange(len(order)), rng.randrange(len(order))
    kind = rng.choice(["swap", "swap", "swap", "drop", "repeat", "move"])
    if kind == "swap":
        order[first], order[second] = order[second], order[first]
    elif kind == "drop":
        del order[first]
    elif kind == "repeat":
        order.insert(second, order[first])
    else:
        rng.choice(orders).append(order.pop(first))
    return orders


def test_damaged_schedules_are_accepted_only_if_they_run() -> None:
    rng = random.Random(29)
    accepted = refused = 0
    for _ in range(2000):
        name = rng.choice(NAMES)
        whole = make_schedule(
            name,
            num_ranks=rng.randint(1, 4),
            num_microbatches=rng.randint(1, 6),
            virtual_stages=max(CHUNKS.get(name, (1,))),
            strict=False,
        )
        orders = _damaged(rng, texts(whole))
        try:
            schedule = Schedule.from_csv("\n".join(",".join(order) or ",," for order in orders))
        except ScheduleError as error:
            refused += 1
            named = error.action
        else:
            accepted += 1
            assert_sound(schedule)
            continue
        assert named is not None or not any(orders)
        in_place = [sorted(order) for order in orders] == [sorted(o) for o in texts(whole)]
        assert not (in_place and runs(orders, whole.num_stages))
    assert accepted > 200
    assert refused > 1000


def test_time_is_bounded_below_by_work_and_the_bubble_by_its_parts() -> None:
    rng = random.Random(5)
    for _ in range(250):
        name = rng.choice(NAMES)
        chunks = max(CHUNKS.get(name, (1,)))
        schedule = make_schedule(
            name,
            num_ranks=rng.randint(1, 5),
            num_microbatches=rng.randint(1, 12),
            virtual_stages=chunks,
            strict=False,
        )
        costs = [
            StageCosts(rng.random(), rng.random(), rng.random(), rng.randint(0, 9), 1000)
            for _ in range(schedule.num_stages)
        ]
        link = LinkCosts(rng.random() / 10, 1e5)
        timeline = simulate(schedule, costs, link)
        for rank in range(schedule.num_ranks):
            work_s = sum(costs[stage].total_s for stage in schedule.stages(rank))
            assert timeline.busy_s(rank) == pytest.approx(work_s * schedule.num_microbatches)
            spans = timeline.spans_of(rank)
            assert [span.action for span in spans] == list(schedule.actions(rank))
            for before, after in itertools.pairwise(spans):
                assert before.end_s <= after.start_s
        assert 0 <= timeline.bubble_fraction < 1
        parts = bubble_parts(schedule, costs, link)
        assert parts.bubble_fraction == pytest.approx(timeline.bubble_fraction)
        assert parts.communication_fraction >= -1e-12
        assert 0 <= ideal_bubble_fraction(schedule) < 1
        most = max(cost.activation_bytes for cost in costs)
        held = peak_activation_bytes(schedule, costs)
        for rank, in_flight in enumerate(schedule.in_flight()):
            assert 0 <= held[rank] <= most * in_flight
