"""Random programs train as on one device, or are refused before they train. They never hang.

`pytest tests/fuzz --fuzz-examples 500 --fuzz-seed 1000` takes others than the fixed ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.fuzz.programs import example_from, example_of
from tests.fuzz.trainings import DIFFERS, EQUAL, ERROR, REFUSED, Outcome, fuzz, fuzz_drawn


@pytest.mark.timeout(3600)
def test_random_programs_train_as_on_one_device_or_are_refused(
    pool: Callable[..., list[Any]], request: pytest.FixtureRequest
) -> None:
    first, count = request.config.getoption("fuzz_seed"), request.config.getoption("fuzz_examples")
    outcomes = fuzz(list(range(first, first + count)), pool)
    assert len(outcomes) == count
    wrong = [outcome for outcome in outcomes if outcome.kind in (DIFFERS, ERROR)]
    texts = [f"{o.kind}: {o.text}\n{example_of(o.seed)}" for o in wrong]
    assert not wrong, "\n\n".join(texts)
    kinds = Counter(outcome.kind for outcome in outcomes)
    assert kinds[EQUAL] >= 0.6 * count, kinds  # a generator of refusals would show nothing
    assert kinds[REFUSED] <= 0.25 * count, kinds


@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(source=st.randoms(use_true_random=False), seed=st.integers(0, 9))
@pytest.mark.timeout(1800)
def test_programs_that_hypothesis_draws_and_shrinks_do_too(
    pool: Callable[..., list[Any]], source: random.Random, seed: int
) -> None:
    """Programs of the same generator; one that fails is made as small as can be."""
    example = example_from(source, seed)
    outcome = fuzz_drawn(example, pool)
    assert outcome.kind not in (DIFFERS, ERROR), f"{outcome.kind}: {outcome.text}\n{example}"


def test_a_rank_that_ends_since_another_refused_is_no_hang() -> None:
    """The second of three examples is refused on one rank, for which the other waits too long."""
    two_ranks = [seed for seed in range(100) if example_of(seed).ranks == 2][:3]
    bad, asked = two_ranks[1], []

    def pool(ranks: int, function: Any, seeds: list[int], *_: Any, timeout: float) -> Any:
        asked.append(list(seeds))
        found = [Outcome(seed, REFUSED if seed == bad else EQUAL, "CutError") for seed in seeds]
        if bad not in seeds:
            return [found, found]
        error = ChildProcessError("rank 0 died with exit code 1")
        error.__dict__["others"] = [found[: seeds.index(bad) + 1]]
        raise error

    kinds = {outcome.seed: outcome.kind for outcome in fuzz(two_ranks, pool)}
    assert kinds == {two_ranks[0]: EQUAL, bad: REFUSED, two_ranks[2]: EQUAL}
    assert asked == [two_ranks, two_ranks[:1], two_ranks[1:], two_ranks[2:]]

    def hangs(*_: Any, timeout: float) -> Any:
        raise AssertionError("ranks [0, 1] ran past 35 s")

    assert [outcome.kind for outcome in fuzz(two_ranks[:1], hangs)] == [ERROR]
