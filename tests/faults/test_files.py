"""Damaged plans, costs, schedules and configs are errors that say what is wrong; no code runs."""

from __future__ import annotations

import json
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import yaml
from tests.test_cli import ARGUMENTS, by_class_path, config

from lightning_pipe import PipelineStrategy, cli
from lightning_pipe.errors import PipelineError
from lightning_pipe.planning.costs import CostTable, LinkCosts, UnitCosts
from lightning_pipe.planning.plan import Plan, StagePlan
from lightning_pipe.planning.schedules import make_schedule

_STAGES = (
    StagePlan(0, 1, "embed", "blocks.1", 3, 1_500_000, 6_000_000, 2 * 10**9, 4096, 512, ("tied",)),
    StagePlan(1, 0, "head", "head", 1, 999, 3996, 10**9, 0, 0, ("tied",)),
)
_PLAN = Plan(_STAGES, "1f1b", 2, 1, 8, "flops", 1 / 9, ("a note",))
_COSTS = CostTable((UnitCosts("embed", 1.0, 1.0, 1.0, 10, 10),), LinkCosts(1e-6, 1e9), "cpu")
FILES = {
    "plan": ("plan.yaml", yaml.safe_dump(_PLAN.to_dict())),
    "costs": ("costs.json", _COSTS.to_json()),
    "schedule": (
        "schedule.csv",
        make_schedule("1f1b", num_ranks=2, num_microbatches=4).to_csv(),
    ),
}


def damaged(text):
    """A file that is cut off, has bytes that are no text, other values, or code."""
    data = text.encode()
    for end in range(0, len(data), max(1, len(data) // 25)):
        yield data[:end]
    yield b"\x00\xff\xfe" + data
    for old, new in ((b"1", b"-1"), (b":", b""), (b"1", b"x"), (b",", b";"), (b"0", b"1e99")):
        yield data.replace(old, new)
    yield b"!!python/object/apply:os.mkdir ['made']"
    yield b"- 1\n- 2\n"
    yield json.dumps({"stages": [], "units": {}}).encode()


@pytest.mark.parametrize("argument", FILES)
def test_a_damaged_file_is_refused_by_name_or_says_something_else_that_is_legal(
    tmp_path, monkeypatch, argument
):
    monkeypatch.chdir(tmp_path)
    name, text = FILES[argument]
    file = tmp_path / name
    file.write_text(text)
    arguments = {} if argument == "plan" else {"pipeline_parallel_size": 2, "num_microbatches": 4}
    PipelineStrategy(**{argument: str(file)}, **arguments)
    refused, messages = 0, set()
    for data in damaged(text):
        file.write_bytes(data)
        try:
            PipelineStrategy(**{argument: str(file)}, **arguments)
        except PipelineError as error:  # anything else fails the test
            refused += 1
            messages.add(str(error))
    assert refused >= 25
    assert all(name in message for message in messages), messages
    assert [path.name for path in tmp_path.iterdir()] == [name], "no code of the file ran"


class _Reached(Exception):
    """A config that is legal, as one is whose last lines are missing, gets to its training."""


def _never(*args, **kwargs):
    raise AssertionError("a process was started")


def _trains(*args, **kwargs):
    raise _Reached


def damaged_configs(text):
    """With a part of what has to be said of each; "" where it may be legal."""
    for end in range(0, len(text), len(text) // 8):
        yield text[:end].encode(), ""
    changed = {
        ("num_microbatches", "num_microbatch"): "num_microbatch",
        ("max_epochs", "max_epoch"): "max_epoch'",
        ("num_microbatches: 4", "num_microbatches: four"): "four",
        ("num_microbatches: 4", "num_microbatches: -4"): "num_microbatches=-4",
        ("pipe.PipelineStrategy", "pipe.PipeStrategy"): "PipeStrategy",
        ("toy.Toy\n", "toy.Nobody\n"): "Nobody",
        ("  accelerator", "\taccelerator"): "Problems parsing config",
        ("devices: 2", "devices: two"): "devices",
    }
    for (old, new), said in changed.items():
        assert old in text
        yield text.replace(old, new).encode(), said
    yield b"\x00\xff\xfe" + text.encode(), "fit.yaml is no text in UTF-8"
    yield text.encode() + b"more: !!python/object/apply:os.mkdir ['made']\n", "os.mkdir"
    yield b"- 1\n- 2\n", "Unexpected config"


@pytest.mark.filterwarnings("ignore")  # LightningCLI's and Lightning's advice
def test_a_damaged_config_ends_fit_with_its_cause_before_any_process_starts(
    tmp_path, monkeypatch, capsys
):
    file = config(tmp_path, by_class_path(**ARGUMENTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "Popen", _never)
    monkeypatch.setattr(pl.Trainer, "fit", _trains)
    monkeypatch.setattr(sys, "argv", ["lightning-pipe", "fit", "--config", file])
    with pytest.raises(_Reached):
        cli.main()
    text = (tmp_path / "fit.yaml").read_text()
    refused = 0
    for data, said in damaged_configs(text):
        (tmp_path / "fit.yaml").write_bytes(data)
        with pytest.raises((SystemExit, ValueError, TypeError, _Reached)) as caught:
            cli.main()
        error = caught.value
        told = f"{error} {capsys.readouterr().err}"
        if isinstance(error, _Reached):
            assert not said, data
            continue
        refused += 1
        assert not isinstance(error, SystemExit) or error.code not in (0, None)
        assert said in told, told
    assert refused >= 15
    assert [path.name for path in tmp_path.iterdir()] == ["fit.yaml"], "no code of the file ran"
