"""Debug mode: a file per rank, merged on one clock."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests import lit
from torch.utils.data import DataLoader

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.actionlog import merged


def fit(folder, debug):
    trainer = lit.trainer(
        {"num_microbatches": 2, "debug": debug}, 2, default_root_dir=folder, max_steps=2
    )
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))


def test_the_files_of_all_ranks_are_one_list(tmp_path):
    lit.run_ranks(2, fit, str(tmp_path), True)
    folder = tmp_path / "pipeline-debug"
    assert sorted(path.name for path in folder.iterdir()) == [
        "actions-rank-0.jsonl",
        "actions-rank-1.jsonl",
    ]
    with (folder / "actions-rank-1.jsonl").open("a") as file:
        file.write('{"time_s": 12')  # a process that is killed while it writes
    command = [sys.executable, "-m", "lightning_pipe.cli", "debug-merge", str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = ended.stdout.splitlines()
    times = [float(line.split()[0]) for line in lines]
    assert times == sorted(times)
    told = [line.split(maxsplit=2)[2] for line in lines]
    value = "'tanh after call 3 (#0)' (4, 8) float64"
    sent = f"rank 0  step 1  sends to rank 1 of 0F1: {value}"
    for line in (
        "rank 0  step 1  0F0 starts",
        sent,
        f"rank 1  step 1  1F1 starts: {value}",
        f"rank 1  step 1  receives from rank 0 for 1F1: {value}",
        "rank 1  step 1  sends to rank 0 of 1B1: (4, 8) float64",
        "rank 0  step 2  0B1 starts: (4, 8) float64",
        "rank 0  step 2  0B1 ends",
    ):
        assert line in told, ended.stdout
    assert told.index("rank 0  step 1  0F1 ends") < told.index(sent)
    assert told.index(sent) < told.index(f"rank 1  step 1  1F1 starts: {value}")


def test_the_variable_asks_for_it_and_nothing_else_does(tmp_path, monkeypatch):
    trainer = lit.trainer({"virtual_stages": 2, "num_microbatches": 2}, 1, max_steps=1)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))
    with pytest.raises(ConfigError, match=r"no actions-rank-\*\.jsonl in it"):
        list(merged(tmp_path))
    monkeypatch.setenv("LIGHTNING_PIPE_DEBUG", str(tmp_path / "here"))
    trainer = lit.trainer({"virtual_stages": 2, "num_microbatches": 2}, 1, max_steps=1)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))
    assert any("1B1 ends" in line for line in merged(tmp_path / "here"))
