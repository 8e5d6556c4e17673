"""The doctor says of what a run left behind what it said of the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.test_attribution import as_measured

from lightning_pipe import cli
from lightning_pipe.errors import PlanError
from lightning_pipe.planning.attribution import attribute_bubble
from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.doctor import Run, examine
from lightning_pipe.planning.evidence import FILE_NAME, read_evidence, to_text
from lightning_pipe.planning.render import chrome_trace
from lightning_pipe.planning.schedules import make_schedule

EVEN, SLOW = StageCosts(1.0, 1.0, 1.0), StageCosts(2.0, 2.0, 2.0)
CASES = {
    "bubble": ("gpipe", 1, [EVEN] * 2, None),
    "imbalance": ("1f1b", 16, [EVEN, SLOW], None),
    "communication": ("1f1b", 16, [EVEN] * 2, LinkCosts(latency_s=3.0)),
    "healthy": ("zero_bubble", 32, [EVEN] * 2, None),
}


@pytest.mark.parametrize("cause", list(CASES))
def test_trace_and_directory_give_the_verdict_of_the_callback(
    cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, pieces, costs, link = CASES[cause]
    schedule = make_schedule(name, num_ranks=2, num_microbatches=pieces)
    timeline = as_measured(schedule, costs, link)
    found = attribute_bubble(timeline, schedule)
    run = replace(Run.of(schedule), unit_counts=(4, 4), boundary_bytes=(1000, 0))
    said = examine(found, run)
    assert said[0].cause == cause
    (tmp_path / "timeline_step3.json").write_text(json.dumps(chrome_trace(timeline, run.to_dict())))
    cli.doctor([str(tmp_path / "timeline_step3.json")])
    assert str(said[0]) in capsys.readouterr().out
    cli.doctor([str(tmp_path)])  # a directory without metrics
    assert f"\n{cause}: {said[0]}" in capsys.readouterr().out
    (tmp_path / FILE_NAME).write_text(to_text(run, found))
    evidence = read_evidence(tmp_path)
    assert (evidence.run, evidence.found) == (run, found)
    assert examine(evidence.found, evidence.run) == said


def test_a_drawing_can_be_asked_about(tmp_path: Path) -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=16)
    timeline = as_measured(schedule, [EVEN, SLOW], None)
    path = tmp_path / "drawn.json"
    path.write_text(json.dumps(chrome_trace(timeline)))
    evidence = read_evidence(path)
    assert evidence.run.num_microbatches == 16
    assert examine(evidence.found, evidence.run)[0].stage == 1


HEADER = (
    "pipeline/bubble_fraction,pipeline/bubble_fill_drain,pipeline/bubble_imbalance,"
    "pipeline/bubble_communication,pipeline/bubble_host,pipeline/bubble_fraction/rank_0,"
    "pipeline/bubble_fraction/rank_1,pipeline/utilisation/stage_0,pipeline/utilisation/stage_1,"
    "pipeline/num_microbatches,train_loss,step"
)


def test_a_table_of_metrics_is_enough(tmp_path: Path) -> None:
    losses = [f"{',' * 10}{1.0 + 0.001 * (step % 2)},{step}" for step in range(10)]
    jumped = [f"{',' * 10}{2.0},{step}" for step in range(10, 20)]
    rows = ["0.40,0.05,0.30,0.03,0.02,0.6,0.2,0.4,0.8,8,,1", *losses, f"{',' * 9}16,,10", *jumped]
    folder = tmp_path / "lightning_logs" / "version_3"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("\n".join([HEADER, *rows]))
    evidence = read_evidence(tmp_path)
    assert (evidence.run.num_ranks, evidence.run.num_microbatches) == (2, 8)
    imbalance, jump = examine(evidence.found, evidence.run, evidence.losses)
    assert (imbalance.cause, imbalance.stage) == ("imbalance", 1)
    assert imbalance.ratio == pytest.approx(2.0)
    assert "when num_microbatches went from 8 to 16" in jump.text


def test_what_is_not_a_run_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such file"):
        read_evidence(tmp_path / "nowhere")
    with pytest.raises(PlanError, match=r"callbacks=\[BubbleMonitor\(\)\]"):
        read_evidence(tmp_path)
    (tmp_path / "metrics.csv").write_text("train_loss,step\n1.0,1\n")
    with pytest.raises(PlanError, match=r"no metrics\.csv with a pipeline's bubble"):
        read_evidence(tmp_path)
    trace = tmp_path / "trace.json"
    for text in ("{", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "name": "mm"}]}'):
        trace.write_text(text)
        with pytest.raises(PlanError, match="is no trace of a pipeline's step"):
            read_evidence(trace)
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    values = chrome_trace(as_measured(schedule, [EVEN] * 2, None))
    values["traceEvents"] = [e for e in values["traceEvents"] if e["name"] != "0F2"]
    trace.write_text(json.dumps(values))
    with pytest.raises(PlanError, match="no trace of a whole step"):
        read_evidence(trace)
    (tmp_path / FILE_NAME).write_text("{}")
    with pytest.raises(PlanError, match="BubbleMonitor writes it anew"):
        read_evidence(tmp_path)
