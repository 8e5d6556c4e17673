"""Kinds of models that are on nobody's list: each uses torch in a way of its own."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.modules import ROWS, Batch, Case, Stack
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

UNUSUAL: dict[str, Callable[[], Case]] = {}


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a builder; every build starts from the same seed."""

    def seeded() -> Case:
        torch.manual_seed(0)
        return build()

    UNUSUAL[build.__name__] = seeded
    return seeded


def regression(module: nn.Module, width_in: int = 8, width_out: int = 1) -> Case:
    """Squared error on random rows."""
    batch = {"x": torch.randn(ROWS, width_in), "y": torch.randn(ROWS, width_out)}
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), batch)


def chain(*blocks: nn.Module) -> Case:
    """Blocks of width 16 with residuals in the glue."""
    return regression(Stack(list(blocks), lambda block, h: h + torch.tanh(block(h))))


# ---------------------------------------------------------------------- weights made of weights


@model
def weight_normalised() -> Case:
    return chain(*(parametrizations.weight_norm(nn.Linear(16, 16)) for _ in range(6)))


@model
def spectrally_normalised() -> Case:
    return chain(*(parametrizations.spectral_norm(nn.Linear(16, 16)) for _ in range(6)))


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@model
def parametrised() -> Case:
    blocks = [nn.Linear(16, 16) for _ in range(5)]
    for block in blocks:
        parametrize.register_parametrization(block, "weight", _Symmetric())
    return chain(*blocks)


@model
def orthogonal() -> Case:
    return chain(*(parametrizations.orthogonal(nn.Linear(16, 16)) for _ in range(4)))


class _LowRank(nn.Module):
    """A frozen layer and a small trained one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


@model
def low_rank_adapters() -> Case:
    case = chain(*(_LowRank(nn.Linear(16, 16)) for _ in range(5)))
    case.module.first.requires_grad_(False)
    return case


@model
def hypernetwork() -> Case:
    """One network computes the weights of the layers of another."""

    class Hyper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(5, 8))
            self.weights = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16 * 16))
            self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(5)])
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            weights = self.weights(self.codes).view(5, 16, 16)
            h = self.first(x)
            for norm, weight in zip(self.norms, weights, strict=True):
                h = h + torch.tanh(F.linear(norm(h), weight / 4))
            return self.last(h)

    return regression(Hyper())


@model
def conditioned_weights() -> Case:
    """A layer's weights are computed from the hidden state: one weight per row."""

    class Dynamic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make = nn.Linear(16, 16 * 16)

        def forward(self, h: Tensor) -> Tensor:
            weight = self.make(h).view(-1, 16, 16)
            return torch.func.vmap(F.linear)(h, weight) / 4

    return chain(*(Dynamic() for _ in range(4)))


