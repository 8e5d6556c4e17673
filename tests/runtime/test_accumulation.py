"""Gradients that are added in place: those of autograd, where they may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_pipe.runtime import accumulation
from lightning_pipe.runtime.backward import backward_full, backward_input
from lightning_pipe.split.graph import Graph

ROWS, WIDTH = 3, 5


class _Mlp(nn.Module):
    """Two maps, which are all added."""

    added = ("up.weight", "down.weight", "up.bias", "down.bias")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Twice(_Mlp):
    added = ("up.weight", "up.bias", "down.weight", "down.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(x))


class _NoBias(_Mlp):
    """Its first map is fed by nothing that has a gradient: nobody would visit it for others."""

    added = ("up.weight", "down.weight")

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x.detach())))


class _Transposed(_Mlp):
    """A weight with inputs as rows (Conv1D of GPT-2), with factors."""

    added = ("up", "down.weight", "down.bias")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(WIDTH, 7))  # type: ignore[assignment]
        self.bias = nn.Parameter(torch.randn(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        up: Any = self.up
        return self.down(torch.addmm(self.bias, rows, up, beta=0.5, alpha=3).relu()).view(x.shape)


class _Tied(_Mlp):
    """A map whose weight is looked up too; the second row of places counts nothing."""

    added = ("up.weight", "up.bias", "down.weight", "down.bias", "table.weight", "places.weight")

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, WIDTH)
        self.places = nn.Embedding(ROWS, WIDTH, padding_idx=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = self.places(torch.tensor([[0, 1, 2], [1, 1, 0]]))
        hidden = super().forward(x + self.table(torch.tensor([3, 0, 3])) + places)
        return F.linear(hidden, self.table.weight)


class _Rare(_Mlp):
    """Lookups that autograd does in ways of its own."""

    added = ("up.weight", "up.bias", "down.weight", "down.bias")

    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(4, WIDTH, sparse=True)
        self.scaled = nn.Embedding(4, WIDTH, scale_grad_by_freq=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([3, 0, 3])
        return super().forward(x + self.sparse(places) + self.scaled(places))


class _Decayed(_Mlp):
    """A weight and a bias that are used in other ways too."""

    added = ("up.weight", "up.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.down.weight.square().sum() + self.down.bias


class _Hooked(_Mlp):
    """Whoever looks at a gradient sees the one that is added."""

    added = ("up.bias", "down.bias")

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.register_hook(lambda grad: 2 * grad)
        self.seen = 0
        self.down.weight.register_post_accumulate_grad_hook(self._saw)

    def _saw(self, _: torch.Tensor) -> None:
        self.seen += 1


class _Half(_Mlp):
    added = ()

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class _Again(_Mlp):
    """Its middle runs again, what its end was given is brought back from elsewhere."""

    added = ("up.bias", "down.bias")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.up(self.norm(x))), x, use_reentrant=False)
        with torch.autograd.graph.save_on_cpu():
            out: torch.Tensor = self.down(hidden)
        return out


class _Frozen(_Mlp):
    added = ("up.bias", "down.weight", "down.bias")

    def __init__(self) -> None:
        super().__init__()
        self.up.weight.requires_grad_(False)


MODELS = [
    _Mlp,
    _Twice,
    _NoBias,
    _Transposed,
    _Tied,
    _Rare,
    _Decayed,
    _Hooked,
    _Half,
    _Again,
    _Frozen,
]


def _model(cls: Any) -> Any:
    torch.manual_seed(0)
    return cls() if cls is _Half else cls().double()


def _inputs(model: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    made = [torch.randn(2, ROWS, WIDTH, generator=generator).to(dtype) for _ in range(3)]
    return [x.requires_grad_() for x in made]


def _gradients(model: Any, inputs: list[torch.Tensor]) -> dict[str, Any]:
    found = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: p.grad for name, p in model.named_parameters()}


def _expected(cls: Any) -> dict[str, Any]:
    model = _model(cls)
    inputs = _inputs(model)
    for x in inputs:
        model(x).sin().sum().backward()
    return _gradients(model, inputs)


def _assert_equal(model: Any, inputs: list[torch.Tensor]) -> None:
    for name, grad in _expected(type(model)).items():
        found = _gradients(model, inputs)[name]
        if grad is None:
            assert found is None, name
        else:
            tolerance = 1e-12 if grad.dtype == torch.float64 else 0.0
            torch.testing.assert_close(found, grad, rtol=tolerance, atol=tolerance)
            assert found.layout == grad.layout
            assert grad.is_sparse or found.stride() == grad.stride()


@pytest.mark.parametrize("cls", MODELS)
def test_whole_backwards_are_those_of_autograd(cls: Any) -> None:
    model = _model(cls)
    inputs = _inputs(model)
    for x in inputs:
        backward_full([model(x).sin().sum()], [None])
    _assert_equal(model, inputs)
    assert getattr(model, "seen", 3) == 3


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("cls", MODELS)
def test_halves_of_backwards_are_those_of_autograd(cls: Any, late: bool) -> None:
    model = _model(cls)
    inputs = _inputs(model)
    weights = []
    for x in inputs:
        (x.grad,), weight = backward_input([model(x).sin().sum()], [None], [x])
        weights.append(weight)
        if not late:
            weights.pop()()
    for weight in weights:
        weight()
    _assert_equal(model, inputs)


@pytest.mark.parametrize("cls", MODELS)
def test_what_is_added_in_place_is_what_the_engine_is_not_asked_for(
    cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(cls)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    x, *_ = _inputs(model)
    root = model(x).sin().sum()
    graph = Graph([root])
    weights = {names[id(use.weight)] for use in accumulation.weight_uses(graph)}
    biases = {names[id(use.weight)] for use in accumulation.bias_uses(graph)}
    assert weights | biases == {*cls.added}
    asked: list[set[str]] = []
    backward = torch.autograd.backward

    def noted(*args: Any, inputs: Any = None, **kwargs: Any) -> None:
        leaves = model.parameters() if inputs is None else inputs
        asked.append({names[id(leaf)] for leaf in leaves if id(leaf) in names})
        backward(*args, inputs=inputs, **kwargs)

    monkeypatch.setattr(torch.autograd, "backward", noted)
    for x in _inputs(model)[:2]:
        backward_full([model(x).sin().sum()], [None])
    first, second = asked
    assert first == {*names.values()}  # one micro-batch is as without
    assert not second & weights


def test_anomalies_are_looked_for_in_every_gradient() -> None:
    model = _model(_Mlp)
    x, *_ = _inputs(model)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        root = model(x).sum()
        graph = Graph([root])
        assert not accumulation.weight_uses(graph)
        assert not accumulation.bias_uses(graph)


def test_the_nodes_of_torch_are_those_that_are_known() -> None:
    """If this fails, torch has changed them: nothing is added in place any more, or wrongly."""
    x = torch.randn(2, 3, requires_grad=True)
    layer = nn.Linear(3, 4)
    leaf = "torch::autograd::AccumulateGrad"
    node: Any = layer(x).grad_fn
    assert node.name() == "AddmmBackward0"
    bias, given, weight = [following for following, _ in node.next_functions]
    assert [bias.name(), given.name(), weight.name()] == [leaf, leaf, "TBackward0"]
    assert bias.variable is layer.bias
    assert weight.next_functions[0][0].variable is layer.weight
    assert node._saved_mat1.data_ptr() == x.data_ptr()
    assert (node._saved_alpha, node._saved_beta) == (1, 1)
    assert node._raw_saved_mat1.unpack_hook is None
    node = x.mm(layer.weight.t()).grad_fn
    assert node.name() == "MmBackward0"
    assert [n.name() for n, _ in node.next_functions] == [leaf, "TBackward0"]
    assert node._saved_self.data_ptr() == x.data_ptr()
    assert node._raw_saved_self.unpack_hook is None
    for padding, known in ((None, False), (2, True)):
        table = nn.Embedding(5, 4, padding_idx=padding)
        node = table(torch.tensor([1, 2])).grad_fn
        assert node.name() == "EmbeddingBackward0"
        assert node.next_functions[0][0].variable is table.weight
        assert node._saved_indices.tolist() == [1, 2]
        assert (node._saved_padding_idx < 5) is known
        assert (node._saved_sparse, node._saved_scale_grad_by_freq) == (False, False)
