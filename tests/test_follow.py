"""Prediction and measurement side by side in the log, and a plan's file in a real run."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from tests import lit
from tests.helpers import run_ranks
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy, manners
from lightning_pipe.errors import PlanError
from lightning_pipe.follow import compare
from lightning_pipe.layout import Layout
from lightning_pipe.placing import cut_step
from lightning_pipe.planning.attribution import MeasuredBubble
from lightning_pipe.planning.plan import Plan, Prediction, StagePlan
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.profile import profile_of


def test_a_large_gap_is_said() -> None:
    bubble = MeasuredBubble(0.2, 0.0, 0.0, 0.0, (0.2, 0.2), (0.8, 0.8))
    exact = Prediction(15.0, 0.2, 0.2, 0.0, 0.0, (2**30, 2**31), "a clock")
    text = compare(15.0, bubble, (2**30, 2**31), exact, whole_process=False)
    assert "LARGE GAP" not in text
    assert re.search(r"step +15.00 s +15.00 s", text)
    assert re.search(r"peak of rank 1 +2.0 GiB +2.0 GiB", text)
    slow = MeasuredBubble(0.12, 0.0, 0.3, 0.1, (0.52, 0.52), (0.48, 0.48))
    wrong = Prediction(15.0, 0.2, 0.2, 0.0, 0.0, (2**30, 2**30), "a clock")
    text = compare(25.0, slow, (2**30, 2**31), wrong, whole_process=False)
    assert "LARGE GAP: a step takes 1.67 times what was predicted" in text
    assert "LARGE GAP: idle 32% more than predicted, most of it waiting and Python" in text
    assert "LARGE GAP: rank 1 holds 2.00 times what was predicted" in text
    text = compare(25.0, slow, (2**30, 2**31), wrong, whole_process=True)
    assert "holds" not in text
    assert re.search(r"process of rank 1 +- +2.0 GiB", text)
    assert "LARGE" not in compare(25.0, slow, (2**30, 2**31), None, whole_process=False)


def test_a_plan_is_shown_once() -> None:
    said: list[str] = []
    one = Plan((stage_of(0, "a", "b", 2), stage_of(1, "c", "d", 2)), "1f1b", 2, 1, 4, "auto", 0.2)
    other = replace(one, stages=(stage_of(0, "a", "c", 3), stage_of(1, "d", "d", 1)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manners, "rank_zero_info", said.append)
        shown = None
        for plan in (one, replace(one, schedule_name="gpipe"), other):
            shown = manners.show_plan(plan, shown)
    assert shown is other
    assert [text.splitlines()[0].split(",")[0] for text in said] == [
        "Pipeline 1f1b: 2 ranks",
        "Pipeline: the stages are those shown before",
        "Pipeline 1f1b: 2 ranks",
    ]


def fit_with_plan(plan: Any) -> tuple[Any, list[str]]:
    torch.manual_seed(0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    for logger in loggers:
        logger.addHandler(handler)
    strategy = PipelineStrategy(plan=plan)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=10, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(lit.Lit().double(), DataLoader(lit.rows(96), batch_size=8))
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    return strategy.plan, said


def run_with_plan(folder: str) -> Any:
    made, said = fit_with_plan(f"{folder}/plan.yaml")
    return made.to_dict(), said


def stage_of(number: int, first: str, last: str, num_units: int) -> StagePlan:
    return StagePlan(number, number, first, last, num_units, 0, 0, 0, 0, 0)


def test_a_plan_for_another_model_is_refused() -> None:
    model = lit.Lit()
    batch = (torch.randn(2, 8), torch.zeros(2, dtype=torch.long))
    trace = trace_step(model, model.loss, batch, num_stages=2)
    profile = profile_of(model, trace, rows=2)
    for first, last, message in (
        ("embed", "net.1", "its stage 0 is 2 units, embed .. net.1; here these are net.0"),
        ("net.0.0", "net.1.0", "its stage 1 is 50 units, net.2.0 .. net.6; here these are net.2"),
    ):
        stages = (stage_of(0, first, last, 2), stage_of(1, "net.2.0", "net.6", 50))
        plan = Plan(stages, "gpipe", 2, 1, 4, "auto", 0.2)
        layout = Layout(2, schedule="gpipe", balance=plan.unit_counts, plan=plan)
        with pytest.raises(PlanError, match=message):
            cut_step(layout, trace, profile, 4)


@pytest.mark.filterwarnings("ignore")
def test_a_run_follows_its_plan(tmp_path: Path) -> None:
    stages = (stage_of(0, "net.0.0", "net.1.0", 2), stage_of(1, "net.2.0", "net.6", 5))
    prediction = Prediction(9.0, 0.2, 0.2, 0.0, 0.0, (5, 6), "a clock")
    plan = Plan(stages, "gpipe", 2, 1, 4, "auto", 0.2, prediction=prediction)
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan.to_dict()))
    (made, said), _ = run_ranks(2, run_with_plan, str(tmp_path), timeout=160)
    assert [stage["num_units"] for stage in made["stages"]] == [2, 5]
    assert (made["schedule_name"], made["num_microbatches"]) == ("gpipe", 4)
    assert made["prediction"] == plan.to_dict()["prediction"]
    table = next(text for text in said if "predicted and measured" in text)
    assert "9.00 s" in table
    assert "LARGE GAP: a step takes 0.0" in table
    assert "process of rank 1" in table
