"""What is left on "auto" is decided by simulation, and the reasons are in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from tests.planning.test_memory import layers
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy, PlanError
from lightning_pipe.decide import decide
from lightning_pipe.layout import Layout
from lightning_pipe.planning.costs import CostTable, LinkCosts, UnitCosts

OPEN = Layout(4, num_microbatches=8, chunks_are_free=True)
MUCH = 10**15


def _profile(flops: int) -> Any:
    made = layers(16, weight_bytes=400, saved_bytes=1000)
    return replace(made, units=tuple(replace(unit, flops=flops) for unit in made.units))


def test_chunks_are_added_where_they_pay_for_their_communication() -> None:
    large, reasons = decide(OPEN, _profile(10**12), 8, MUCH)
    assert (large.virtual_stages, large.schedule) in {
        (2, "interleaved_1f1b"),
        (4, "interleaved_1f1b"),
    }
    assert "combinations simulated" in reasons[0]
    assert not large.chunks_are_free
    small, reasons = decide(OPEN, _profile(10**6), 8, MUCH)  # 10 ns of work, 10 us of latency
    assert (small.virtual_stages, small.schedule) == (1, "auto")
    assert any("interleaved_1f1b" in reason and "slower" in reason for reason in reasons)


def test_what_is_pinned_stays_and_needs_no_search() -> None:
    pinned = Layout(4, num_microbatches=8)
    assert decide(pinned, _profile(10**12), 8, MUCH) == (pinned, ())
    given = replace(OPEN, schedule="interleaved_1f1b")
    assert decide(given, _profile(10**6), 8, MUCH)[0].virtual_stages == 2


def test_measured_costs_may_choose_what_flops_may_not() -> None:
    table = CostTable(
        tuple(UnitCosts(f"layers.{i}", 1e-3, 1e-3, 1e-3) for i in range(16)),
        LinkCosts(1e-3, 1e9),
        device="cpu",
    )
    profile = _profile(10**6).with_costs(table)
    decided, _ = decide(replace(OPEN, costs=table), profile, 8, MUCH)
    assert decided.schedule in ("zero_bubble", "zbv")


def test_a_model_that_fits_in_no_way_says_so_first() -> None:
    decided, reasons = decide(OPEN, _profile(10**12), 8, 100)
    assert reasons[0].startswith("'layers.0' alone holds 1.6 KiB")
    assert decided.virtual_stages >= 1


def _fit(folder: str) -> tuple[dict[str, torch.Tensor], Any, str]:
    module = lit.seeded(lit.Lit)
    names = [*(f"net.{i}.0" for i in range(6)), "net.6"]
    path = Path(folder, "costs.json")
    units = tuple(UnitCosts(n, 1e-3 if n != "net.0.0" else 4e-3, 1e-3, 1e-3) for n in names)
    path.write_text(CostTable(units, LinkCosts(1e-6, 1e12), device="cpu").to_json())
    trainer = lit.trainer({"virtual_stages": "auto", "costs": str(path)}, 2)
    trainer.fit(module, DataLoader(lit.rows(16), batch_size=8))
    schedule = trainer.strategy.schedule.name
    return {k: v.clone() for k, v in module.state_dict().items()}, trainer.strategy.plan, schedule


def _alone() -> dict[str, torch.Tensor]:
    module = lit.seeded(lit.Lit)
    lit.trainer(None, 1).fit(module, DataLoader(lit.rows(16), batch_size=8))
    return {k: v.clone() for k, v in module.state_dict().items()}


def test_a_run_on_measured_costs_gives_the_numbers_of_one_device(tmp_path: Path) -> None:
    (expected,) = run_ranks(1, _alone)
    for weights, plan, schedule in run_ranks(2, _fit, str(tmp_path)):
        assert schedule in ("interleaved_1f1b", "zero_bubble", "zbv")
        assert plan.prediction.step_s is not None
        assert any("combinations simulated" in note for note in plan.notes)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-12)


def test_costs_that_cannot_be_read_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"costs='.*nothing\.json' cannot be read"):
        PipelineStrategy(pipeline_parallel_size=2, costs=str(tmp_path / "nothing.json"))
    (tmp_path / "wrong.json").write_text('{"units": [1]}')
    with pytest.raises(PlanError, match="the cost table cannot be read"):
        PipelineStrategy(pipeline_parallel_size=2, costs=str(tmp_path / "wrong.json"))
