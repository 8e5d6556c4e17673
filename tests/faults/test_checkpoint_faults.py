"""Faults while a checkpoint is written or read: the one before stays, and is found."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from tests import lit
from tests.faults.harness import Job
from tests.helpers import run_ranks
from torch.utils.data import DataLoader

from lightning_pipe.errors import CheckpointError
from lightning_pipe.manners import AtomicCheckpointIO


class _Broken(AtomicCheckpointIO):
    """What happens to the second checkpoint."""

    fault, count = "", 0


def _half(self, checkpoint, path, storage_options=None):
    """Writes a part of the file, as a process that is killed, or a disk that is full."""
    _Broken.count += 1
    _own(self, checkpoint, path, storage_options)
    if _Broken.count < 2:
        return
    sys.stderr.write("fault now\n")
    os.truncate(path, Path(path).stat().st_size // 2)
    if _Broken.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(28, "No space left on device")


_own = TorchCheckpointIO.save_checkpoint


def fit(folder, fault):
    _Broken.fault = fault
    TorchCheckpointIO.save_checkpoint = _half
    saves = ModelCheckpoint(
        folder, every_n_train_steps=2, save_last=True, save_top_k=0, save_on_train_epoch_end=False
    )
    trainer = lit.trainer({"num_microbatches": 2}, 2, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))


def resume(folder):
    saves = ModelCheckpoint(folder, save_last=True)
    trainer = lit.trainer(
        {"num_microbatches": 2}, 2, callbacks=[saves], enable_checkpointing=True, max_epochs=2
    )
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8), ckpt_path="last")
    return trainer.global_step


@pytest.mark.parametrize("fault", ["kill", "full"])
def test_the_checkpoint_before_stays_and_is_found(tmp_path, fault):
    ended = Job(2, fit, str(tmp_path), fault).end()
    assert all(process.returncode not in (0, None) for process in ended)
    reason = "global rank 0 has died" if fault == "kill" else "No space left on device"
    assert reason in ended[1].stderr
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    parts = [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]
    assert len(parts) == (fault == "kill"), parts
    assert run_ranks(2, resume, str(tmp_path), timeout=160) == [10, 10]


def test_what_a_killed_writer_left_goes_with_the_next_checkpoint_of_that_name(tmp_path):
    (tmp_path / ".x[1].ckpt.4711.part").write_bytes(b"half")
    (tmp_path / ".x1.ckpt.4711.part").write_bytes(b"of another file")
    AtomicCheckpointIO().save_checkpoint({"a": 1}, tmp_path / "x[1].ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x1.ckpt.4711.part", "x[1].ckpt"]


def test_a_file_that_may_not_grow_so_large_is_an_error_that_leaves_the_old_one(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": torch.zeros(10)}, tmp_path / "x.ckpt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            io.save_checkpoint({"a": torch.zeros(1 << 20)}, tmp_path / "x.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(io.load_checkpoint(tmp_path / "x.ckpt")["a"]) == 10
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_truncated_checkpoint_is_named(tmp_path):
    io, file = AtomicCheckpointIO(), tmp_path / "x.ckpt"
    io.save_checkpoint({"a": torch.zeros(1000)}, file)
    whole = file.read_bytes()
    for num_bytes in (0, 10, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:num_bytes])
        with pytest.raises(CheckpointError, match=rf"x.ckpt is damaged: it has {num_bytes} bytes"):
            io.load_checkpoint(file)


class _Code:
    """Runs when it is unpickled."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code of a checkpoint ran')",)


def load_tampered(path):
    trainer = lit.trainer({}, 2)
    try:
        loader = DataLoader(lit.rows(), batch_size=8)
        trainer.fit(lit.seeded(lit.Lit), loader, ckpt_path=path, weights_only=True)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_code_in_a_checkpoint_is_refused_on_all_ranks(tmp_path):
    lit_file = tmp_path / "x.ckpt"
    torch.save({"state_dict": {}, "more": _Code()}, lit_file)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        AtomicCheckpointIO().load_checkpoint(lit_file, weights_only=True)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        AtomicCheckpointIO().load_mapped(lit_file, weights_only=True)
    for kind, text in run_ranks(2, load_tampered, str(lit_file), timeout=160):
        assert kind == "UnpicklingError"
        assert "Weights only load failed" in text
