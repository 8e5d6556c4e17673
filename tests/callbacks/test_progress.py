"""Progress is a line every few steps and a table of the stages at the end."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from tests import lit
from tests.helpers import run_ranks
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PipelineProgress


class _Lines(logging.Handler):
    """Keeps what is said on the console."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += record.getMessage().splitlines()


class _Readings(Callback):
    """Keeps the bubble of this rank in every step; on rank 1 one that cannot be missed."""

    def __init__(self) -> None:
        self.fractions: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        strategy = trainer.strategy
        if hasattr(strategy, "bubble"):
            strategy._pipeline.step_s *= 1 + 1000 * trainer.global_rank
            self.fractions.append(strategy.bubble.measured_fraction)


def _fit(devices: int, root: str, *, plain: bool = False) -> tuple[list[str], str, list[float]]:
    console, said = logging.getLogger("lightning.pytorch.utilities.rank_zero"), _Lines()
    console.addHandler(said)
    module, readings = lit.seeded(lit.Lit), _Readings()
    trainer = lit.trainer(
        None if plain else {"num_microbatches": 4},
        devices,
        callbacks=[readings, PipelineProgress(every_n_steps=2)],
        logger=CSVLogger(root),
    )
    loader = DataLoader(lit.rows(), batch_size=8)
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)  # which has no line
    console.removeHandler(said)
    return said.lines, str(trainer.logger.log_dir), readings.fractions


def test_lines_name_the_busiest_stage_and_the_end_has_a_row_for_each(tmp_path: Any) -> None:
    (lines, folder, first), (others, _, second) = run_ranks(2, _fit, 2, str(tmp_path), timeout=120)
    steps = [line for line in lines if line.startswith("step ")]
    pattern = (
        r"step 4/5 \| train_loss_step \d\.\d+ \| [\d,]+ samples/s \| "
        r"bubble \d+\.\d% \(ideal 20\.0%\) \| busiest stage [01] \(\d+%\)"
    )
    assert any(re.fullmatch(pattern, line) for line in steps)
    assert steps.count("step 5/5") == 1  # of the validation
    place = next(n for n, line in enumerate(lines) if line.startswith("5 steps, "))
    pattern = r"5 steps, 32 samples at [\d,]+ samples/s, bubble \d+\.\d% \(ideal 20\.0%\)"
    assert re.fullmatch(pattern, lines[place])
    # the bubble of a line is the mean over ranks; that of the end is over all steps but the first
    assert min(second) > 0.99
    means = [(own + other) / 2 for own, other in zip(first, second, strict=True)]
    for line, mean in (
        (steps[0], means[1]),
        (next(line for line in steps if line.startswith("step 4/")), sum(means[2:4]) / 2),
        (lines[place], sum(means[1:]) / 4),
    ):
        assert f"bubble {mean:.1%} (" in line
    assert lines[place + 1].split()[:5] == ["stage", "rank", "units", "parameters", "busy"]
    for stage in range(2):
        row = lines[place + 2 + stage].split()
        assert row[:2] == [str(stage)] * 2
        assert row[4 + (not row[4].endswith("%"))].endswith("%")
        assert row[-1] in ("MiB", "GiB")
    assert not any(line.startswith(("step ", "5 steps")) for line in others)
    header = Path(folder, "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"samples_per_s", "bubble_fraction"} <= set(header)


def test_another_strategy_has_lines_without_a_bubble(tmp_path: Any) -> None:
    lines, *_ = _fit(1, str(tmp_path), plain=True)
    assert any(line.startswith("step 4/5 | ") and "samples/s" in line for line in lines)
    assert any(line.startswith("5 steps, ") for line in lines)
    assert not any("bubble" in line or "busiest" in line for line in lines)


def test_wrong_arguments_are_refused() -> None:
    for arguments in ({"every_n_steps": 0}, {"count": "words"}):
        with pytest.raises(ConfigError, match=r"give|choose"):
            PipelineProgress(**arguments)
