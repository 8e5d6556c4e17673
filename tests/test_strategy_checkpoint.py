"""Checkpoints are ordinary Lightning files, made and read by any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy
from lightning_pipe.manners import AtomicCheckpointIO


def _save(strategy, folder):
    module = lit.seeded(lit.LitTied, depth=3)
    keep = ModelCheckpoint(folder, filename="end", save_top_k=-1)
    trainer = lit.trainer(strategy, lit.world(), enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, DataLoader(lit.tokens(24), batch_size=8))
    trainer.save_checkpoint(Path(folder) / "after.ckpt")
    return lit.outcome(module, trainer)


@pytest.mark.parametrize("strategy", [{}, {"virtual_stages": 2, "num_microbatches": 4}])
def test_the_file_is_complete_and_loads_in_one_process(tmp_path, strategy):
    expected = run_ranks(1, _save, None, str(tmp_path / "one"))[0]
    results = run_ranks(2, _save, strategy, str(tmp_path / "two"))
    lit.assert_equal(results, expected)
    for name in ("end.ckpt", "after.ckpt"):
        one, two = (
            torch.load(tmp_path / folder / name, weights_only=True) for folder in ("one", "two")
        )
        assert one.keys() == two.keys()
        assert list(one["state_dict"]) == list(two["state_dict"])
        torch.testing.assert_close(two["state_dict"], one["state_dict"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            two["optimizer_states"], one["optimizer_states"], rtol=1e-9, atol=1e-9
        )
    loaded = lit.LitTied.load_from_checkpoint(tmp_path / "two" / "end.ckpt", map_location="cpu")
    for name, value in results[0]["weights"].items():
        assert torch.equal(loaded.state_dict()[name], value.float())
    assert sorted(p.name for p in (tmp_path / "two").iterdir()) == ["after.ckpt", "end.ckpt"]


class _Given(lit.Lit):
    """Keeps the network that it is given among its hyperparameters, in a container too."""

    def __init__(self, net, others=()):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.others = net, nn.ModuleList(others)


def _save_given(strategy, path):
    made = lit.seeded(lit.Lit).net
    module = _Given(made, [made[0]]).double()
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(16), batch_size=8))
    trainer.save_checkpoint(path)


@pytest.mark.filterwarnings("ignore:.*is an instance of `nn.Module`")
def test_modules_among_the_hyperparameters_are_saved_with_all_weights(tmp_path):
    run_ranks(2, _save_given, {}, str(tmp_path / "two.ckpt"))
    loaded = torch.load(tmp_path / "two.ckpt", weights_only=False)
    given, state = loaded["hyper_parameters"], loaded["state_dict"]
    for name, value in given["net"].state_dict().items():
        assert torch.equal(value, state[f"net.{name}"])
    assert torch.equal(given["others"][0][0].weight, state["net.0.0.weight"])
    assert given["net"](torch.zeros(2, 8, dtype=torch.float64)).requires_grad


def _train(strategy, folder, *, max_steps, ckpt_path=None):
    module = lit.seeded(lit.Lit)
    module.configure_optimizers = lambda: torch.optim.Adam(module.parameters(), lr=1e-2)
    loader = DataLoader(lit.rows(24), batch_size=8)
    return lit.fit_and_keep(strategy, module, loader, folder, max_steps, ckpt_path)


LAYOUTS = {
    "one device": (1, None),
    "P=2": (2, {}),
    "P=4": (4, {}),
    "P=2, V=2": (2, {"virtual_stages": 2, "num_microbatches": 4}),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("P=2", "P=4"),
        ("P=2", "P=2, V=2"),
        ("P=2", "one device"),
        ("one device", "P=2"),
        ("P=2, V=2", "P=2"),
    ],
)
def test_resuming_in_another_layout_goes_on_exactly(tmp_path, first, second):
    expected = run_ranks(1, _go_on, None, str(tmp_path / "whole"), 6, None)[0]
    ranks, strategy = LAYOUTS[first]
    run_ranks(ranks, _go_on, strategy, str(tmp_path), 3, None)
    ranks, strategy = LAYOUTS[second]
    path = str(tmp_path / "step=3.ckpt")
    lit.assert_equal(run_ranks(ranks, _go_on, strategy, str(tmp_path / "b"), 6, path), expected)


def _go_on(strategy, folder, max_steps, path):
    return _train(strategy, folder, max_steps=max_steps, ckpt_path=path)


def _resume_broken(folder):
    with pytest.raises(RuntimeError, match=r"net\.0\.0\.renamed"):
        _train({}, folder, max_steps=6, ckpt_path=f"{folder}/broken.ckpt")
    return True


def test_a_renamed_key_is_an_error_on_all_ranks(tmp_path):
    run_ranks(2, _go_on, {}, str(tmp_path), 3, None)
    checkpoint = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    state = checkpoint["state_dict"]
    state["net.0.0.renamed"] = state.pop("net.0.0.weight")
    torch.save(checkpoint, tmp_path / "broken.ckpt")
    assert run_ranks(2, _resume_broken, str(tmp_path)) == [True, True]


class _BatchNorm(lit.Lit):
    def make_net(self, width, depth):
        blocks = [
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth)
        ]
        return nn.Sequential(*blocks, nn.Linear(width, 4))


def _normed(strategy):
    module = lit.seeded(_BatchNorm)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8), DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, trainer)


def test_buffers_of_all_stages_come_home():
    expected = run_ranks(1, _normed, None)[0]
    results = run_ranks(2, _normed, {"num_microbatches": 1, "schedule": "gpipe"})
    lit.assert_equal(results, expected)


def _restored(mode):
    module = lit.seeded(lit.Lit)
    loader = DataLoader(lit.rows(), batch_size=8)
    trainer = lit.trainer({"restore_model": mode}, 2)
    trainer.fit(module, loader)
    real = sum(type(p.data).__name__ == "Tensor" for p in module.parameters())
    found = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    return real, found, trainer.callback_metrics["train_loss_epoch"].item()


@pytest.mark.parametrize("mode", ["all", "rank_zero", "none"])
def test_the_model_is_whole_again_where_the_user_wants_it(mode):
    results = run_ranks(2, _restored, mode)
    whole = [real for real, _, _ in results]
    assert (whole[0] == 14, whole[1] == 14) == {
        "all": (True, True),
        "rank_zero": (True, False),
        "none": (False, False),
    }[mode]
    other = run_ranks(2, _restored, "all")
    assert [r[1:] for r in results] == [r[1:] for r in other]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    io = AtomicCheckpointIO()
    io.save_checkpoint({"a": 1}, tmp_path / "x.ckpt")
    with pytest.raises(AttributeError, match="local"):
        io.save_checkpoint({"a": lambda: 1}, tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt") == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]


def test_a_users_checkpoint_io_is_used():
    class Mine(AtomicCheckpointIO):
        pass

    mine = Mine()
    assert PipelineStrategy(checkpoint_io=mine).checkpoint_io is mine
    assert isinstance(PipelineStrategy().checkpoint_io, AtomicCheckpointIO)


class _Stateful(DataLoader):
    """A loader that goes on where it was."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.position = 0

    def __iter__(self):
        for index, batch in enumerate(super().__iter__()):
            if index >= self.position:
                self.position = index + 1
                yield batch
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class _Seen(lit.Lit):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(batch[1].tolist())


