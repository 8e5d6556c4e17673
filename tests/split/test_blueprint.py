"""Weights that can be made again: bit by bit those of a module that was built as usual."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pipe import ConfigError
from lightning_pipe.split.blueprint import Blueprint


class _Odd(nn.Module):
    """Makes weights in every way that a constructor may."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(200, 200)
        self.attention = nn.MultiheadAttention(128, 4)
        nn.init.orthogonal_(self.first.weight)
        nn.init.trunc_normal_(self.attention.in_proj_weight)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
        self.product = nn.Parameter(torch.randn(300, 300) @ torch.randn(300, 300))
        with torch.no_grad():
            self.product[:, :100] *= 2
            self.product[5].normal_()
            self.product.copy_(self.product.t().clone())
        self.register_buffer("table", torch.randn(300, 300))
        self.row = self.first.weight.data[3]
        self.copied = copy.deepcopy(self.first)
        self.sum = torch.randn(200, 200).numpy().sum()
        self.tied = nn.Linear(200, 200)
        self.tied.weight = self.first.weight
        self.embedding = nn.Embedding(1000, 64)
        self.std = self.embedding.weight.detach().std().item()
        self.array = nn.Parameter(torch.from_numpy(self.embedding.weight.detach().numpy() * 2))
        generator = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.empty(200, 200).normal_(generator=generator))
        self.apply(self._init)
        self.short = nn.Linear(200, 200).half()
        self.recurrent = nn.LSTM(64, 128, 2)
        self.special = _Own(torch.randn(200, 200))

    def _init(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, 0, self.std)


class _Own(nn.Parameter):
    """A parameter of a class of its own."""


class _Holder(nn.Module):
    """Stands for the LightningModule."""


def _built(make, budget_bytes=0):
    torch.manual_seed(0)
    blueprint, holder = Blueprint(torch.device("cpu")), _Holder()
    blueprint.budget_bytes = budget_bytes
    with blueprint.building(holder):
        holder.net = make()
    return blueprint, holder.net


@pytest.mark.parametrize("budget_bytes", [0, 300_000, 1 << 30])
def test_weights_are_those_of_a_module_built_as_usual(budget_bytes):
    torch.manual_seed(0)
    expected, after = _Odd(), torch.rand(3)
    blueprint, net = _built(_Odd, budget_bytes)
    assert torch.equal(torch.rand(3), after)
    num_cold = sum(blueprint.is_cold(parameter) for parameter in net.parameters())
    assert num_cold >= 8
    # whoever looks at one gets it, and what is written is remembered
    assert torch.equal(net.embedding.weight.norm(), expected.embedding.weight.norm())
    with torch.no_grad():
        net.recurrent.weight_ih_l0.mul_(2)
        expected.recurrent.weight_ih_l0.mul_(2)
    copied = copy.deepcopy(net.short)
    assert type(copied.weight) is nn.Parameter
    assert torch.equal(copied.weight, expected.short.weight)
    assert torch.equal(net.own.data, expected.own.data)
    blueprint.finish()
    assert net.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    kinds = {type(parameter) for parameter in net.parameters()}
    assert kinds == {nn.Parameter, _Own}
    assert torch.equal(net.row, expected.row)
    assert net.sum == expected.sum
    assert net.tied.weight is net.first.weight


def _layers(count=8, width=160):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


def test_what_is_dropped_is_not_made():
    torch.manual_seed(0)
    expected = _layers().state_dict()
    blueprint, net = _built(_layers)
    for index in (0, 1, 2, 5, 6, 7):
        net[index].weight.data = torch.empty(0)
    blueprint.finish()
    one = 160 * 160 * 4
    assert blueprint.peak_bytes == one
    assert torch.equal(net[3].weight, expected["3.weight"])
    assert torch.equal(net[4].weight, expected["4.weight"])


def test_ranks_can_tell_whether_they_built_the_same():
    def digest(make):
        blueprint, net = _built(make)
        return blueprint.digest, net

    assert digest(_Odd)[0] == digest(_Odd)[0]
    assert digest(_layers)[0] != digest(lambda: nn.Sequential(_layers(1, 8), _layers()))[0]


def test_a_loaded_checkpoint_replaces_the_recipe():
    state = _layers().state_dict()
    blueprint, net = _built(_layers)
    with blueprint.serving():
        net.load_state_dict(state)
    blueprint.finish()
    torch.testing.assert_close(net.state_dict(), state, rtol=0, atol=0)


def test_a_source_that_changes_is_an_error():
    source = torch.randn(160, 160)
    blueprint, net = _built(_layers)
    with blueprint.serving(), torch.no_grad():
        net[0].weight.copy_(source)
    source.zero_()
    with pytest.raises(ConfigError, match=r"shape \(160, 160\) was written"):
        blueprint.finish()


def test_meta_weights_are_initialised_in_the_order_of_constructors():
    def on_meta():
        with torch.device("meta"):
            return nn.Sequential(*_layers(2), nn.BatchNorm1d(160), nn.LSTM(64, 128))

    torch.manual_seed(0)
    expected = nn.Sequential(*_layers(2), nn.BatchNorm1d(160), nn.LSTM(64, 128))
    blueprint, net = _built(on_meta)
    blueprint.check()
    blueprint.finish()
    torch.testing.assert_close(net.state_dict(), expected.state_dict(), rtol=0, atol=0)


class _Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(160, 160)
        self.scale = nn.Parameter(torch.ones(3))


class _Half(_Bare):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(300.0))

    def reset_parameters(self):
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(
    ("make", "name"), [(_Bare, r"net.scale \(_Bare\)"), (_Half, r"net.table \(_Half\)")]
)
def test_a_meta_tensor_that_nothing_gives_a_value_is_named(make, name):
    def on_meta():
        with torch.device("meta"):
            return make()

    blueprint, net = _built(on_meta)
    with pytest.raises(ConfigError, match=f"^{name}: made on the meta device"):
        blueprint.check()
    with blueprint.serving():
        net.load_state_dict(make().state_dict())
    blueprint.check()


def _peak_bytes(reset=False):
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def test_host_memory_is_the_share_and_the_largest_tensor(tmp_path):
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs /proc/self/clear_refs (Linux): it sets the peak of the process back")
    width, count, share = 3072, 6, 2
    one = width * width * 4
    torch.save(_layers(count, width).state_dict(), tmp_path / "weights")
    blueprint, net = _built(lambda: _layers(1, 8))
    before = _peak_bytes(reset=True)
    blueprint, net = _built(lambda: _layers(count, width))
    with blueprint.serving():
        net.load_state_dict(torch.load(tmp_path / "weights", mmap=True))
    for layer in net[share:]:
        layer.weight.data = torch.empty(0)
    blueprint.finish()
    # a file that is mapped counts while it is read
    assert _peak_bytes() - before < 2 * share * one + one
