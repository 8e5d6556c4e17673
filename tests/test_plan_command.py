"""`lightning-pipe plan`: from the YAML of `fit` to a plan that `fit` takes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from tests.test_cli import by_class_path, config
from torch import nn

from lightning_pipe import PipelineStrategy, cli, plan_command
from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planfile import read_plan
from lightning_pipe.planning.costs import CostTable, LinkCosts
from lightning_pipe.planning.plan import Plan
from lightning_pipe.split._fake import is_fake, large_as_fakes, to_dtype

pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning",
    "ignore",  # Lightning's advice about loaders, and its own deprecated calls
)


def planned(*arguments: str) -> Plan:
    made = plan_command.plan(arguments)
    assert made is not None
    return made


def test_plan_of_a_config_is_taken_by_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, output = config(tmp_path, "pipeline"), str(tmp_path / "plan.yaml")
    made = planned("--config", path, "--devices", "3", "--memory", "1GiB", "--output", output)
    text = capsys.readouterr().out
    assert "0.0 M parameters at 16 bytes are 0.005904 MB and fit in 1.074 GB" in text
    assert "rule of thumb: 12-16 bytes per parameter with Adam" in text
    assert re.search(r"the fullest rank is \d with .* fits in 1.0 GiB less 10% head-room", text)
    assert "combinations simulated, " in text
    assert (made.num_ranks, made.num_microbatches, made.virtual_stages) == (3, 8, 1)
    assert sum(made.unit_counts) == 6
    assert read_plan(output) == made

    strategy = PipelineStrategy(plan=output)
    given = strategy.given
    assert given["pipeline_parallel_size"] == 3
    assert given["balance"] == made.unit_counts
    with pytest.raises(ConfigError, match="schedule='gpipe' beside a plan with schedule='1f1b'"):
        PipelineStrategy(plan=output, schedule="gpipe")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2 beside a plan with"):
        PipelineStrategy(plan=output, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="split_points beside a plan"):
        PipelineStrategy(plan=output, split_points=["head"])
    with pytest.raises(PlanError, match="cannot be read"):
        PipelineStrategy(plan=str(tmp_path / "nowhere.yaml"))
    (tmp_path / "other.yaml").write_text("stages: 3")
    with pytest.raises(PlanError, match="Plan lacks"):
        PipelineStrategy(plan=str(tmp_path / "other.yaml"))

    monkeypatch.setattr(sys, "argv", ["lightning-pipe", "plan", "--parameters", "10e9"])
    cli.main()
    assert capsys.readouterr().out == (
        "10.0 B parameters at 12 bytes are 120 GB and do not fit in 80 GB; 2 stages make it fit\n"
    )


def test_pinned_arguments_are_those_of_the_config(tmp_path: Path) -> None:
    path = config(
        tmp_path,
        by_class_path(num_microbatches=4, schedule="gpipe", balance=[1, 5]),
        precision="bf16-true",
    )
    made = planned("--config", path, "--output", "")
    assert (made.schedule_name, made.num_microbatches, made.unit_counts) == ("gpipe", 4, (1, 5))
    assert made.stages[0].parameter_bytes == 2 * made.stages[0].parameters


def test_measured_costs_are_used_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, costs = config(tmp_path, "pipeline"), str(tmp_path / "costs.json")
    made = planned("--config", path, "--output", "", "--measure", "cpu", "--save-costs", costs)
    assert made.prediction is not None
    assert made.prediction.basis == "from times measured on cpu"
    assert made.prediction.step_s is not None
    table = CostTable.from_json(Path(costs).read_text())
    assert [unit.unit for unit in table.units] == [*(f"layers.{i}" for i in range(5)), "head"]
    assert all(unit.forward_s > 0 for unit in table.units)
    again = planned("--config", path, "--output", "", "--costs", costs)
    assert again.prediction is not None
    assert again.prediction.step_s is not None
    slow = replace(table, link=LinkCosts(latency_s=1.0, bytes_per_s=1e6))
    Path(costs).write_text(slow.to_json())
    waits = planned("--config", path, "--output", "", "--costs", costs)
    assert waits.prediction is not None
    assert waits.prediction.step_s is not None
    assert waits.prediction.step_s > 1.0 > again.prediction.step_s  # the table's link counts
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1KiB"], "alone holds .* of weights, gradients and"),
        (["--memory", "lots"], "give a number with a unit, such as 80GiB"),
        (["--devices", "2", "--stages", "4"], "4 stages on 2 devices: give --devices 4"),
        (["--link", "fast"], "give seconds and bytes per second, such as"),
        (["--devices", "64"], "64 stages out of 6 units"),
    ],
)
def test_bad_input_is_said(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, "pipeline")
    monkeypatch.setattr(sys, "argv", ["lightning-pipe", "plan", "--config", path, *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert re.search(message, str(caught.value)), caught.value
    assert str(caught.value).startswith("lightning-pipe plan: ")


class Large(nn.Module):
    """140 MB of weights beside small ones whose values its constructor needs."""

    def __init__(self) -> None:
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3000, 3900), nn.Dropout(r))
                                    for r in rates)  # fmt: skip
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.register_buffer("table", torch.arange(5.0))


def test_large_weights_take_no_memory() -> None:
    with large_as_fakes():
        module = Large()
    assert [is_fake(p) for p in module.parameters()] == [True, False] * 3
    assert module.table.tolist() == [0, 1, 2, 3, 4]
    assert module.blocks[2][1].p == pytest.approx(0.1)
    to_dtype(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert is_fake(module.blocks[0][0].weight)


def test_a_plan_survives_json() -> None:
    from tests.planning.test_choose import HEAVY

    from lightning_pipe.planning.conclude import make_plan
    from lightning_pipe.planning.request import Request

    made = make_plan(HEAVY, Request(rows=16, devices=4, cap_bytes=2**31))
    assert Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert Plan.from_dict(yaml.safe_load(yaml.safe_dump(made.to_dict()))) == made
    assert "predicted: idle" in made.describe()
