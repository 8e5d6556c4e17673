"""Checkpoints of which every rank writes its part are those of one device."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from tests import lit
from tests.lit import run_ranks
from tests.test_data_parallel import _loader
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader

from lightning_pipe import CheckpointError, ConfigError, PipelineStrategy, folders
from lightning_pipe.cli import consolidate
from lightning_pipe.runtime.stored import stored_tensors
from lightning_pipe.sharded import read_sharded
from lightning_pipe.split.stored import StoredTensor

LAYOUTS = {
    "one device": (1, None),
    "P=1": (1, {"num_microbatches": 2}),
    "P=2": (2, {}),
    "P=4": (4, {}),
    "P=2, D=2": (4, {"pipeline_parallel_size": 2, "data_parallel_size": 2}),
    "P=2, V=2": (2, {"virtual_stages": 2, "num_microbatches": 4}),
}


class _Tied(lit.LitTied):
    """A tied weight, a buffer that is written, and Adam."""

    def __init__(self, depth=6):
        super().__init__(depth=depth)
        self.norm = nn.BatchNorm1d(3, affine=False)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def _train(strategy, folder, max_steps, ckpt_path=None, mode=None, keep=-1):
    if mode is not None:
        strategy = {**strategy, "save_distributed_checkpoint": mode}
    module = lit.seeded(_Tied)
    copies = (strategy or {}).get("data_parallel_size")
    loader = _loader(lit.tokens(24), 8 // (copies or 1), copies)
    return lit.fit_and_keep(strategy, module, loader, folder, max_steps, ckpt_path, keep)


@pytest.mark.parametrize(
    ("first", "mode", "second"),
    [
        ("P=2", True, "P=4"),
        ("P=2", "async", "P=2, V=2"),
        ("P=2, V=2", True, "P=1"),
        ("P=4", "async", "P=2"),
        ("P=1", True, "P=2"),
        ("P=2, D=2", True, "P=2"),
        ("P=2", True, "P=2, D=2"),
    ],
)
def test_resuming_in_another_layout_goes_on_exactly(tmp_path, first, mode, second):
    expected = run_ranks(1, _train, None, str(tmp_path / "whole"), 6)[0]
    ranks, strategy = LAYOUTS[first]
    run_ranks(ranks, _train, strategy, str(tmp_path), 3, None, mode)
    folder = tmp_path / "step=3.ckpt"
    assert [p.name for p in tmp_path.iterdir() if "step" in p.name] == [folder.name]
    parts = {p.name.split("_")[2] for p in folder.glob("*.distcp")}
    copies = strategy.get("data_parallel_size", 1)
    assert len(parts) == ranks // copies, "every rank of a copy writes its part"
    ranks, strategy = LAYOUTS[second]
    results = run_ranks(ranks, _train, strategy, str(tmp_path / "b"), 6, str(folder))
    lit.assert_equal(results, expected)
    consolidate([str(folder), str(tmp_path / "one.ckpt")])
    results = run_ranks(1, _train, None, str(tmp_path / "c"), 6, str(tmp_path / "one.ckpt"))
    lit.assert_equal(results, expected)


def test_the_plain_file_of_a_folder_is_that_of_one_device(tmp_path):
    run_ranks(1, _train, None, str(tmp_path / "one"), 3)
    run_ranks(2, _train, {}, str(tmp_path / "two"), 3, None, True)
    consolidate([str(tmp_path / "two" / "step=3.ckpt"), str(tmp_path / "plain.ckpt")])
    one = torch.load(tmp_path / "one" / "step=3.ckpt", weights_only=True)
    two = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert one.keys() == two.keys()
    assert list(one["state_dict"]) == list(two["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(two[key], one[key], rtol=1e-9, atol=1e-9)
    loaded = _Tied.load_from_checkpoint(tmp_path / "plain.ckpt", map_location="cpu")
    assert torch.isfinite(loaded.net.head.weight).all()


def _keeps_one(folder, mode):
    return _train({}, folder, 9, None, mode, keep=1)


@pytest.mark.parametrize("mode", [True, "async"])
def test_old_folders_are_removed_when_the_new_one_is_there(tmp_path, mode):
    run_ranks(2, _keeps_one, str(tmp_path), mode)
    assert [path.name for path in tmp_path.iterdir()] == ["step=9.ckpt"]
    assert read_sharded(tmp_path / "step=9.ckpt")["global_step"] == 9


def test_a_folder_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "last.ckpt").write_bytes(b"of another run, in one file")
    (tmp_path / ".part").mkdir()
    folders.replace(tmp_path / ".part", tmp_path / "last.ckpt")
    assert [(path.name, path.is_dir()) for path in tmp_path.iterdir()] == [("last.ckpt", True)]


def _reads(folder):
    read: list[str] = []
    state = read_sharded(folder)
    for name, value in state["state_dict"].items():
        original = value._read
        value._read = lambda name=name, original=original: (read.append(name), original())[1]
    return state, read


def test_a_stored_tensor_is_read_when_it_is_used(tmp_path):
    run_ranks(2, _train, {}, str(tmp_path), 3, None, True)
    state, read = _reads(tmp_path / "step=3.ckpt")
    weights = state["state_dict"]
    assert all(isinstance(value, StoredTensor) for value in weights.values())
    first, second = list(weights)[:2]
    assert weights[first].shape == weights[first].clone().shape
    assert read == [first]
    with torch.no_grad():
        weights[second].zero_()  # as a hook may
    assert weights[second].abs().sum() == 0
    assert not isinstance(pickle.loads(pickle.dumps(weights[first])), StoredTensor)


def test_what_is_not_complete_or_was_changed_is_refused(tmp_path):
    run_ranks(2, _train, {}, str(tmp_path), 3, None, True)
    folder = tmp_path / "step=3.ckpt"
    part = next(folder.glob("__1_*.distcp"))
    content = part.read_bytes()
    part.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cut short or changed"):
        consolidate([str(folder), str(tmp_path / "one.ckpt")])
    assert not (tmp_path / "one.ckpt").exists()
    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match=r"asks for posix\.system"):
        stored_tensors(folder)
    (folder / ".metadata").write_bytes(index[: len(index) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        stored_tensors(folder)
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_sharded(folder)
    with pytest.raises(CheckpointError, match="no folder of a sharded checkpoint"):
        consolidate([str(tmp_path), str(tmp_path / "one.ckpt")])


class _Evil:
    def __reduce__(self):
        import os

        return os.system, ("true",)


def _refused(folder):
    trainer = lit.trainer({"save_distributed_checkpoint": True}, 2, plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        trainer.fit(lit.seeded(_Tied), DataLoader(lit.tokens(8), batch_size=8))
    return True


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="give True, False or 'async'"):
        PipelineStrategy(save_distributed_checkpoint="later")
    assert run_ranks(2, _refused, str(tmp_path)) == [True, True]


def _full(folder):
    """The file system of one rank is full when it writes."""
    trainer = lit.trainer({"save_distributed_checkpoint": True}, 2)
    trainer.fit(lit.seeded(_Tied), DataLoader(lit.tokens(8), batch_size=8))
    path = Path(folder) / "x.ckpt"
    trainer.save_checkpoint(path)
    before = sorted(p.name for p in path.iterdir())

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if trainer.global_rank == 1:
            patch.setattr(FileSystemWriter, "write_data", fails)
        with pytest.raises(CheckpointError, match="No space left"):
            trainer.save_checkpoint(path)
    assert sorted(p.name for p in path.iterdir()) == before
    return float(read_sharded(path)["state_dict"]["net.head.weight"].abs().sum())


def test_a_failed_write_leaves_the_old_folder(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(run_ranks(2, _full, str(tmp_path)))
