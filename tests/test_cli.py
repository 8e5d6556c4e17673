"""The command line: LightningCLI with the strategy in YAML, and drawings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from tests.toy import Toy, ToyData

from lightning_pipe import PipelineStrategy, ScheduleError, cli

pytestmark = pytest.mark.filterwarnings(
    "ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"  # LightningCLI's, not ours
)

ROOT = Path(__file__).parents[1]
ARGUMENTS = {
    "pipeline_parallel_size": 2,
    "num_microbatches": 4,
    "microbatch_size": 2,
    "schedule": "interleaved_1f1b",
    "virtual_stages": 2,
    "split_points": ["layers.0", "layers.2", "layers.3"],
}


def config(folder: Path, strategy: Any, **trainer: Any) -> str:
    """Writes a YAML file for `lightning-pipe fit` and returns its path."""
    values = {
        "seed_everything": 3,
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "strategy": strategy,
            "max_epochs": 2,
            "logger": False,
            "default_root_dir": str(folder),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [
                {
                    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                    "init_args": {"dirpath": str(folder), "filename": "toy"},
                }
            ],
            **trainer,
        },
        "model": {"class_path": "tests.toy.Toy"},
        "data": {"class_path": "tests.toy.ToyData"},
    }
    path = folder / "fit.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def by_class_path(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "lightning_pipe.PipelineStrategy", "init_args": arguments}


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Runs the command in this process."""
    monkeypatch.setattr(sys, "argv", ["lightning-pipe", *arguments])
    cli.main()


def fit_in_python(strategy: Any) -> dict[str, torch.Tensor]:
    """The same training as the YAML file's, with a Trainer made by hand."""
    seed_everything(3, verbose=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if strategy == "auto" else 2,
        strategy=strategy if strategy == "auto" else PipelineStrategy(**strategy),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    model = Toy()
    trainer.fit(model, datamodule=ToyData())
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and log steps
def test_fit_in_two_processes_from_yaml(pool: Callable[..., Any], tmp_path: Path) -> None:
    """`lightning-pipe fit` starts its second process, and trains as Python and as one device do."""
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("lightning-pipe")),
            *("fit", "--config", config(tmp_path, by_class_path(**ARGUMENTS))),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr
    assert "interleaved_1f1b: 2 ranks x 2 chunks" in " ".join(result.stderr.split())
    saved = torch.load(tmp_path / "toy.ckpt", weights_only=True)["state_dict"]
    in_python = pool(2, fit_in_python, ARGUMENTS, timeout=100)[0]
    on_one_device = fit_in_python("auto")
    assert list(saved) == list(on_one_device)
    for name, value in on_one_device.items():
        torch.testing.assert_close(saved[name], in_python[name], rtol=0, atol=0)
        torch.testing.assert_close(saved[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy", ["pipeline", "pipeline_gpipe", by_class_path(**ARGUMENTS)], ids=str
)
def test_printed_config_reloads_to_itself(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    strategy: Any,
) -> None:
    printed = []
    path = config(tmp_path, strategy)
    for _ in range(2):
        with pytest.raises(SystemExit, match="0"):
            command(monkeypatch, "fit", "--config", path, "--print_config")
        printed.append(capsys.readouterr().out)
        path = str(tmp_path / "printed.yaml")
        Path(path).write_text(printed[-1])
    assert printed[0] == printed[1]
    loaded = yaml.safe_load(printed[0])["trainer"]["strategy"]
    if isinstance(strategy, str):
        assert loaded == strategy
    else:
        assert loaded["class_path"].endswith("PipelineStrategy")
        assert ARGUMENTS.items() <= loaded["init_args"].items()


def test_pipeline_is_the_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        command(monkeypatch, "validate", "--model", "tests.toy.Toy", "--print_config")
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == "pipeline"


@pytest.mark.parametrize("processes", [1, 2])
def test_wrong_schedule_names_the_right_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, processes: int
) -> None:
    path = config(tmp_path, by_class_path(schedule="1b1f"), devices=processes)
    with pytest.raises(ScheduleError, match=r"1b1f.*1f1b, .*gpipe, .*interleaved_1f1b, "):
        command(monkeypatch, "fit", "--config", path)


def test_draw_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, *["draw", "--schedule", "gpipe", "--stages", "2", "--microbatches", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpipe: 2 ranks, 3 micro-batches, bubble 25.0%, in flight 3 3"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["rank 0", "rank 1"]
    assert lines[2].split(" | ")[1].split()[:3] == ["F1", "F2", "F3"]


def test_draw_writes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--stages", "2", "--virtual-stages", "2", "--microbatches", "4"]
    files = [f"--{kind}={tmp_path / kind}" for kind in ("png", "svg", "trace")]
    command(monkeypatch, "draw", "--schedule", "interleaved_1f1b", *size, *files)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["wrote"] * 3
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "svg").read_text()
    spans = [
        e for e in json.loads((tmp_path / "trace").read_text())["traceEvents"] if e["ph"] == "X"
    ]
    assert len(spans) == 2 * 4 * 4  # F and B, 4 stages, 4 micro-batches


def test_draw_reads_a_csv_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    command(monkeypatch, *f"draw --schedule {file} --stages 2 --microbatches 2 --text".split())
    assert "2 ranks, 2 micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--schedule foo", "'foo' is unknown; legal are naive, gpipe, 1f1b"),
        ("--schedule 1f1b --stages 4 --microbatches 2", "num_microbatches=4 or more"),
        ("--schedule gpipe --stages 0", "0"),
    ],
)
def test_draw_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        command(monkeypatch, "draw", *arguments.split())


def test_every_second_unit_may_be_asked_for_on_a_command_line() -> None:
    """Where all values are text."""
    for every in (2, "2"):
        strategy = PipelineStrategy(activation_checkpointing=every)
        made = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
        assert made.strategy is strategy
    strategy = PipelineStrategy(activation_checkpointing="two")
    with pytest.raises(ValueError, match="activation_checkpointing='two'"):
        Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