def _middle(strategy, folder, path):
    module = lit.seeded(_Seen)
    keep = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = lit.trainer(strategy, lit.world(), enable_checkpointing=True, callbacks=[keep])
    trainer.fit(module, _Stateful(lit.rows(), batch_size=8), ckpt_path=path)
    return module.seen, lit.outcome(module, trainer)


def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(tmp_path):
    batches, expected = run_ranks(1, _middle, None, str(tmp_path / "one"), None)[0]
    run_ranks(2, _middle, {}, str(tmp_path / "two"), None)
    path = str(tmp_path / "two" / "step=2.ckpt")
    for seen, result in run_ranks(2, _middle, {}, str(tmp_path / "again"), path):
        assert seen == batches[2:]
        torch.testing.assert_close(result["weights"], expected["weights"], rtol=1e-9, atol=1e-9)


class _Normed(lit.Lit):
    def make_net(self, width, depth):
        pairs = [(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(depth)]
        return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs), nn.Linear(width, 4))


def _running_statistics(folder):
    module = lit.seeded(_Normed)
    trainer = lit.trainer({"num_microbatches": 2}, 2)
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    path = Path(folder) / "normed.ckpt"
    trainer.save_checkpoint(path)
    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return own, torch.load(path, weights_only=True)["state_dict"]


def test_running_statistics_come_home_without_any_validation(tmp_path):
    """`F.batch_norm` writes them and leaves no trace of it on the tensor."""
    (first, kept), (second, _) = run_ranks(2, _running_statistics, str(tmp_path))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, kept[name]), name
        assert "mean" not in name or value.any(), name
