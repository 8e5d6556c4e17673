"""The benchmarks run, and what they count is as promised; their times are for people."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module
    for name in ("models", "host_time", "shapes", "monitoring_example", "predicted_vs_measured"):
        sys.modules.pop(name, None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_new_lengths_cost_one_trace_and_every_stage_is_measured(benchmark):
    found = benchmark("shapes").measure(3, 2, 2, 6)
    assert (found["traces"], found["lengths"], found["first_steps_watched"]) == (1, 6, 6)
    found = benchmark("host_time").measure(3, 2, 2)
    assert [stage["ghost_calls"] for stage in found["stages"]] == [0, 3]
    assert all(stage["host_ms"] > 0 < stage["units_ms"] for stage in found["stages"])


def test_saved_bytes_are_counted_beside_what_the_plan_expects(benchmark):
    run = benchmark("predicted_vs_measured").measure
    rows, units, pieces = 8, 3, 2
    found = {
        name: run([0.01] * units, "wait", rows, {"num_microbatches": pieces, "schedule": name})
        for name in ("gpipe", "1f1b")
    }
    assert found["gpipe"].unit_counts == (units,)
    assert found["gpipe"].expected_bytes == pieces * found["1f1b"].expected_bytes > 0
    for one in found.values():
        assert one.counted_bytes == pytest.approx(one.expected_bytes, rel=0.01)
        assert one.step_s > pieces * units * 3 * 0.01 * 4e-3  # F, I and W


def test_twice_the_micro_batches_with_the_linear_rule_follow_the_reference(benchmark):
    example = benchmark("monitoring_example")
    samples, batch = 2560, 4 * example.ROWS
    reference = example.averaged(example.learn(4, None, samples), batch)
    assert reference[-1] < reference[0] / 5
    gaps = {}
    for name, rule in (("as it was", None), ("linear", batch)):
        losses = example.averaged(example.learn(8, rule, samples), 2 * batch)
        gaps[name] = max(abs(b - a) / a for a, b in zip(reference, losses, strict=True))
    assert gaps["linear"] < 0.05 < 0.4 < gaps["as it was"]


def test_a_slower_run_is_told_by_its_ratio(benchmark):
    worse_than = benchmark("peers.__main__").worse_than
    earlier = {"torch": {"seconds": [1.0, 1.1, 0.9]}, "ours": {"seconds": [1.0, 1.0, 1.0]}}
    slow_machine = {"torch": {"seconds": [3.0]}, "ours": {"seconds": [3.1]}}
    assert worse_than(slow_machine, earlier, 0.04) == []
    told = worse_than({**slow_machine, "ours": {"seconds": [3.2]}}, earlier, 0.04)
    assert told == ["ours: 1.067 of torch, it was 1.000"]


def test_a_contender_that_cannot_run_is_told_before_any_runs(benchmark):
    chosen = benchmark("peers.__main__").chosen
    assert chosen(["ours 1f1b"], {}) == ["ours 1f1b"]
    assert not [name for name in chosen([], {}) if name.startswith(("deepspeed", "colossalai"))]
    assert "deepspeed 1f1b" in chosen([], {"deepspeed": "python"})
    with pytest.raises(SystemExit, match="no contender 'our 1f1b'; there are: one process"):
        chosen(["our 1f1b"], {})
    with pytest.raises(
        SystemExit, match=r"requirements-deepspeed\.txt and give --python deepspeed="
    ):
        chosen(["ours 1f1b", "deepspeed 1f1b"], {})
