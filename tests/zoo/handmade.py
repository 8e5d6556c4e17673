"""Hand-made models that are harder than those of `tests.zoo.modules`, some of them too hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.zoo.modules import ROWS, Batch, Case, build_siamese
from torch import Tensor, nn

HANDMADE: dict[str, Callable[[], Case]] = {}


def model(build: Callable[[], Case]) -> Callable[[], Case]:
    """Register a builder; every build starts from the same seed."""

    def seeded() -> Case:
        torch.manual_seed(0)
        return build()

    HANDMADE[build.__name__] = seeded
    return seeded


@model
def siamese_batch_norm() -> Case:
    """One encoder called twice, with running statistics in it."""
    return build_siamese(nn.BatchNorm1d)


@model
def one_recurrent_module() -> Case:
    """Four LSTM layers in one module: its calls are three."""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.recurrent = nn.LSTM(32, 32, 4, batch_first=True)
            self.head = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.recurrent(self.embedding(x))[0])

    module = Language()
    batch = {"x": torch.randint(0, 64, (ROWS, 12))}
    return Case(
        module, lambda b: F.cross_entropy(module(b["x"]).flatten(0, 1), b["x"].flatten()), batch
    )


@model
def bare_parameters() -> Case:
    """Weights in a list, used with functions: there is no call to place."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(16, 16) * 0.2 for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            for weight in self.weights:
                x = torch.tanh(F.linear(x, weight))
            return x

    module = Bare()
    return Case(module, lambda b: module(b["x"]).pow(2).mean(), {"x": torch.randn(ROWS, 16)})


@model
def early_exit() -> Case:
    """How many blocks run depends on the batch; here the two micro-batches differ."""

    class Exit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks[: 3 if x.sum() > 0 else 6]:
                h = h + torch.tanh(block(h))
            return self.last(h)

    module = Exit()
    x = torch.randn(ROWS, 8).abs()
    x[: ROWS // 2] *= -1
    return Case(
        module, lambda b: F.mse_loss(module(b["x"]), b["y"]), {"x": x, "y": torch.randn(ROWS, 1)}
    )


@model
def no_containers() -> Case:
    """Layers are attributes ``layer0`` to ``layer5``, with one dropout between all of them."""

    class Monolith(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for index in range(6):
                setattr(self, f"layer{index}", nn.Linear(16, 16))
            self.dropout = nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            for index in range(6):
                x = self.dropout(torch.relu(getattr(self, f"layer{index}")(x)))
            return x

    module = Monolith()
    return Case(module, lambda b: module(b["x"]).pow(2).mean(), {"x": torch.randn(ROWS, 16)})


class _TimeBlock(nn.Module):
    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width_in)
        self.conv = nn.Conv2d(width_in, width, 3, 1, 1)
        self.time = nn.Linear(32, width)
        self.skip = nn.Conv2d(width_in, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv(F.silu(self.norm(x)))
        return self.skip(x) + h + self.time(time)[:, :, None, None]


class _Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.last = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 3, 3, 1, 1)
        self.down = nn.ModuleList([_TimeBlock(8, 8), _TimeBlock(8, 16), _TimeBlock(16, 16)])
        self.middle = _TimeBlock(16, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up = nn.ModuleList([_TimeBlock(32, 16), _TimeBlock(32, 8), _TimeBlock(16, 8)])
        self.register_buffer("kept", torch.linspace(0.99, 0.01, 100))

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        angle = step[:, None] * torch.exp(-torch.arange(8) / 2.0)
        time = self.time(torch.cat([angle.sin(), angle.cos()], 1))
        h, skips = self.first(x), []
        for block in self.down:
            h = block(h, time)
            skips.append(h)
            h = F.avg_pool2d(h, 2)
        h = self.middle(h, time)
        rows = h.flatten(2).transpose(1, 2)
        h = h + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).view_as(h)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2), skips.pop()], 1), time)
        return self.last(h)


@model
def diffusion() -> Case:
    """Noise levels and noise are drawn in the step; the time embedding goes to every block."""
    module = _Denoiser()

    def loss(batch: Batch) -> Tensor:
        x = batch["x"]
        step = torch.randint(0, 100, (len(x),))
        noise, kept = torch.randn_like(x), module.kept[step][:, None, None, None]
        return F.mse_loss(module(kept.sqrt() * x + (1 - kept).sqrt() * noise, step), noise)

    return Case(module, loss, {"x": torch.randn(ROWS, 3, 16, 16)})
