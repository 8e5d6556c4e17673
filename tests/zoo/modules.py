"""Hand-made models, one for each way in which a model can be hard to cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = 4
Batch = dict[str, Any]


class Case(NamedTuple):
    """A model, its loss on a batch, and a batch of ``ROWS`` rows."""

    module: nn.Module
    loss: Callable[[Batch], Tensor]
    batch: Batch


MODELS: dict[str, Callable[[], Case]] = {}


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a builder; every build starts from the same seed."""

    def seeded() -> Case:
        torch.manual_seed(0)
        return build()

    MODELS[build.__name__] = seeded
    return seeded


def _regression(width_in: int = 8, width_out: int = 1) -> Batch:
    return {"x": torch.randn(ROWS, width_in), "y": torch.randn(ROWS, width_out)}


class Stack(nn.Module):
    """Input layer, blocks in a list, output layer; ``combine`` is the glue between the blocks."""

    def __init__(
        self, blocks: list[nn.Module], combine: Callable[[nn.Module, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(16, 1)
        self.combine = combine

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.combine(block, h)
        return self.last(h)


def _stack(combine: Callable[[nn.Module, Tensor], Tensor], num_blocks: int = 6) -> Case:
    module = Stack([nn.Linear(16, 16) for _ in range(num_blocks)], combine)
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), _regression())


@model
def mlp() -> Case:
    module = nn.Sequential(
        *(layer for _ in range(6) for layer in (nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.2)))
    )
    return Case(module, lambda b: module(b["x"]).pow(2).mean(), {"x": torch.randn(ROWS, 16)})


@model
def residual_in_glue() -> Case:
    return _stack(lambda block, h: h + torch.tanh(block(h)))


@model
def inplace_residual() -> Case:
    def combine(block: nn.Module, h: Tensor) -> Tensor:
        out = block(h)
        out += h
        return torch.relu_(out)

    return _stack(combine)


@model
def branch_that_is_not_taken() -> Case:
    def combine(block: nn.Module, h: Tensor) -> Tensor:
        h = h + torch.tanh(block(h))
        return h / h.norm() if h.norm() > 1e6 else h

    return _stack(combine)


@model
def activation_through_numpy() -> Case:
    def combine(block: nn.Module, h: Tensor) -> Tensor:
        scale = float(h.detach().numpy().std() > -1.0)
        return h * scale + torch.tanh(block(h))

    return _stack(combine)


@model
def vmapped_glue() -> Case:
    return _stack(lambda block, h: h + torch.vmap(torch.sin)(block(h)))


@model
def random_glue() -> Case:
    """Noise that depends on a value of an earlier block, and noise that does not."""

    def combine(block: nn.Module, h: Tensor) -> Tensor:
        noise = torch.randn_like(h) + torch.rand(16)
        return h + torch.tanh(block(F.dropout(h, 0.3))) + 0.1 * noise

    return _stack(combine)


@model
def tensor_hook() -> Case:
    def combine(block: nn.Module, h: Tensor) -> Tensor:
        out = torch.tanh(block(h))
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 2)
        return h + out

    return _stack(combine)