@model
def tied_autoencoder() -> Case:
    """The decoder is the encoder's convolutions, transposed, in reverse order."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                [nn.Conv1d(a, b, 3, padding=1) for a, b in ((2, 4), (4, 8), (8, 8))]
            )
            self.middle = nn.ModuleList([nn.Conv1d(8, 8, 1) for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.relu(layer(x))
            for layer in self.middle:
                x = torch.relu(layer(x))
            for layer in reversed(self.layers):
                x = F.conv_transpose1d(x, layer.weight, padding=1)
            return x

    module = Tied()
    x = torch.randn(ROWS, 2, 8)
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["x"]), {"x": x})


@model
def parameter_list_inside_blocks() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(16, 16) / 4 for _ in range(3)])
            self.mix = nn.ParameterDict({"a": torch.ones(16), "b": torch.zeros(16)})

        def forward(self, h: Tensor) -> Tensor:
            for weight in self.weights:
                h = torch.tanh(h @ weight)
            return h * self.mix["a"] + self.mix["b"]

    return chain(*(Block() for _ in range(4)))


@model
def functional_call() -> Case:
    """A block runs with weights that were moved a little, as in meta-learning."""

    def moved(block: nn.Module, h: Tensor) -> Tensor:
        weights = {name: p * 1.5 for name, p in block.named_parameters()}
        return h + torch.tanh(torch.func.functional_call(block, weights, (h,)))

    return regression(Stack([nn.Linear(16, 16) for _ in range(4)], moved))


@model
def ensemble_by_vmap() -> Case:
    """vmap over a block's own layer, and in the glue over stacked weights."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, h: Tensor) -> Tensor:
            return torch.vmap(lambda row: self.outer(torch.tanh(self.inner(row))))(h)

    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([Rows() for _ in range(3)])
            self.members = nn.Parameter(torch.randn(3, 16, 16) / 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = h + block(h)
            votes = torch.vmap(F.linear, in_dims=(None, 0))(h, self.members)
            return self.last(votes.mean(0))

    return regression(Ensemble())


# ---------------------------------------------------------------------- other shapes of a network


@model
def bilinear_pairs() -> Case:
    blocks = [nn.Bilinear(16, 16, 16) for _ in range(4)]
    return regression(Stack(blocks, lambda block, h: h + torch.tanh(block(h, h.flip(0)))))


@model
def graph_network() -> Case:
    """Messages along edges, added up by index; edges and nodes are parts of each row."""

    class Message(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.edge, self.node = nn.Linear(32, 16), nn.Linear(32, 16)

        def forward(self, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
            messages = torch.relu(self.edge(torch.cat([h[source], h[target]], -1)))
            total = torch.zeros_like(h).index_add_(0, target, messages)
            count = torch.bincount(target, minlength=len(h)).clamp(min=1)
            return torch.tanh(self.node(torch.cat([h, total / count[:, None]], -1)))

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 1)
            self.layers = nn.ModuleList([Message() for _ in range(4)])

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            rows, count, _ = nodes.shape
            offset = torch.arange(rows)[:, None, None] * count
            source, target = (edges + offset).permute(2, 0, 1).flatten(1)
            h = self.first(nodes.flatten(0, 1))
            for layer in self.layers:
                h = h + layer(h, source, target)
            pooled = torch.zeros(rows, 16).scatter_add_(
                0, torch.arange(rows).repeat_interleave(count)[:, None].expand(-1, 16), h
            )
            return self.last(pooled)

    module = Graph()
    batch = {
        "x": torch.randn(ROWS, 5, 4),
        "e": torch.randint(0, 5, (ROWS, 7, 2)),
        "y": torch.randn(ROWS, 1),
    }
    return Case(module, lambda b: F.mse_loss(module(b["x"], b["e"]), b["y"]), batch)


@model
def mixture_density() -> Case:
    module = Stack([nn.Linear(16, 16) for _ in range(4)], lambda block, h: torch.tanh(block(h)))
    module.last = nn.Linear(16, 9)

    def loss(batch: Batch) -> Tensor:
        weight, mean, scale = module(batch["x"]).chunk(3, -1)
        parts = torch.distributions.Normal(mean, F.softplus(scale) + 0.1)
        chosen = torch.distributions.Categorical(logits=weight)
        mixture = torch.distributions.MixtureSameFamily(chosen, parts)
        return -mixture.log_prob(batch["y"][:, 0]).mean()

    batch = {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 1)}
    return Case(module, loss, batch)


@model
def normalizing_flow() -> Case:
    """Coupling layers: values and log-determinants go through all stages."""

    class Coupling(nn.Module):
        def __init__(self, flip: bool) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
            self.flip = flip

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = x.chunk(2, -1)
            if self.flip:
                a, b = b, a
            shift, scale = self.net(a).chunk(2, -1)
            b = b * torch.exp(torch.tanh(scale)) + shift
            return torch.cat([a, b], -1), torch.tanh(scale).sum(-1)

    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Coupling(bool(i % 2)) for i in range(6)])
            self.register_buffer("mean", torch.zeros(8))

    module = Flow()

    def loss(batch: Batch) -> Tensor:
        z, total = batch["x"], torch.zeros(len(batch["x"]))
        for layer in module.layers:
            z, determinant = layer(z)
            total = total + determinant
        prior = torch.distributions.Normal(module.mean, 1.0)
        return -(prior.log_prob(z).sum(-1) + total).mean()

    return Case(module, loss, {"x": torch.randn(ROWS, 8)})


@model
def adversarial_with_one_optimizer() -> Case:
    """A generator and a critic that sees real and made rows, one loss."""

    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
            self.critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    module = Game()

    def loss(batch: Batch) -> Tensor:
        made = module.generator(torch.randn(len(batch["x"]), 4))
        real, fake = module.critic(batch["x"]), module.critic(made)
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    return Case(module, loss, {"x": torch.randn(ROWS, 8)})


@model
def momentum_teacher() -> Case:
    """A student and a frozen teacher under no_grad, two views each."""

    class Distil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.teacher = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.predict = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
            self.teacher.requires_grad_(False)

    module = Distil()

    def loss(batch: Batch) -> Tensor:
        one, two = batch["x"] + torch.randn(8) * 0.1, batch["x"].flip(1)
        with torch.no_grad():
            wanted_one, wanted_two = module.teacher(two), module.teacher(one)
        got_one, got_two = (module.predict(module.student(v)) for v in (one, two))
        near = F.cosine_similarity
        return 2 - near(got_one, wanted_one).mean() - near(got_two, wanted_two).mean()

    return Case(module, loss, {"x": torch.randn(ROWS, 8)})


