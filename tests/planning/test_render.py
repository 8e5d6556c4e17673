"""Pictures: the text table, the figure, the trace."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import pytest
from matplotlib import colors

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.ir import Op
from lightning_pipe.planning.render import (
    chrome_trace,
    schedule_figure,
    schedule_summary,
    schedule_text,
)
from lightning_pipe.planning.schedules import SCHEDULES, forward_only, make_schedule
from lightning_pipe.planning.simulate import simulate


def test_the_classic_table() -> None:
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    assert schedule_text(schedule).splitlines() == [
        "1f1b: 4 ranks, 8 micro-batches, bubble 27.3%, in flight 4 3 2 1",
        "",
        "rank 0 | F1 F2 F3 F4 .  .  .  B1 F5 B2 F6 B3 F7 B4 F8 B5 .  B6 .  B7 .  B8",
        "rank 1 | .  F1 F2 F3 .  .  B1 F4 B2 F5 B3 F6 B4 F7 B5 F8 B6 .  B7 .  B8 .",
        "rank 2 | .  .  F1 F2 .  B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 F8 B7 .  B8 .  .",
        "rank 3 | .  .  .  F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8 .  .  .",
        "",
        "F1 forward, B1 backward of micro-batch 1; . idle",
    ]


def test_chunks_have_letters() -> None:
    text = schedule_text(
        make_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=2, virtual_stages=2)
    )
    assert "rank 0 | F1a F2a F1b F2b" in text
    assert text.startswith("interleaved_1f1b: 2 ranks x 2 chunks, 2 micro-batches")
    assert text.endswith("a, b, ... the chunk of the rank; . idle")
    many = schedule_text(make_schedule("naive", num_ranks=1, num_microbatches=1, virtual_stages=27))
    assert "F1z F1_26 B1_26 B1z" in " ".join(many.split())


def test_summary_of_an_evaluation() -> None:
    summary = schedule_summary(forward_only([0], 1))
    assert summary == "forward_only: 1 rank, 1 micro-batch, bubble 0.0%"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_rows_are_as_long_as_the_step(name: str) -> None:
    chunks = 1 if name in ("naive", "gpipe", "1f1b", "zero_bubble") else 2
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6, virtual_stages=chunks)
    lines = schedule_text(schedule, legend=False).splitlines()
    rows = [line.split("| ")[1].split() for line in lines]
    assert len({len(row) for row in rows}) == 1
    assert [len(row) - row.count(".") for row in rows] == [
        len(schedule.actions(rank)) for rank in range(3)
    ]


def test_trace_has_every_action_and_every_transfer() -> None:
    schedule = make_schedule("zero_bubble", num_ranks=2, num_microbatches=3)
    timeline = simulate(schedule, [StageCosts(1e-3, 1e-3, 1e-3)] * 2, LinkCosts(1e-4))
    trace = json.loads(json.dumps(chrome_trace(timeline)))
    by_phase: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        by_phase.setdefault(event["ph"], []).append(event)
    assert [event["args"]["name"] for event in by_phase["M"]] == ["rank 0", "rank 1"]
    assert len(by_phase["X"]) == 2 * 3 * 3
    first = by_phase["X"][0]
    assert (first["name"], first["tid"], first["ts"], first["dur"]) == ("0F0", 0, 0.0, 1000.0)
    assert first["args"] == {"stage": 0, "microbatch": 0}
    assert len(by_phase["s"]) == len(by_phase["f"]) == 3 + 3  # outputs there, gradients back
    for leave, arrive in zip(by_phase["s"], by_phase["f"], strict=True):
        assert leave["id"] == arrive["id"]
        assert leave["ts"] < arrive["ts"]
        assert leave["tid"] != arrive["tid"]


def test_figure_has_a_box_for_each_action() -> None:
    schedule = make_schedule("zero_bubble", num_ranks=2, num_microbatches=3)
    figure = schedule_figure(schedule)
    (axes,) = figure.axes
    assert len(axes.patches) == sum(len(schedule.actions(rank)) for rank in range(2))
    assert len(axes.lines) == 6
    assert axes.get_xlabel() == "time (F)"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward", "input gradient", "weight gradient"]
    for kind, start in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        file = io.BytesIO()
        figure.savefig(file, format=kind)
        assert file.getvalue().startswith(start)


def test_figure_tells_chunks_apart() -> None:
    schedule = make_schedule("interleaved_1f1b", num_ranks=2, num_microbatches=2, virtual_stages=2)
    (axes,) = schedule_figure(schedule).axes
    assert {colors.to_rgba(box.get_facecolor())[3] for box in axes.patches} == {0.5, 1.0}


def test_figure_of_costs_is_in_seconds_and_large_ones_leave_details_out() -> None:
    schedule = make_schedule("gpipe", num_ranks=4, num_microbatches=100)
    figure = schedule_figure(schedule, [StageCosts(1, 1, 1)] * 4)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "time (s)"
    assert not axes.lines
    forwards = sum(action.op is Op.FORWARD for action in schedule.actions(0)) * 4
    assert len(axes.patches) == 2 * forwards


def test_figure_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"lightning-pipe\[plot\]"):
        schedule_figure(make_schedule("gpipe", num_ranks=1, num_microbatches=1))


def test_planning_needs_neither_torch_nor_matplotlib() -> None:
    modules = ["balance", "costs", "ir", "plan", "render", "schedules", "simulate", "timeline"]
    imports = "; ".join(f"import lightning_pipe.planning.{module}" for module in modules)
    check = "import sys; assert not {'torch', 'lightning', 'numpy', 'matplotlib'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", f"{imports}; {check}"], check=True, timeout=240)


def test_planning_imports_in_milliseconds() -> None:
    clock = "import time; t = time.process_time(); import lightning_pipe.planning; "
    code = clock + "print(time.process_time() - t)"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=240, capture_output=True, text=True
        )
        for _ in range(3)
    ]
    assert min(float(run.stdout) for run in runs) < 0.1
