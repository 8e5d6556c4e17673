"""Chosen steps are written as a trace and as a picture of predicted above measured."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import ConfigError, PipelineStrategy, TimelineRecorder
from lightning_pipe.runtime.clock import clock_offset_s


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Figures:
    """A logger's experiment that takes figures."""

    def __init__(self) -> None:
        self.tags: list[str] = []

    def add_figure(self, tag: str, figure: Any, global_step: int) -> None:
        self.tags.append(f"{tag} {global_step} {len(figure.axes)}")

    def save(self) -> None:
        """What `CSVLogger` asks of its own experiment."""

    def log_hparams(self, params: Any) -> None:
        """Ditto."""


class _Logger(pl.loggers.CSVLogger):
    figures = _Figures()

    @property
    def experiment(self) -> Any:
        return self.figures


def _fit(root: str) -> dict[str, Any]:
    recorder = TimelineRecorder([2, 3], directory=f"{root}/timelines")
    logger = _Logger(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineStrategy(num_microbatches=4),
            callbacks=[recorder],
            max_epochs=1,
            logger=logger,
            log_every_n_steps=100,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(_Module(), DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4))
    assert trainer.strategy._pipeline is not None
    offset_s = clock_offset_s(trainer.strategy._pipeline.ranks, always=True)
    return {
        "paths": [str(path) for path in recorder.paths],
        "tags": logger.figures.tags,
        "offset_s": offset_s,
    }


def test_steps_are_recorded_on_one_clock(tmp_path: Any) -> None:
    first, second = run_ranks(2, _fit, str(tmp_path), timeout=120)
    assert second["paths"] == []
    assert [path.rpartition("/")[2] for path in first["paths"]] == [
        "timeline_step2.json", "timeline_step2.png", "timeline_step3.json", "timeline_step3.png",
    ]  # fmt: skip
    assert first["tags"] == ["pipeline/timeline 2 2", "pipeline/timeline 3 2"]
    assert first["offset_s"] == 0.0
    assert abs(second["offset_s"]) < 0.05  # one machine, one clock
    events = json.loads(Path(first["paths"][0]).read_text())["traceEvents"]
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    assert len(spans) == 2 * 2 * 4
    for microbatch in range(4):
        made, used = spans[f"0F{microbatch}"], spans[f"1F{microbatch}"]
        assert made["ts"] + made["dur"] <= used["ts"] + 1.0


def test_wrong_steps_and_strategies_are_refused() -> None:
    for arguments in ({"steps": []}, {"steps": [0]}, {"picture": "gif"}):
        with pytest.raises(ConfigError, match="give"):
            TimelineRecorder(**arguments)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False,
                         callbacks=[TimelineRecorder()], enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    with pytest.raises(ConfigError, match="SingleDeviceStrategy"):
        trainer.fit(_Module(), DataLoader(TensorDataset(torch.ones(4, 4))))