@model
def complex_numbers() -> Case:
    """Spectral layers: complex weights, complex values between the blocks."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

        def forward(self, z: Tensor) -> Tensor:
            return z * self.weight / (1 + z.abs())

    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([Spectral() for _ in range(5)])

        def forward(self, x: Tensor) -> Tensor:
            z = torch.fft.rfft(self.first(x))
            for block in self.blocks:
                z = z + block(z)
            return self.last(torch.fft.irfft(z, 16))

    return regression(Fourier())


@model
def many_dtypes() -> Case:
    """Single, double and half precision, and integers, between the blocks."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.high, self.low = nn.Linear(16, 16).double(), nn.Linear(16, 16)
            self.table = nn.Embedding(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = self.low(self.high(h.double()).tanh().float())
            index = (h.detach().bfloat16().float().sigmoid() * 7).long()
            return self.last(h + self.table(index).mean(1))

    return regression(Mixed())


# ---------------------------------------------------------------------- loops and recursion


@model
def recurrent_cell_with_kept_state() -> Case:
    """The state of a recurrent cell lives in an attribute between its calls."""

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([nn.GRUCell(8, 8) for _ in range(4)])
            self.states: list[Tensor] = []
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            self.states = [torch.zeros(len(x), 8) for _ in self.cells]
            for step in x.unbind(1):
                h = step
                for index, cell in enumerate(self.cells):
                    self.states[index] = h = cell(h, self.states[index])
            return self.head(self.states[-1])

    module = Kept()
    batch = {"x": torch.randn(ROWS, 3, 8), "y": torch.randn(ROWS, 1)}
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), batch)


@model
def packed_sequences() -> Case:
    """Rows of different lengths, packed between recurrent layers."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 8)
            self.layers = nn.ModuleList([nn.GRU(8, 8, batch_first=True) for _ in range(4)])
            self.head = nn.Linear(8, 1)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            rnn = nn.utils.rnn
            h: Any = rnn.pack_padded_sequence(
                self.embedding(x), lengths, batch_first=True, enforce_sorted=False
            )
            for layer in self.layers:
                h, _ = layer(h)
            padded, _ = rnn.pad_packed_sequence(h, batch_first=True, total_length=x.shape[1])
            return self.head(padded.sum(1) / lengths[:, None])

    module = Packed()
    batch = {
        "x": torch.randint(0, 20, (ROWS, 6)),
        "n": torch.tensor([6, 2, 6, 2]),
        "y": torch.randn(ROWS, 1),
    }
    return Case(module, lambda b: F.mse_loss(module(b["x"], b["n"]), b["y"]), batch)


@model
def recursion() -> Case:
    """A tree, folded by one module that calls itself through its children."""

    class Node(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.join = nn.Linear(32, 16)
            self.left = Node(depth - 1) if depth else nn.Linear(8, 16)
            self.right = Node(depth - 1) if depth else nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            parts = torch.cat([self.left(x), self.right(-x)], -1)
            return torch.tanh(self.join(parts))

    module = nn.Sequential(Node(2), nn.Linear(16, 1))
    return regression(module)


@model
def equilibrium() -> Case:
    """A fixed point, found without gradients; one step with them."""

    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.cell, self.inject = nn.Linear(16, 16), nn.Linear(16, 16)

        def step(self, z: Tensor, h: Tensor) -> Tensor:
            return torch.tanh(0.5 * self.cell(z) + self.inject(h))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            with torch.no_grad():
                z = torch.zeros_like(h)
                for _ in range(4):
                    z = self.step(z, h)
            return self.last(self.step(z, h))

    return regression(Equilibrium())


@model
def adaptive_depth() -> Case:
    """The loop ends when a value has converged, by `.item()`."""

    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.cell = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for _ in range(4):
                after = torch.tanh(self.cell(h))
                if (after - h).abs().max().item() < 1e-9:
                    break
                h = after
            return self.last(h)

    return regression(Adaptive())


@model
def weights_shared_by_all_blocks() -> Case:
    """One block, called six times (ALBERT)."""
    block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))

    def six_times(unit: nn.Module, h: Tensor) -> Tensor:
        for _ in range(6):
            h = h + unit(h)
        return h

    return regression(Stack([block], six_times))


# ---------------------------------------------------------------------- torch's own machinery


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@model
def quantised_aware() -> Case:
    """Rounding with a straight-through gradient, in the glue and in the blocks; an observer."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("highest", torch.zeros(()))

        def forward(self, h: Tensor) -> Tensor:
            self.highest.copy_(torch.maximum(self.highest, h.detach().abs().max()))
            weight = _Round.apply(self.linear.weight)
            return F.linear(_Round.apply(h), weight, self.linear.bias)

    blocks = [Quantised() for _ in range(5)]
    return regression(Stack(blocks, lambda block, h: _Round.apply(h + torch.tanh(block(h)))))


