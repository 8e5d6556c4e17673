"""Nothing grows while a pipeline trains, validates and writes checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

STEPS, EVERY = 96, 4


def _soak(folder: str) -> Any:
    """Runs in every rank."""
    benchmarks = str(Path(__file__).parents[1] / "benchmarks")
    sys.path.insert(0, benchmarks)
    try:
        import soak
    finally:
        sys.path.remove(benchmarks)
    readings = soak.soak(STEPS, EVERY, folder)
    return soak.growth(readings), soak.LIMITS, readings


def test_nothing_grows(pool: Any, tmp_path: Path) -> None:
    for growth, limits, readings in pool(2, _soak, str(tmp_path), timeout=100):
        assert [int(reading["step"]) for reading in readings] == list(
            range(EVERY, STEPS + 1, EVERY)
        )
        assert readings[-1]["cuts"] >= 6  # the lengths
        grown = {name: growth[name] for name, limit in limits.items() if growth[name] > limit}
        assert not grown, (grown, readings[-1])