@model
def checkpointed_region() -> Case:
    """Two blocks are recomputed as one region, with dropout in it."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])

        def forward(self, h: Tensor) -> Tensor:
            def region(h: Tensor) -> Tensor:
                return self.parts[1](F.dropout(torch.relu(self.parts[0](h)), 0.5))

            return checkpoint(region, h, use_reentrant=False)

    module = Stack([Pair() for _ in range(4)], lambda block, h: h + block(h))
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), _regression())


@model
def module_hooks() -> Case:
    case = _stack(lambda block, h: h + torch.tanh(block(h)))
    for block in case.module.blocks:  # type: ignore[union-attr]
        block.register_forward_hook(lambda m, args, out: out * 0.5)
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        block.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 3,))
    return case


@model
def tied_embedding() -> Case:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.position = nn.Parameter(torch.randn(12, 32))
            self.blocks = nn.ModuleList(
                [nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(4)]
            )
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x) * 32**0.5 + self.position
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]).to(h.dtype)
            for block in self.blocks:
                h = block(h, src_mask=mask)
            return self.head(h)

    module = Language()
    batch = {"x": torch.randint(0, 64, (ROWS, 12))}
    return Case(
        module, lambda b: F.cross_entropy(module(b["x"]).flatten(0, 1), b["x"].flatten()), batch
    )


@model
def weight_as_argument() -> Case:
    """The head multiplies with the embedding's weight; a shared table is an argument."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.table = nn.Parameter(torch.randn(6, 16))
            self.blocks = nn.ModuleList([nn.Bilinear(16, 16, 16) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            for block in self.blocks:
                h = h + block(h, self.table.expand_as(h))
            return F.linear(h, self.embedding.weight)

    module = Language()
    batch = {"x": torch.randint(0, 32, (ROWS, 6))}
    return Case(
        module, lambda b: F.cross_entropy(module(b["x"]).flatten(0, 1), b["x"].flatten()), batch
    )


@model
def unet() -> Case:
    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (3, 8, 16, 32)
            self.down = nn.ModuleList(
                [nn.Conv2d(a, b, 3, 2, 1) for a, b in itertools.pairwise(widths)]
            )
            self.middle = nn.Conv2d(32, 32, 3, 1, 1)
            self.up = nn.ModuleList(
                [nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in ((64, 16), (32, 8), (16, 3))]
            )
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            skips = []
            for layer in self.down:
                x = F.relu(layer(x))
                skips.append(x)
            x = F.relu(self.middle(x))
            for layer in self.up:
                x = layer(torch.cat([x, skips.pop()], 1))
            return x * self.scale

    module = UNet()
    images = torch.randn(ROWS, 3, 32, 32)
    return Case(
        module, lambda b: F.mse_loss(module(b["x"]), b["y"]), {"x": images, "y": images.flip(0)}
    )


@model
def resnet() -> Case:
    class Block(nn.Module):
        def __init__(self, width_in: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(width)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            same = stride == 1 and width_in == width
            self.skip = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride)

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += self.skip(x)
            return self.relu(out)

    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        *(Block(a, b, s) for a, b, s in ((8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2))),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    batch = {"x": torch.randn(ROWS, 3, 16, 16), "y": torch.randint(0, 5, (ROWS,))}
    return Case(module, lambda b: F.cross_entropy(module(b["x"]), b["y"]), batch)


def build_siamese(norm: type[nn.Module]) -> Case:
    """One encoder called twice: its calls fall on two stages, its weights on both."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(
                nn.Linear(8, 32), norm(32), nn.ReLU(inplace=True), nn.Linear(32, 16)
            )
            self.head = nn.Linear(32, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.head(torch.cat([self.encoder(a), self.encoder(b)], 1))

    module = Siamese()
    batch = {
        "a": torch.randn(ROWS, 8),
        "b": torch.randn(ROWS, 8),
        "y": torch.randint(0, 2, (ROWS,)),
    }
    return Case(module, lambda b: F.cross_entropy(module(b["a"], b["b"]), b["y"]), batch)


@model
def siamese() -> Case:
    return build_siamese(nn.LayerNorm)


@model
def variational() -> Case:
    class Variational(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32))
            self.mean, self.log_variance = nn.Linear(32, 8), nn.Linear(32, 8)
            self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))

    module = Variational()

    def loss(batch: Batch) -> Tensor:
        h = module.encoder(batch["x"])
        mean, log_variance = module.mean(h), module.log_variance(h)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.mse_loss(module.decoder(z), batch["x"]) + 0.1 * divergence

    return Case(module, loss, {"x": torch.randn(ROWS, 16)})


@model
def auxiliary_attribute() -> Case:
    """A router inside each block picks experts by value; its loss is left in an attribute."""

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
            self.balance: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            weights = self.gate(x).softmax(-1)
            best, choice = weights.max(-1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (choice == index).nonzero().squeeze(-1)
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]) * best[rows, None])
            self.balance = (weights.mean(0) ** 2).sum() * 4
            return x + out

    module = Stack([Experts() for _ in range(4)], lambda block, h: block(h))

    def loss(batch: Batch) -> Tensor:
        out = F.mse_loss(module(batch["x"]), batch["y"])
        return out + 0.1 * sum(block.balance for block in module.blocks)

    return Case(module, loss, _regression())


@model
def captured_by_hook() -> Case:
    """A hook on an inner layer takes a tensor out of a block that does not return it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, h: Tensor) -> Tensor:
            return h + self.outer(torch.tanh(self.inner(h)))

    module = Stack([Block() for _ in range(4)], lambda block, h: block(h))
    captured: list[Tensor] = []
    for block in module.blocks:
        block.inner.register_forward_hook(lambda m, args, out: captured.append(out))

    def loss(batch: Batch) -> Tensor:
        captured.clear()
        return F.mse_loss(module(batch["x"]), batch["y"]) + sum(t.pow(2).mean() for t in captured)

    return Case(module, loss, _regression())


@dataclasses.dataclass
class State:
    """What the blocks of ``dataclass_outputs`` hand on."""

    hidden: Tensor
    step: int
    extra: Any = None


@model
def dataclass_outputs() -> Case:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, state: State) -> State:
            hidden = torch.tanh(self.linear(state.hidden))
            return State(hidden, state.step + 1, {"norm": hidden.norm()})

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([Block() for _ in range(5)])

    module = Chain()

    def loss(batch: Batch) -> Tensor:
        state, norms = State(module.first(batch["x"]), 0), 0.0
        for block in module.blocks:
            state = block(state)
            norms = norms + state.extra["norm"]
        return F.mse_loss(module.last(state.hidden), batch["y"]) + 0.01 * norms

    return Case(module, loss, _regression())


