"""I and W together are the full backward, on graphs that torch's own split gets wrong."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.runtime.backward import backward_full, backward_input

WIDTH = 5


def linear():
    return nn.Linear(WIDTH, WIDTH).double()


class Graph(nn.Module):
    """`forward` makes outputs from one or two inputs; weights of all kinds are in `layers`."""

    def __init__(self, compute, num_inputs=1):
        super().__init__()
        self.layers = nn.ModuleList(linear() for _ in range(4))
        self.table = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.float64))
        self.compute, self.num_inputs = compute, num_inputs

    def forward(self, *inputs):
        result = self.compute(self, *inputs)
        return result if isinstance(result, tuple) else (result,)


def chain(m, x):
    for layer in m.layers:
        x = torch.tanh(layer(x))
    return x


def several_outputs(m, x):
    a = torch.tanh(m.layers[0](x))
    return m.layers[1](a), m.layers[2](a) * a, a


def shared(m, x):
    """One weight at three depths, so exits lead to exits."""
    for _ in range(3):
        x = torch.tanh(m.layers[0](x)) + m.layers[1](x) @ m.layers[0].weight
    return x


def weights_only_branch(m, x):
    position = torch.sin(m.layers[2](m.table))
    return m.layers[0](x) + position, position * 2


def crossing(m, x):
    """Groups of weights whose paths cross the same inner nodes; an output inside of another."""
    a = m.layers[0](x)
    b = torch.sin(a)
    c = m.layers[1](b) + m.layers[0](b)
    d = torch.cos(c)
    return m.layers[2](d) + m.layers[1](d), d, m.layers[3](m.table) * d


def two_inputs(m, x, y):
    z = torch.tanh(m.layers[0](x))
    return z, m.layers[1](z * y), m.layers[2](y)


def parameter_is_output(m, x):
    return m.layers[0](x) * m.table, m.table, m.layers[1].weight.t()


def no_input_used(m, x):
    return m.layers[0](m.table)


def recomputed(m, x):
    x = checkpoint(lambda v: torch.tanh(m.layers[0](v)), x, use_reentrant=False)
    return checkpoint(lambda v: torch.tanh(m.layers[1](v)), x, use_reentrant=False)


def recomputed_reentrant(m, x):
    return checkpoint(lambda v: torch.tanh(m.layers[0](v)), m.layers[1](x), use_reentrant=True)


def hooked(m, x):
    """A user's hook that changes the gradient must be applied once."""
    a = m.layers[0](x)
    a.register_hook(lambda g: g * 3)
    b = m.layers[1](a)
    b.register_hook(lambda g: g + 1)
    return b


def indexed(m, x):
    """Nodes with several outputs, some of them unused."""
    a, b, c = m.layers[0](x).split([2, 2, 1], dim=-1)
    values, _ = m.layers[1](x).topk(2, dim=-1)
    return torch.cat([a * values, c], -1) @ m.table[:, :3].t(), b.detach() * 2


GRAPHS = [
    chain,
    several_outputs,
    shared,
    weights_only_branch,
    crossing,
    two_inputs,
    parameter_is_output,
    no_input_used,
    recomputed,
    recomputed_reentrant,
    hooked,
    indexed,
]


def run(compute, split):
    torch.manual_seed(0)
    num_inputs = 2 if compute is two_inputs else 1
    module = Graph(compute, num_inputs)
    inputs = [
        torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(num_inputs)
    ]
    outputs = [out for out in module(*inputs) if out.requires_grad]
    grads = [torch.randn_like(out) for out in outputs]
    if split:
        input_grads, weight = backward_input(outputs, grads, inputs)
        if compute is not recomputed_reentrant:
            assert all(p.grad is None for p in module.parameters()), "weights belong to W"
        del outputs
        weight()
    else:
        backward_full(outputs, grads)
        input_grads = tuple(x.grad for x in inputs)
    return [*input_grads, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("compute", GRAPHS, ids=lambda f: f.__name__)
@pytest.mark.filterwarnings("ignore:.*use_reentrant.*")
def test_input_then_weight_is_the_full_backward(compute):
    for mine, theirs in zip(run(compute, True), run(compute, False), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_without_inputs_everything_waits_for_the_weight_pass():
    layer = linear()
    loss = layer(torch.ones(2, WIDTH, dtype=torch.float64)).sum()
    input_grads, weight = backward_input([loss], [None], [])
    assert input_grads == ()
    assert layer.weight.grad is None
    weight()
    assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2.0))


def test_hooks_on_accumulated_gradients_run_once_for_each_weight():
    module = Graph(shared)
    counts = {}
    for name, parameter in module.named_parameters():
        counts[name] = 0

        def count(_, name=name):
            counts[name] += 1

        parameter.register_post_accumulate_grad_hook(count)
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    _, weight = backward_input(module(x), [torch.ones(3, WIDTH)], [x])
    weight()
    used = {name: n for name, n in counts.items() if n}
    assert used == dict.fromkeys(
        ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"], 1
    )


def test_the_weight_pass_does_not_compute_input_gradients_again():
    """The point of the split: no work upstream of an exit is repeated."""
    runs = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            runs.append("I" if not done else "W")
            return grad * 2

    done = []
    first, second = linear(), linear()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    out = second(Watched.apply(first(x)))
    _, weight = backward_input([out], [torch.ones_like(out)], [x])
    done.append(True)
    weight()
    assert runs == ["I"]
