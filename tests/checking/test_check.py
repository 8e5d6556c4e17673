"""`lightning-pipe check`: what is right passes, what is wrong is named with what to type."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.checking import models

from lightning_pipe import check_command, cli
from lightning_pipe.check_command import _report, walk
from lightning_pipe.checking import jobs
from lightning_pipe.checking.numbers import Numbers, compare
from lightning_pipe.checking.subject import Asked
from lightning_pipe.checking.walk import Row, Walk
from lightning_pipe.checking.workers import Workers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # LightningCLI's and Lightning's advice
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(2, str(tmp_path_factory.mktemp("workers"))) as found:
        yield found


def config(folder: Path, model: str, **strategy: Any) -> str:
    """Writes the YAML of `fit` for a model of these tests."""
    values = {
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": {
                "class_path": "lightning_pipe.PipelineStrategy",
                "init_args": {"num_microbatches": 4, **strategy},
            },
            "max_epochs": 1,
            "default_root_dir": str(folder),
        },
        "model": {"class_path": f"tests.checking.models.{model}"},
        "data": {"class_path": "tests.checking.models.Data"},
    }
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def checked(workers: Workers, folder: Path, model: str, **strategy: Any) -> list[Row]:
    asked = Asked(("--config", config(folder, model, **strategy)))
    return list(walk(workers, asked, timeout_s=200, on_row=lambda row: None))


def test_the_command_passes_a_right_model_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"schedule": "interleaved_1f1b", "virtual_stages": 2}
    path = config(tmp_path, "Right", **arguments)
    monkeypatch.setattr(sys, "argv", ["lightning-pipe", "check", "--config", path])
    cli.main()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("batch: "), out
    assert re.match(r"step +values +loss +largest gradient error +buffers +logged", lines[1])
    rows = [line for line in lines if line.endswith("right")]
    assert [line[0] for line in rows] == ["a", "a", "b", "c", "d", "e", "f"], out
    assert "interleaved_1f1b, 2 ranks x 2 chunks x 4 micro-batches" in rows[4]
    # 5 layers of weights and biases, a buffer, a logged value and the loss
    assert re.search(r" 363 +\d", rows[2]), rows[2]
    assert [file.name for file in tmp_path.iterdir()] == ["fit.yaml"]


def test_dropout_and_batch_norms_are_compared_as_documented(
    workers: Workers, tmp_path: Path
) -> None:
    for model, said in (("Dropout", "seeds of dropout"), ("Norms", "batch norms see micro-batch")):
        rows = checked(workers, tmp_path, model)
        assert all(row.is_right for row in rows), rows[-1]
        assert len(rows) == 7
        assert said in rows[3].remark
        assert "in sequence" in rows[4].remark
        for row in rows[2:6]:
            assert row.comparison is not None
            assert row.comparison.gradient_error < 1e-5


WRONG = {
    "Fails": ("a", r"fails on one device, too.*IndexError: Target \d is out of bounds"),
    "Infinite": ("a", "the loss on one device is inf"),
    "HiddenNoise": ("a", "from the same weights, the same batch and the same seeds"),
    "ByRank": ("a", "the step asks for its rank"),
    "ByEnvironment": ("a", "global_rank and RANK say 1"),
    "Manual": ("-", "automatic_optimization=False"),
    "Small": (
        "b",
        "PlanError: 2 stages .* the step makes 1 calls of modules",
    ),
    "Contrastive": ("c", "which rows are in a micro-batch together.*num_microbatches=1"),
    "Summed": ("c", r"a sum over rows and no mean.*\"loss_weight\": \"sum\""),
    "Prior": ("c", "split_batch={'prior': 'replicate'}"),
    "SilentPrior": ("c", "split_batch={'prior': 'replicate'}"),
    "State": ("c", "keeps a state from one micro-batch to the next: it changes layers.1.before"),
}


@pytest.mark.parametrize("model", WRONG)
def test_a_fault_is_named_at_the_first_step_that_shows_it(
    workers: Workers, tmp_path: Path, model: str
) -> None:
    step, cause = WRONG[model]
    rows = checked(workers, tmp_path, model)
    assert [row.is_right for row in rows] == [True] * (len(rows) - 1) + [False]
    assert rows[-1].name[0] == step, rows[-1]
    assert re.search(cause, rows[-1].cause, re.DOTALL), rows[-1].cause


COPIES = {"pipeline_parallel_size": 2, "data_parallel_size": 2}


def test_copies_are_compared_with_one_device(workers: Workers, tmp_path: Path) -> None:
    rows = checked(workers, tmp_path, "Right", **COPIES)
    assert all(row.is_right for row in rows), rows[-1]
    assert [row.name[0] for row in rows] == ["a", "a", "b", "c", "d", "e", "f"]
    line = next(line for line in _report(rows) if line.startswith("f "))
    # gradients and the loss; the largest error of each, and where it is
    assert re.search(r"copies of it +361 +\de-\d+ +\de-\d+ \w+\.\S+ +- +- +right$", line), line


def over_copies(workers: Workers, folder: Path, model: str) -> Row:
    """The last step alone."""
    asked = Asked(("--config", config(folder, model, **COPIES)))
    facts = workers.run(1, jobs.facts_of, asked, timeout_s=200)[0].value
    return Walk(workers, asked, facts, 200)._replicas()


def test_losses_of_copies_are_joined_as_the_step_says(workers: Workers, tmp_path: Path) -> None:
    for model in ("Masked", "Added"):
        row = over_copies(workers, tmp_path, model)
        assert row.is_right, row
        assert row.comparison is not None
        assert max(row.comparison.gradient_error, row.comparison.loss_error) < 1e-5


def test_copies_that_do_something_else_are_named(workers: Workers, tmp_path: Path) -> None:
    row = over_copies(workers, tmp_path, "ByWorld")
    assert not row.is_right
    assert "what copies do not do alike: the step asks for its rank" in row.cause


def test_devices_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["lightning-pipe", "check", "--config", config(tmp_path, "Right"), "--accelerator"]
    monkeypatch.setattr(check_command, "Workers", None)
    monkeypatch.setattr(check_command, "count_of", lambda kind: 1)
    for accelerator, message in (
        ("gpu", r"this machine has 1 such devices, and the check needs 2"),
        ("tpu", "no backend moves its tensors between ranks; cpu, cuda, xpu work"),
    ):
        monkeypatch.setattr(sys, "argv", [*asked, accelerator])
        with pytest.raises(SystemExit, match=message):
            cli.main()


def test_what_the_strategy_is_told_cures_a_wrong_split(workers: Workers, tmp_path: Path) -> None:
    rows = checked(workers, tmp_path, "Prior", split_batch={"prior": "replicate"})
    assert all(row.is_right for row in rows), rows[-1]


def test_a_config_that_is_none_is_said(workers: Workers, tmp_path: Path) -> None:
    (row,) = checked(workers, tmp_path, "Nobody")
    assert not row.is_right
    assert "Nobody" in row.cause


def test_a_process_that_is_silent_or_dies_is_named(tmp_path: Path) -> None:
    with Workers(2, str(tmp_path)) as found:
        assert [a.value for a in found.run(2, models.answers, timeout_s=60)] == [10, 11]
        answers = found.run(1, models.sleeps, timeout_s=1)
        assert "rank 0 gave no answer in 1 s" in answers[0].error
        assert "in sleeps" in answers[0].trace  # its stack
        answers = found.run(2, models.dies, timeout_s=60)
        assert answers[1].error == "the process of rank 1 died with exit code 3"
        assert [a.value for a in found.run(2, models.answers, timeout_s=60)] == [10, 11]


def numbers(loss: float = 1.0, **gradients: list[float]) -> Numbers:
    return Numbers(loss, {name: torch.tensor(value) for name, value in gradients.items()})


def test_a_difference_is_rounding_or_it_is_none() -> None:
    right = numbers(a=[1.0, 2.0], b=[1e-4])
    near = compare(right, numbers(a=[1.0, 2.00001], b=[1e-4]))
    assert near.is_close
    assert (near.parameter, near.values) == ("a", 4)
    assert near.gradient_error == pytest.approx(5e-6, rel=0.1)
    for other, worst in (
        (numbers(a=[1.0, 2.001], b=[1e-4]), "the gradient of a differs by 5.0e-04"),
        (numbers(a=[1.0, 2.0], b=[2e-4]), "the gradient of b differs by 5.0e-05"),
        (numbers(1.1, a=[1.0, 2.0], b=[1e-4]), "the loss differs by 1.0e-01"),
        (numbers(a=[1.0, 2.0], b=[float("nan")]), "the gradient of b differs by inf"),
        (numbers(a=[1.0, 2.0]), "only one of both has a gradient of b"),
        (numbers(a=[1.0], b=[1e-4]), "the gradient of a differs by inf"),
    ):
        found = compare(right, other)
        assert not found.is_close
        assert found.worst() == worst
    buffers = Numbers(1.0, {}, {"mean": torch.zeros(2)}, {"accuracy": 0.5})
    assert compare(buffers, buffers).is_close
    other = Numbers(1.0, {}, {"mean": torch.full((2,), 0.1)}, {"accuracy": 0.5})
    assert compare(buffers, other).worst() == "the buffer mean differs by 1.0e-01"
    other = Numbers(1.0, {}, {"mean": torch.zeros(2)}, {})
    assert compare(buffers, other).worst() == "the logged value accuracy differs by inf"
