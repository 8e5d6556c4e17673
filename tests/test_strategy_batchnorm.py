"""Running statistics of batch norms: per micro-batch, or once per step as one device has them."""

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe.errors import ConfigError
from lightning_pipe.layout import Layout
from lightning_pipe.statistics import DeferredStatistics, Moments, joined

NORMS = ("first", "second", "shared", "average")


class _Net(nn.Module):
    """Norms on both stages whose inputs are not normalised before; one is called on both."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width)
        self.first, self.second = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.shared = nn.BatchNorm1d(width, momentum=0.3)
        self.average = nn.BatchNorm1d(width, momentum=None)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        h = self.one(x)
        a = self.first(h) + self.shared(h)
        g = self.two(h)
        return self.head(a + self.second(g) + self.shared(g) + self.average(g))


class _Normed(lit.Lit):
    def make_net(self, width, depth):
        return _Net(width)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)  # the same weights in every step


def _statistics(arguments, rows, steps):
    module = lit.seeded(_Normed)
    used = lit.trainer(
        arguments,
        lit.world(),
        limit_train_batches=steps,
        num_sanity_val_steps=0,
    )
    data = DataLoader(lit.rows(), batch_size=rows)
    used.fit(module, data, data)
    found = {
        name: value.clone()
        for name, value in module.state_dict().items()
        if name.split(".")[1] in NORMS and "bias" not in name and "weight" not in name
    }
    return found, used.callback_metrics["val_loss"].item()


def _all(runs):
    return [_statistics(*run) for run in runs]


def _strategy(num_microbatches, batchnorm="deferred", **more):
    return {"num_microbatches": num_microbatches, "batchnorm": batchnorm, **more}


def test_deferred_statistics_are_those_of_one_device():
    wanted = [(None, 8, 1), (None, 10, 4)]
    whole, uneven = run_ranks(1, _all, wanted)[0]
    cut = {"balance": [3, 5]}
    runs = [(_strategy(m, **cut), 8, 1) for m in (1, 2, 4)] + [(_strategy(4, **cut), 10, 4)]
    plain = (_strategy(2, "micro-batch", **cut), 8, 1)
    for rank in run_ranks(2, _all, [*runs, plain]):
        *deferred, plainly = rank
        for (found, loss), (expected, expected_loss) in zip(
            deferred, [whole, whole, whole, uneven], strict=True
        ):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
            assert abs(loss - expected_loss) < 1e-12, "in evaluation nothing differs"
        calls = {name.split(".")[1]: int(n) for name, n in deferred[1][0].items() if n.dim() == 0}
        assert calls == {"first": 1, "second": 1, "shared": 2, "average": 1}
        assert int(plainly[0]["net.first.num_batches_tracked"]) == 2
        assert not torch.equal(
            plainly[0]["net.first.running_mean"], whole[0]["net.first.running_mean"]
        )


def test_moments_are_joined_exactly():
    x = torch.randn(7, 3, dtype=torch.float64) * 3 + 100
    parts = [Moments(len(p), p.mean(0), ((p - p.mean(0)) ** 2).sum(0)) for p in x.split([1, 4, 2])]
    count, mean, squares = joined(parts)
    assert count == 7
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(squares / 6, x.var(0))


def test_another_policy_is_refused():
    with pytest.raises(ConfigError, match="micro-batch, deferred"):
        Layout(1, batchnorm="never")


def test_a_recomputation_counts_no_more():
    """The moments of a call are what torch itself would update with."""
    norm, values = nn.BatchNorm2d(3).double(), torch.randn(4, 3, 5, 2, dtype=torch.float64)
    expected = nn.BatchNorm2d(3).double()
    expected(values)
    deferred = DeferredStatistics([("norm", norm)])
    with deferred.step():
        for number, piece in enumerate(values.split([3, 1])):
            with deferred.microbatch(0, number):
                out = norm(piece)
        norm(values)  # a recomputation
    assert torch.equal(out, F.batch_norm(piece, None, None, training=True))
    assert int(norm.num_batches_tracked) == 0
    deferred.finish()
    for name, buffer in expected.named_buffers():
        torch.testing.assert_close(dict(norm.named_buffers())[name], buffer)
