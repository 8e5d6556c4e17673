"""Signals: all ranks end at one place, with Lightning's checkpoints, and none is left."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from tests import lit
from tests.faults.harness import Job
from torch.utils.data import DataLoader


class _Slow(lit.Lit):
    def training_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking and self.trainer.global_step >= 2:
            sys.stderr.write("third step\n")
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        sys.stderr.write("validates\n")
        time.sleep(0.02)
        return super().validation_step(batch, batch_idx)


class _Kept(OnExceptionCheckpoint):
    def teardown(self, *args, **kwargs):
        """The run has failed: the file stays."""


def _loader():
    return DataLoader(lit.rows(), batch_size=2)


def fit(folder, validates, slurm):
    arguments = {}
    if slurm:
        rank = os.environ["RANK"]
        os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2")
        os.environ.update(SLURM_PROCID=rank, SLURM_LOCALID=rank)
        os.environ.update(SLURM_NODEID="0", SLURM_JOB_ID="7", SLURM_JOB_NAME="train")
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        environment = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
        arguments = {"plugins": [environment], "max_steps": 30}
    trainer = lit.trainer(
        {"num_microbatches": 2},
        2,
        max_epochs=-1,
        callbacks=[_Kept(folder)],
        default_root_dir=folder,
        enable_checkpointing=True,
        limit_val_batches=10_000 if validates else 0,
        val_check_interval=3,
        num_sanity_val_steps=0,
        **arguments,
    )
    loader = DataLoader(torch.utils.data.ConcatDataset([lit.rows()] * 500), batch_size=2)
    try:
        trainer.fit(lit.seeded(_Slow), _loader(), loader if validates else None)
    except BaseException as error:
        sys.stderr.write(f"ends with {type(error).__name__} in step {trainer.global_step}\n")
        raise


@pytest.mark.parametrize(
    ("number", "to", "error", "validates"),
    [
        (signal.SIGTERM, [1], "SIGTERMException", False),
        (signal.SIGTERM, [0, 1], "SIGTERMException", True),
        (signal.SIGINT, [0], "SystemExit", False),
        (signal.SIGINT, [1, 0], "SystemExit", True),
    ],
)
def test_a_signal_ends_all_ranks_at_one_place_with_a_checkpoint(
    tmp_path, number, to, error, validates
):
    job = Job(2, fit, str(tmp_path), validates, False)
    for rank in (0, 1):
        job.await_text("validates" if validates else "third step", rank)
    for rank in to:
        os.kill(job.processes[rank].pid, number)
    ended = job.end("ends with")
    steps = set()
    for process in ended:
        # Lightning's exception for SIGTERM is an exit without an error
        assert process.returncode == (number == signal.SIGINT), process.stderr
        assert f"ends with {error} in step " in process.stderr
        assert "Error" not in process.stderr, process.stderr
        steps.add(process.stderr.split(f"ends with {error} in step ")[1].split()[0])
    assert len(steps) == 1
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == int(steps.pop())
    assert all(torch.isfinite(value).all() for value in saved["state_dict"].values())


def test_slurms_signal_saves_and_requeues_between_two_batches(tmp_path):
    command = tmp_path / "scontrol"
    command.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    job = Job(2, fit, str(tmp_path), False, True)
    job.await_text("third step", 1)
    for process in job.processes:
        os.kill(process.pid, signal.SIGUSR1)
    end_s = time.monotonic() + 60
    while not Path(tmp_path, "requeued").exists() and time.monotonic() < end_s:
        time.sleep(0.05)
    assert Path(tmp_path, "requeued").read_text() == "requeue 7\n"
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert saved["global_step"] >= 2
    for process in job.end("third step"):
        assert process.returncode == 0, process.stderr