@model
def fake_quantised() -> Case:
    """torch's fake quantisation between the blocks."""

    def combine(block: nn.Module, h: Tensor) -> Tensor:
        h = torch.fake_quantize_per_tensor_affine(h, 0.05, 0, -128, 127)
        return h + torch.tanh(block(h))

    return regression(Stack([nn.Linear(16, 16) for _ in range(5)], combine))


@model
def checkpointed_blocks() -> Case:
    """Several blocks are recomputed as one region, in the outer glue, with dropout."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.segments = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 16))
                for _ in range(4)
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for segment in self.segments:
                h = checkpoint(segment, h, use_reentrant=False)
            return self.last(h)

    return regression(Segments())


def _damped(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) * factor + x


@model
def scripted_glue() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and still in use
        scripted = torch.jit.script(_damped)
    blocks = [nn.Linear(16, 16) for _ in range(5)]
    return regression(Stack(blocks, lambda block, h: scripted(h, 0.5) + block(h)))


@model
def routed_by_the_batch() -> Case:
    """The names of a ModuleDict come with the batch; all micro-batches have the same."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: nn.Linear(16, 16) for name in "abcd"})
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.unused = nn.Linear(16, 16)

        def forward(self, x: Tensor, route: list[str]) -> Tensor:
            h = self.first(x)
            for name in route:
                h = h + torch.tanh(self.experts[name](h))
            return self.last(h)

    module = Routed()
    batch = {"x": torch.randn(ROWS, 8), "y": torch.randn(ROWS, 1), "route": ["c", "a", "c", "b"]}
    return Case(module, lambda b: F.mse_loss(module(b["x"], b["route"]), b["y"]), batch)


@model
def rearranged() -> Case:
    """Reshapes, einsum and slices between the blocks; views of views."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.columns = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.scale = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = x.view(-1, 4, 4)
            for row, column in zip(self.rows, self.columns, strict=True):
                h = h + row(h)
                turned = torch.einsum("bij,ij->bji", h, self.scale)
                h = (column(turned).transpose(1, 2).reshape(-1, 4, 4) + h)[:, :, [0, 2, 1, 3]]
                h[:, 0].mul_(0.5)
            return h.flatten(1).unflatten(1, (2, 8)).sum((1, 2), keepdim=True)[:, 0]

    return regression(Grid(), 16)


@model
def positions_by_value() -> Case:
    """Index tensors and masks that come from hidden values select rows of fixed number."""

    class TopK(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.work = nn.Linear(16, 1), nn.Linear(16, 16)

        def forward(self, h: Tensor) -> Tensor:
            value, index = self.score(h)[..., 0].topk(3, dim=1)
            wide = index[..., None].expand(-1, -1, 16)
            picked = self.work(h.gather(1, wide)) * value[..., None].sigmoid()
            return h.scatter_add(1, wide, picked)

    class Depths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([TopK() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = block(h)
            return self.last(h).mean(1)

    module = Depths()
    batch = {"x": torch.randn(ROWS, 6, 8), "y": torch.randn(ROWS, 1)}
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), batch)


@model
def soft_attention_by_functions() -> Case:
    """Attention written with torch functions; projections in one parameter."""

    class Attend(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.Parameter(torch.randn(3, 16, 16) / 4)
            self.norm = nn.LayerNorm(16)

        def forward(self, h: Tensor) -> Tensor:
            q, k, v = torch.einsum("btd,ndk->nbtk", self.norm(h), self.projections)
            weights = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(16), -1)
            return h + F.dropout(weights, 0.1, self.training) @ v

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.blocks = nn.ModuleList([Attend() for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for block in self.blocks:
                h = block(h)
            return h @ self.embedding.weight.T

    module = Reader()
    batch = {"x": torch.randint(0, 32, (ROWS, 6))}
    return Case(
        module, lambda b: F.cross_entropy(module(b["x"]).flatten(0, 1), b["x"].flatten()), batch
    )
