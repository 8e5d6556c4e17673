"""The examples, by the very YAML files that the README runs, made smaller where that saves time."""

import csv
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.digits import Digits, ResNet
from examples.gpt import GPT, Manual
from lightning.pytorch import Trainer

from lightning_pipe import PipelineStrategy

ROOT = Path(__file__).parents[1]


def run_config(name: str, folder: str, *arguments: str) -> dict[str, Any]:
    """`lightning-pipe fit --config configs/<name>.yaml` on the ranks of the test."""
    from lightning.pytorch.cli import LightningCLI

    os.chdir(folder)  # the examples write to runs/
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and log steps
        fit = ["fit", "--config", str(ROOT / "configs" / f"{name}.yaml"), *arguments]
        trainer = LightningCLI(args=fit).trainer
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert trainer.strategy.plan is not None
    return {
        **{key: value.item() for key, value in trainer.callback_metrics.items()},
        "units": [stage.num_units for stage in trainer.strategy.plan.stages],
        "ideal_bubble": trainer.strategy.plan.ideal_bubble_fraction,
    }


def validate_alone(model: Any, data: Any, num_batches: int | float = 1.0) -> dict[str, float]:
    """Validates in this process, with Lightning alone."""
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        limit_val_batches=num_batches,
    )
    (values,) = trainer.validate(model, data, verbose=False)
    return dict(values)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about workers and log steps
@pytest.mark.timeout(400)
def test_gpt(pool: Callable[..., Any], tmp_path: Path) -> None:
    arguments = (
        *("--model.init_args.width=32", "--model.init_args.layers=2"),
        *("--model.init_args.learning_rate=0.01", "--data.init_args.context=32"),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=20"),
        "--trainer.limit_val_batches=4",
    )
    first, second = pool(2, run_config, "gpt", str(tmp_path), *arguments, timeout=300)
    assert first == second
    assert len(first["units"]) == 2
    assert min(first["units"]) >= 1
    assert first["ideal_bubble"] == pytest.approx(1 / 9)
    with (tmp_path / "runs/logs/gpt/version_0/metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["bubble_fraction"]]
    assert [float(row["tokens_per_s"]) > 0 for row in rows] == [True] * 2
    assert all(0 <= float(row["bubble_fraction"]) < 1 for row in rows)

    data = Manual(context=32, batch_size=16)
    data.setup("fit")
    assert 3.0 < data.unigram_entropy < 3.6
    assert first["val_loss"] < 4.0  # from 5.5; a whole run ends well below the entropy

    model = GPT.load_from_checkpoint(tmp_path / "runs/gpt/gpt.ckpt", weights_only=True)
    assert model.head.weight is model.embedding.weight
    assert validate_alone(model, data, 4)["val_loss"] == pytest.approx(first["val_loss"], rel=1e-5)
    torch.manual_seed(0)
    text = model.generate("The ", num_bytes=8)
    assert text.startswith("The ")
    assert len(text.encode(errors="replace")) >= 12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(400)
def test_digits(pool: Callable[..., Any], tmp_path: Path) -> None:
    arguments = ("--trainer.max_epochs=1", "--model.init_args.width=8")
    first, second = pool(2, run_config, "digits", str(tmp_path), *arguments, timeout=300)
    assert first["val_accuracy"] == second["val_accuracy"] > 0.5
    model = ResNet.load_from_checkpoint(tmp_path / "runs/digits/digits.ckpt", weights_only=True)
    alone = validate_alone(model, Digits())
    assert alone["val_accuracy"] == pytest.approx(first["val_accuracy"], rel=1e-6)
    assert alone["val_loss"] == pytest.approx(first["val_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["gpt_copies", "gpt_sharded", "gpt_tensor"])
def test_a_config_of_several_axes_goes_on_top_of_the_example(name: str) -> None:
    from lightning.pytorch.cli import LightningCLI

    files = [str(ROOT / "configs" / f"{file}.yaml") for file in ("gpt", name)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = [argument for file in files for argument in ("--config", file)]
        trainer = LightningCLI(args=given, run=False).trainer
    assert isinstance(trainer.strategy, PipelineStrategy)
    copies = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
    assert copies == (1 if name == "gpt_tensor" else 2)
    assert trainer.strategy._pipeline_layout.num_ranks == 2
    assert trainer.strategy._reduction.is_sharded == (name == "gpt_sharded")
