"""Faults while a checkpoint is written or read: the one before stays, and is found."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from tests import lit
from tests.faults.harness import LIMIT_S, Job
from tests.helpers import run_ranks
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

from lightning_pipe import folders, sharded
from lightning_pipe.errors import CheckpointError
from lightning_pipe.manners import AtomicCheckpointIO
from lightning_pipe.sharded import read_sharded


class _Broken:
    """What happens to the second checkpoint, and where."""

    fault, rank, count = "", 0, 0

    @classmethod
    def happen(cls, files):
        """Leaves a part of files, as a process that is killed, or a disk that is full."""
        cls.count += 1
        if cls.count < 2 or int(os.environ["RANK"]) != cls.rank:
            return
        sys.stderr.write("fault now\n")
        for file in files:
            os.truncate(file, Path(file).stat().st_size // 2)
        if cls.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device")


def _half(self, checkpoint, path, storage_options=None):
    """In the place of what writes a plain file."""
    _own(self, checkpoint, path, storage_options)
    _Broken.happen([path])


def _half_part(self, plan, planner):
    """In the place of what writes a rank's part of a folder."""
    written = _own_part(self, plan, planner)
    written.wait()
    number = int(os.environ["RANK"])
    _Broken.happen(Path(self.path).glob(f"__{number}_*"))
    return written


_own, _own_part = TorchCheckpointIO.save_checkpoint, FileSystemWriter.write_data


def fit(folder, fault, mode):
    _Broken.fault, _Broken.rank = fault, int(bool(mode))
    TorchCheckpointIO.save_checkpoint = _half
    FileSystemWriter.write_data = _half_part
    saves = ModelCheckpoint(
        folder, every_n_train_steps=2, save_last=True, save_top_k=0, save_on_train_epoch_end=False
    )
    strategy = {"num_microbatches": 2, "save_distributed_checkpoint": mode}
    trainer = lit.trainer(strategy, 2, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))


def resume(folder, mode):
    saves = ModelCheckpoint(folder, save_last=True)
    strategy = {"num_microbatches": 2, "save_distributed_checkpoint": mode}
    trainer = lit.trainer(strategy, 2, callbacks=[saves], enable_checkpointing=True, max_epochs=2)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8), ckpt_path="last")
    return trainer.global_step


@pytest.mark.parametrize(
    ("fault", "mode"), [("kill", False), ("full", False), ("kill", True), ("full", "async")]
)
def test_the_checkpoint_before_stays_and_is_found(tmp_path, fault, mode):
    ended = Job(2, fit, str(tmp_path), fault, mode).end()
    assert all(process.returncode not in (0, None) for process in ended)
    assert all(process.seconds < LIMIT_S for process in ended)
    writer = int(bool(mode))  # of the file, or of a part of the folder
    reason = f"global rank {writer} has died" if fault == "kill" else "No space left on device"
    assert reason in ended[1 - writer].stderr
    saved = read_sharded(tmp_path / "last.ckpt") if mode else torch.load(tmp_path / "last.ckpt")
    assert saved["global_step"] == 2
    parts = [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")]
    assert len(parts) == (fault == "kill" or bool(mode)), parts
    assert run_ranks(2, resume, str(tmp_path), mode, timeout=160) == [10, 10]


class _KilledError(BaseException):
    """Ends what runs, and whoever would clean up after it."""


def _dies_at(patch, place):
    """The process is killed before, or in the midst of, a step of moving folders."""
    steps, replace, rmtree = [0], os.replace, shutil.rmtree

    def one(*args):
        steps[0] += 1
        if steps[0] == place:
            raise _KilledError
        replace(*args)

    def many(folder):
        steps[0] += 1
        if steps[0] == place:
            next(Path(folder).iterdir()).unlink()
            raise _KilledError
        rmtree(folder)

    patch.setattr(folders.os, "replace", one)
    patch.setattr(folders.shutil, "rmtree", many)


def _folder(path, text):
    path.mkdir()
    for number in range(3):
        (path / str(number)).write_text(text)


def test_wherever_a_process_dies_while_it_moves_a_folder_last_finds_a_whole_one(
    tmp_path, monkeypatch
):
    part, target = tmp_path / ".last.ckpt.part", tmp_path / "last.ckpt"
    _folder(target, "0")
    places = [*range(1, 6), *range(1, 6), 99]
    for number, place in enumerate(places, 1):
        shutil.rmtree(part, ignore_errors=True)  # as the next one begins
        _folder(part, str(number))
        with monkeypatch.context() as patch:
            _dies_at(patch, place)
            with suppress(_KilledError):
                folders.replace(part, target)
        trainer = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[])
        found = ModelCheckpoint(tmp_path)._find_last_checkpoints(trainer)
        newest = Path(max(found, key=os.path.getmtime))
        texts = {(newest / str(file)).read_text() for file in range(3)}
        assert len(texts) == 1, (place, newest)
        assert int(texts.pop()) >= number - len(places[:5]), "an older one"
        if place > 5:
            assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
            assert newest == target


def train(folder):
    trainer = lit.trainer({"num_microbatches": 2, "save_distributed_checkpoint": True}, 1)
    trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(8), batch_size=8))
    trainer.save_checkpoint(f"{folder}/x.ckpt")


def test_any_damaged_file_of_a_folder_is_an_error_that_names_it(tmp_path):
    run_ranks(1, train, str(tmp_path), timeout=160)
    folder, target = tmp_path / "x.ckpt", tmp_path / "one.ckpt"
    messages = []
    for file in list(folder.iterdir()):
        whole = file.read_bytes()
        for num_bytes in range(0, len(whole), max(1, len(whole) // 12)):
            for data in (whole[:num_bytes], whole[:num_bytes] + b"\x00\xff" + whole[num_bytes:]):
                file.write_bytes(data)
                try:
                    sharded.consolidate(folder, target)
                except CheckpointError as error:  # anything else fails the test
                    messages.append(str(error))
                else:
                    assert data != whole[:num_bytes], (file.name, num_bytes)
        file.write_bytes(whole)
    sharded.consolidate(folder, target)
    assert len(messages) >= 40
    assert all("x.ckpt" in text or "index of the checkpoint asks" in text for text in messages)


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
        with pytest.raises(OSError, match="File too large") as caught:
            io.save_checkpoint({"a": torch.zeros(1 << 20)}, tmp_path / "x.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    notes = getattr(caught.value, "__notes__", ["x.ckpt cannot be written; what was there before"])
    assert "x.ckpt cannot be written; what was there before" in notes[0]
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
