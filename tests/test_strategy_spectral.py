"""Spectral norms take one power iteration per step and call, however many micro-batches."""

from __future__ import annotations

import pytest
import torch
from tests import lit
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.utils.data import DataLoader


class _Spectral(lit.Lit):
    """Blocks with a spectral norm, one of them called twice."""

    normed = staticmethod(parametrizations.spectral_norm)

    def make_net(self, width, depth):
        blocks = [
            nn.Sequential(self.normed(nn.Linear(width, width)), nn.Tanh()) for _ in range(depth)
        ]
        return nn.Sequential(*blocks, blocks[-1], nn.Linear(width, 4))


class _Once(_Spectral):
    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        return nn.Sequential(*net[:-2], net[-1])


class _Older(_Spectral):
    normed = staticmethod(spectral_norm)


def _fit(strategy, cls):
    module = lit.seeded(cls)
    trainer = lit.trainer(strategy, lit.world())
    data = lit.rows(20)
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=5))
    return lit.outcome(module, trainer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cls", [_Spectral, _Older])
def test_every_micro_batch_has_the_estimate_of_the_whole_batch(cls):
    expected = lit.run_ranks(1, _fit, None, cls)[0]
    assert any("_u" in name for name in expected["weights"])
    for strategy in ({"num_microbatches": 4}, {"activation_checkpointing": "all"}):
        lit.assert_equal(lit.run_ranks(2, _fit, strategy, cls), expected)
    assert torch.isfinite(torch.tensor(list(expected["metrics"].values()))).all()


@pytest.mark.filterwarnings("ignore")
def test_every_chunk_of_a_rank_has_its_own_turn():
    expected = lit.run_ranks(1, _fit, None, _Once)[0]
    chunks = {"num_microbatches": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2}
    lit.assert_equal(lit.run_ranks(2, _fit, chunks, _Once), expected)
