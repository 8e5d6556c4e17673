"""Random programs train as on one device, or are refused before they train. They never hang.

`pytest tests/fuzz --fuzz-examples 500 --fuzz-seed 1000` takes others than the fixed ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.fuzz.programs import example_of
from tests.fuzz.trainings import DIFFERS, EQUAL, ERROR, REFUSED, fuzz


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
