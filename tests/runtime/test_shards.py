"""Weights of which each copy holds a part."""

import torch
import torch.distributed as dist
from tests.helpers import run_ranks
from torch import nn

from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.shards import ShardedWeights, whole_tensor
from lightning_pipe.split.parted import part_of


class Net(nn.Module):
    """Uneven sizes, an LSTM that keeps its weights in a list, a tie, and what cannot be sharded."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.rare = nn.Embedding(11, 6, sparse=True)
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.lin = nn.Linear(5, 6).float()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.unused = nn.Linear(3, 3)
        self.kept = [self.lin.bias]  # whoever holds a weight elsewhere
        self.frozen = nn.Parameter(torch.ones(3, 6), requires_grad=False)

    def forward(self, tokens):
        h = self.embed(tokens) + self.rare(tokens) + self.frozen.sum(0)
        h = self.rnn(h)[0] * self.scale
        h = (self.lin(h.float()) + self.kept[0]).double()
        return self.head(h)


GROUPS = [
    ["embed.weight", "rare.weight"],
    ["rnn.weight_ih_l0", "rnn.weight_hh_l0", "rnn.bias_ih_l0", "rnn.bias_hh_l0"],
    ["lin.weight", "lin.bias", "scale", "frozen"],
    ["unused.weight", "unused.bias"],
]


def build():
    torch.manual_seed(0)
    net = Net().double()
    net.lin.float()
    return net


def losses(net, tokens):
    return [net(piece).square().mean() / 4 for piece in tokens.chunk(4)]


def take_means(net, tokens):
    """The gradients of whole weights, added up in the order of the copies: AdamW makes much of
    what rounding in single precision leaves of small ones."""
    sums = []
    for piece in tokens:
        net.zero_grad()
        for _ in range(2):  # batches are accumulated
            for loss in losses(net, piece):
                loss.backward()
        sums.append([parameter.grad for parameter in net.parameters()])
    for parameter, one, other in zip(net.parameters(), *sums, strict=True):
        parameter.grad = None if one is None else (one + other) / len(tokens)


def counted(calls):
    own = dist.reduce_scatter_single

    def count(*args, **kwargs):
        calls.append(kwargs.get("op"))
        return own(*args, **kwargs)

    dist.reduce_scatter_single = count
    return own


def body():
    ranks = make_ranks([0], 1, data_parallel_size=2)
    mesh = dist.device_mesh.DeviceMesh.from_group(ranks.copies.pipeline_group, "cpu")
    net, plain = build(), build()
    whole_bytes = sum(p.nbytes for p in net.parameters())
    weights = ShardedWeights(net, GROUPS, ranks.copies, mesh)
    assert weights.names == {name for names in GROUPS for name in names} - {"rare.weight", "scale"}
    held = sum(part_of(p).nbytes for p in net.parameters())
    named = dict(net.named_parameters())
    assert named["embed.weight"].shape == (11, 6)
    assert net.head.weight is net.embed.weight
    assert torch.equal(
        whole_tensor(net.kept[0].detach(), ranks.copies), plain.kept[0]
    )  # held elsewhere, at rest

    trained = [n for n, p in named.items() if n not in ("rare.weight", "unused.weight")]
    optimizer = torch.optim.AdamW([named[n] for n in trained], lr=0.01, foreach=False)
    reference = torch.optim.AdamW([plain.get_parameter(n) for n in trained], lr=0.01)
    generator = torch.Generator().manual_seed(3)
    calls = []
    own = counted(calls)
    for step in range(3):
        tokens = torch.randint(11, (2, 8, 4), generator=generator)
        for accumulated in range(2):  # no reduction in between
            weights.gather()
            weights.need(["embed.weight"])
            assert isinstance(net.lin.weight, nn.Parameter)
            weights.need()
            assert net.lin.bias is net.kept[0]
            live = losses(net, tokens[ranks.copies.position])
            for loss in live:
                loss.backward()
            weights.free()
            del live, loss
            assert len(calls) == 3 * step
            assert named["embed.weight"].grad is None or accumulated == 0
        weights.reduce()
        take_means(plain, tokens)
        for name in ("embed.weight", "rnn.bias_hh_l0", "lin.bias"):
            torch.testing.assert_close(
                whole_tensor(named[name].grad, ranks.copies),
                plain.get_parameter(name).grad,
                rtol=1e-6,
                atol=1e-9,
            )
        assert named["unused.weight"].grad is None
        for name in ("rare.weight", "scale"):  # not sharded: reduced by others
            named[name].grad = plain.get_parameter(name).grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        plain.zero_grad()
    dist.reduce_scatter_single = own
    for name in trained:
        torch.testing.assert_close(
            whole_tensor(named[name], ranks.copies), plain.get_parameter(name), rtol=1e-5, atol=1e-7
        )
    replaced = weights.restore()
    assert replaced[id(named["lin.bias"])] is net.lin.bias is net.kept[0]
    torch.testing.assert_close(net.rnn.weight_hh_l0, plain.rnn.weight_hh_l0)
    return held / whole_bytes, len(calls)


def test_sharded_weights_train_as_whole_ones():
    """Exact, one reduction for a group and optimizer step, and half the memory in between."""
    for share, reductions in run_ranks(2, body):
        assert share < 0.64  # a sparse embedding is whole
        assert reductions == 3 * 3


def nothing():
    ranks = make_ranks([0], 1, data_parallel_size=2)
    mesh = dist.device_mesh.DeviceMesh.from_group(ranks.copies.pipeline_group, "cpu")
    weights = ShardedWeights(nn.Tanh(), [], ranks.copies, mesh)
    weights.gather()
    weights.need()
    weights.free()
    weights.reduce()
    return weights.restore()


def test_a_stage_may_have_no_weights():
    assert run_ranks(2, nothing) == [{}, {}]


def fakes():
    ranks = make_ranks([0], 1, data_parallel_size=2)
    mesh = dist.device_mesh.DeviceMesh.from_group(ranks.copies.pipeline_group, "cpu")
    net = build()
    weights = ShardedWeights(net, GROUPS, ranks.copies, mesh)
    shard = net.lin.weight
    with weights.as_fakes(torch.device("cpu")):
        assert (tuple(net.lin.weight.shape), net.lin.weight.requires_grad) == ((6, 5), True)
        assert not net.frozen.requires_grad
    assert net.lin.weight is shard
    with torch.no_grad():
        value = torch.arange(30.0).view(6, 5)
        shard.copy_(weights.part("lin.weight", value))
    torch.testing.assert_close(weights.whole("lin.weight"), value)
    return tuple(shard.to_local().shape)


def test_a_trace_sees_shapes_and_a_checkpoint_gives_parts():
    assert run_ranks(2, fakes) == [(3, 5), (3, 5)]
