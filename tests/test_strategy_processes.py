"""Processes: started by the script itself, ended together when one fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests import lit
from tests.helpers import spawn_ranks
from torch.utils.data import DataLoader

ROOT = Path(__file__).parents[1]


class _Fails(lit.Lit):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ValueError("labels of batch 2 are out of range")
        return loss


class _FailsEarly(lit.Lit):
    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        net[0].register_forward_hook(self.check)
        return net

    def check(self, module, args, output):
        if getattr(self, "_trainer", None) is not None and self.trainer.global_step == 2:
            raise ValueError("activations of unit 0 are wrong")


def _fail(cls):
    trainer = lit.trainer({}, 2)
    trainer.fit(lit.seeded(cls), DataLoader(lit.rows(), batch_size=8))


@pytest.mark.parametrize(
    ("cls", "message", "stage", "failing"),
    [
        (_Fails, "labels of batch 2 are out of range", "stage 1", 0),
        (_FailsEarly, "activations of unit 0 are wrong", "stage 0", 1),
    ],
)
def test_a_failing_stage_ends_all_ranks_with_its_exception(cls, message, stage, failing):
    ended = spawn_ranks(2, _fail, cls, timeout=150)
    assert all(process.returncode not in (0, None) for process in ended)
    assert message in ended[0].stderr
    assert f"{stage}, rank" in ended[failing].stderr
    assert "micro-batch 0" in ended[failing].stderr


class _FailsBetween(lit.Lit):
    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            raise ValueError("a hook between the steps")


def _failing(cls):
    try:
        _fail(cls)
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("cls", "failing", "reason"),
    [
        (_Fails, 0, "labels of batch 2 are out of range"),
        (_FailsEarly, 1, "activations of unit 0 are wrong"),
        (_FailsBetween, 1, "a hook between the steps"),
    ],
)
def test_the_others_raise_an_error_that_names_who_failed_first(cls, failing, reason):
    ended = lit.run_ranks(2, _failing, cls)
    assert ended[failing] == ("ValueError", reason)
    name, text = ended[1 - failing]
    assert name == "PeerError"
    assert f"global rank {failing} failed first: ValueError: {reason}" in text


SCRIPT = """
from torch.utils.data import DataLoader
from tests import lit

def main():
    for fails in (False, True):
        module = lit.seeded(lit.Lit)
        if fails:
            def training_step(batch, batch_idx):
                raise ValueError("the step of the user fails")
            module.training_step = training_step
        trainer = lit.trainer({"start_method": "popen"}, 2, enable_model_summary=True)
        trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
        print("loss", trainer.callback_metrics["train_loss_epoch"].item(), trainer.global_rank)

if __name__ == "__main__":
    main()
"""


def _run_script(folder, script=SCRIPT):
    file = folder / "script.py"
    file.write_text(script)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MARK=str(folder))
    return subprocess.run(
        [sys.executable, str(file)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )


def _left_behind(folder):
    """Processes that this test's script has started and that still run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # another user's, or gone by now
            if process.environ().get("MARK") == str(folder):
                found.append(process.cmdline())
    return found


def test_a_script_starts_its_ranks_and_when_it_fails_leaves_no_process_behind(tmp_path):
    ended = _run_script(tmp_path)
    losses = re.findall(r"loss (\S+) (\d)", ended.stdout)
    assert sorted(rank for _, rank in losses) == ["0", "1"], ended.stdout + ended.stderr
    assert losses[0][0] == losses[1][0]
    assert "Total params: 468" in ended.stdout
    assert ended.returncode != 0
    assert "the step of the user fails" in ended.stderr
    end = time.monotonic() + 15
    while _left_behind(tmp_path) and time.monotonic() < end:
        time.sleep(0.5)
    assert _left_behind(tmp_path) == []


SPAWN = """
import torch
from torch.utils.data import DataLoader
from tests import lit

if __name__ == "__main__":
    module = lit.seeded(lit.Lit)
    before = module.net[0][0].weight.detach().clone(), module.net[6].weight.detach().clone()
    trainer = lit.trainer({"start_method": "spawn"}, 2)
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    after = module.net[0][0].weight, module.net[6].weight
    print("moved", [not torch.equal(a, b) for a, b in zip(before, after)])
"""


def test_spawned_ranks_give_the_trained_weights_back(tmp_path):
    ended = _run_script(tmp_path, SPAWN)
    assert "moved [True, True]" in ended.stdout, ended.stderr