@model
def writes_into_a_buffer() -> Case:
    """Block outputs are written into a tensor that the glue allocated, and changed in place."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(5)])
            self.activation = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            collected = torch.zeros(len(x), 5, 16)
            for index, block in enumerate(self.blocks):
                before = h
                h = block(h)
                h += before
                h[:, 0] = before[:, 1] * 0.5
                collected[:, index] = h
                h = self.activation(h)
            return self.last(h) + collected.mean((1, 2))[:, None]

    module = Writer()
    return Case(module, lambda b: F.mse_loss(module(b["x"]), b["y"]), _regression())


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * grad, None


@model
def gradient_reversal() -> Case:
    class Adversarial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.ModuleList([nn.Linear(16 if i else 8, 16) for i in range(4)])
            self.classes = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
            self.domain = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    module = Adversarial()

    def loss(batch: Batch) -> Tensor:
        h = batch["x"]
        for layer in module.features:
            h = torch.relu(layer(h))
        classes = F.cross_entropy(module.classes(h), batch["y"])
        return classes + F.cross_entropy(module.domain(_Reverse.apply(h, 0.5)), batch["d"])

    batch = {
        "x": torch.randn(ROWS, 8),
        "y": torch.randint(0, 3, (ROWS,)),
        "d": torch.randint(0, 2, (ROWS,)),
    }
    return Case(module, loss, batch)


@model
def encoder_decoder() -> Case:
    module = nn.Transformer(16, 2, 3, 3, 32, 0.1, batch_first=True)

    def loss(batch: Batch) -> Tensor:
        return module(batch["source"], batch["target"]).pow(2).mean()

    batch = {"source": torch.randn(ROWS, 6, 16), "target": torch.randn(ROWS, 5, 16)}
    return Case(module, loss, batch)


@model
def recurrent() -> Case:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(32, 16)
            self.layers = nn.ModuleList([nn.LSTM(16, 16, batch_first=True) for _ in range(4)])
            self.head = nn.Linear(16, 32)
            self.start = nn.Parameter(torch.zeros(1, 1, 16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.embedding(x)
            start = self.start.expand(1, x.shape[0], 16).contiguous()
            for layer in self.layers:
                h = h + layer(h, (start, torch.zeros_like(start)))[0]
            return self.head(h)

    module = Recurrent()
    batch = {"x": torch.randint(0, 32, (ROWS, 7))}
    return Case(
        module, lambda b: F.cross_entropy(module(b["x"]).flatten(0, 1), b["x"].flatten()), batch
    )


@model
def frozen_first() -> Case:
    case = _stack(lambda block, h: h + torch.tanh(block(h)))
    for name in ("first", "blocks.0", "blocks.1", "blocks.2"):
        case.module.get_submodule(name).requires_grad_(False)
    return case


@model
def frozen_middle() -> Case:
    case = _stack(lambda block, h: h + torch.tanh(block(h)))
    for name in ("blocks.1", "blocks.2", "blocks.3"):
        case.module.get_submodule(name).requires_grad_(False)
    return case


@model
def frozen_last() -> Case:
    case = _stack(lambda block, h: h + torch.tanh(block(h)))
    for name in ("blocks.4", "blocks.5", "last"):
        case.module.get_submodule(name).requires_grad_(False)
    return case


@model
def masks_and_integers() -> Case:
    """Booleans, integers and a tensor without gradient cross the cuts; one output nobody reads."""

    class Masker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            out = torch.tanh(self.linear(h))
            return out, out > 0, out.argmax(-1), h.detach() * 3

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([Masker() for _ in range(5)])

    module = Chain()

    def loss(batch: Batch) -> Tensor:
        h, masks, votes = module.first(batch["x"]), [], []
        for block in module.blocks:
            out, mask, vote, _ = block(h)
            masks.append(mask)
            votes.append(vote)
            h = h + torch.where(mask, out, 0.1 * h)
        share = torch.stack(masks).float().mean()
        return F.mse_loss(module.last(h), batch["y"]) * (1 + share) + torch.stack(votes).sum() * 0.0

    return Case(module, loss, _regression())
