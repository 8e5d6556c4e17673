"""Layer drop and stochastic depth over processes: as on one rank with the same draws."""

import random

import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

COINS = {
    "python": lambda: random.random() < 0.4,
    "torch": lambda: torch.rand(()) < 0.4,
    "rare": lambda: random.random() < 0.03,
}


class _Net(nn.Module):
    def __init__(self, width, depth, coin):
        super().__init__()
        self.coin = coin
        self.dropped = 0
        self.layers = nn.ModuleList(lit.Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        h = x[:, None] * torch.ones(3, 1, dtype=x.dtype)
        for layer in self.layers:
            if self.training and COINS[self.coin]():
                self.dropped += 1
            else:
                h = F.dropout(layer(h), 0.1, self.training)
        return self.head(h.mean(1))


class _Dropped(lit.Lit):
    coin = "python"

    def make_net(self, width, depth):
        return _Net(width, depth, self.coin)


def _trained(arguments, coin=None):
    module = lit.seeded(type("Dropped", (_Dropped,), {"coin": coin}), depth=8)
    used = lit.trainer(
        arguments,
        lit.world(),
        limit_train_batches=2,
        limit_val_batches=1,
        num_sanity_val_steps=0,
    )
    used.fit(
        module,
        DataLoader(lit.rows(), batch_size=8, shuffle=True),
        DataLoader(lit.rows(), batch_size=8),
    )
    result = lit.outcome(module, used)
    result["metrics"]["dropped"] = getattr(module.net, "dropped", 0)
    return result


def _on_all(runs):
    return [_trained(*run) for run in runs]


def test_layers_are_dropped_as_on_one_rank():
    """On one rank, the one device, each micro-batch draws with its own key too."""
    one = [
        ({"num_microbatches": 4}, "python"),
        ({"num_microbatches": 4}, "torch"),
        ({"num_microbatches": 4}, "rare"),
    ]
    expected = run_ranks(1, _on_all, one)[0]
    ways = [
        {"schedule": "1f1b"},
        {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"schedule": "zero_bubble"},
    ]
    two = [({**arguments, **way}, *rest) for (arguments, *rest), way in zip(one, ways, strict=True)]
    found = run_ranks(2, _on_all, two)
    for number, reference in enumerate(expected):
        lit.assert_equal([rank[number] for rank in found], reference)


class _Exits(nn.Module):
    """Leaves early by the batch, and skips a layer by another question to it."""

    def __init__(self, width, depth):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(lit.Block(width) for _ in range(depth))
        self.side, self.head = nn.Linear(width, width), nn.Linear(width, 4)

    def forward(self, x):
        h = self.first(x)[:, None] * torch.ones(3, 1, dtype=x.dtype)
        if x[:, 1].max() > 1.5:
            h = h + self.side(h)
        for number, layer in enumerate(self.layers):
            h = layer(h)
            if number in (2, 4) and x[:, 0].sum() < -0.5 * number:
                break
        return self.head(F.dropout(h.mean(1), 0.2, self.training))


class _Exiting(lit.Lit):
    def make_net(self, width, depth):
        return _Exits(width, depth)

    def training_step(self, batch, batch_idx):
        if batch[0].isnan().any():
            raise ValueError("a guard")
        return super().training_step(batch, batch_idx)


def _exited(arguments):
    module = lit.seeded(_Exiting, depth=5)
    used = lit.trainer(arguments, lit.world(), limit_train_batches=2, limit_val_batches=1)
    used.fit(module, DataLoader(lit.rows(), batch_size=8), DataLoader(lit.rows(), batch_size=8))
    return lit.outcome(module, used)


def _all_exited(runs):
    return [_exited(arguments) for arguments in runs]


def test_steps_that_ask_the_batch_which_units_to_call():
    ways = [{}, {"schedule": "interleaved_1f1b", "virtual_stages": 2}]
    runs = [{"num_microbatches": 4, **way} for way in ways]
    (reference,) = run_ranks(1, _all_exited, runs[:1])[0]
    found = run_ranks(2, _all_exited, runs)
    for number in range(len(runs)):
        lit.assert_equal([rank[number] for rank in found], reference)
