"""`Trainer(sync_batchnorm=True)`: batch norms of all copies of the pipeline normalise together.

The reference is one device of which each micro-batch is that of all copies together.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Subset

from lightning_pipe import ConfigError
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.synced import SyncedNorms

ROWS, SIZE, PIECES = 48, 3, 2  # rows, rows of a micro-batch, micro-batches


class _Block(nn.Module):
    def __init__(self, width: int, kind: Any = nn.BatchNorm1d) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), kind(width, momentum=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


class LitNorms(lit.Lit):
    """Norms with and without weights, statistics, and momentum; one is in the code between."""

    def make_net(self, width: int, depth: int) -> nn.Module:
        blocks = [_Block(width) for _ in range(4)]
        blocks[0].norm = nn.BatchNorm1d(width, momentum=None)
        blocks[1].norm = nn.BatchNorm1d(width, affine=False)
        blocks[2].norm = nn.BatchNorm1d(width, track_running_stats=False)
        return nn.Sequential(*blocks, nn.Linear(width, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        twin = copy.deepcopy(self.net[0])
        assert torch.equal(twin.norm.running_var, self.net[0].norm.running_var)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LitTorch(LitNorms):
    """The user's own `SyncBatchNorm`."""

    def make_net(self, width: int, depth: int) -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(super().make_net(width, depth))


def _train(
    strategy: dict[str, Any] | None, batch_size: int, cls: Any = LitNorms, **more: Any
) -> Any:
    module = lit.seeded(cls)
    arguments = {"use_distributed_sampler": False, "num_sanity_val_steps": 0, **more}
    used = lit.trainer(strategy, lit.world(), **arguments)
    order = torch.arange(ROWS)
    if strategy is not None and used.strategy.distributed_sampler_kwargs["num_replicas"] > 1:
        number = used.strategy.distributed_sampler_kwargs["rank"]
        order = order.view(-1, PIECES, 2, SIZE)[:, :, number].flatten()
    data = Subset(lit.rows(ROWS), order.tolist())
    used.fit(module, DataLoader(data, batch_size=batch_size))
    return lit.outcome(module, used)


def _reference(accumulated: int) -> Any:
    """Micro-batches of twice as many rows, as batches of one device."""
    return _train(None, 2 * SIZE, accumulate_grad_batches=accumulated)


def _deferred_reference() -> Any:
    return _train({"num_microbatches": PIECES, "batchnorm": "deferred"}, 2 * SIZE * PIECES)


_CASES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe, again": {"schedule": "gpipe", "activation_checkpointing": "all"},
    "zbv": {"schedule": "zbv", "virtual_stages": 2},
    "compiled": {"compile": {"backend": "aot_eager"}},
    "in parts": {"data_parallel_sharding": True},
    "deferred": {"batchnorm": "deferred"},
}


def _copies() -> dict[str, Any]:
    results = {}
    for name, given in _CASES.items():
        strategy = {"data_parallel_size": 2, "num_microbatches": PIECES, **given}
        results[name] = _train(strategy, SIZE * PIECES, sync_batchnorm=True)
    own = {"data_parallel_size": 2, "num_microbatches": PIECES}
    results["SyncBatchNorm"] = _train(own, SIZE * PIECES, LitTorch)
    return results


def test_two_copies_of_two_ranks_normalise_as_one_device() -> None:
    expected = run_ranks(1, _reference, PIECES)[0]
    deferred = run_ranks(1, _deferred_reference)[0]
    results = run_ranks(4, _copies)
    for result in results:
        for name, found in result.items():
            lit.assert_equal([found], deferred if name == "deferred" else expected)


class LitUneven(LitNorms):
    """What a loss counts differs between copies."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        counted = 1 + 2 * (self.global_rank // 2)
        return {"loss": self.loss(batch), "loss_weight": counted}


class LitEmpty(LitNorms):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if self.global_rank >= 2 and batch_idx == 1 else self.loss(batch)


def _refused() -> list[str]:
    texts = []
    strategy = {"data_parallel_size": 2, "num_microbatches": PIECES}
    for cls in (LitUneven, LitEmpty):
        try:
            _train(strategy, SIZE * PIECES, cls, sync_batchnorm=True)
        except Exception as error:
            texts.append(str(error))
    return texts


def test_steps_whose_gradients_cannot_meet_are_refused() -> None:
    for uneven, _ in run_ranks(4, _refused):
        assert "no 'loss_weight'" in uneven


def test_a_group_of_its_own_is_refused() -> None:
    norm = nn.SyncBatchNorm(3, process_group="some")
    ranks = Ranks(world_size=2, global_rank=0, position=0, num_positions=2, order=(1, 0))
    plain = nn.Sequential(nn.SyncBatchNorm(3))
    synced = SyncedNorms(plain, ranks, asked=False)
    pickle.loads(pickle.dumps(plain))
    plain(torch.randn(4, 3))  # torch's own refuses what is not on a GPU
    synced.undo()
    assert "forward" not in vars(plain[0])
    with pytest.raises(ConfigError, match="the SyncBatchNorm '0' has a process_group of its own"):
        SyncedNorms(nn.Sequential(norm), ranks, asked=False)
