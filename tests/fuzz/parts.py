"""The parts that random programs are made of: blocks as people write them, tiny."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 4, 11


class Residual(nn.Module):
    """A block around its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Deep(nn.Module):
    """A container that asks to be opened."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(depth))
        self.gain = nn.Parameter(torch.ones(depth))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x + self.gain[number] * layer(x)
        return x


class Two(nn.Module):
    """Returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.left(x)), torch.sigmoid(self.right(x))


class Named(nn.Module):
    """Returns a dict, with a value that has no gradient and one that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {"hidden": F.gelu(h), "norm": h.detach().square().mean(-1, keepdim=True), "n": 3}


class Mixed(nn.Module):
    """Takes two values, one by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, other: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat([x, other], -1)))


class Drops(nn.Module):
    """Draws in its own code and in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.drop(self.linear(x)).tanh(), 0.2, self.training)


class Attends(nn.Module):
    """Attention over the rows' steps, or over one."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x if x.dim() == 3 else x[:, None]
        h = self.attention(h, h, h, need_weights=False)[0]
        return x + (h if x.dim() == 3 else h[:, 0])


class Encoder(nn.Module):
    """torch's own layer, for rows of one step too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.dim() == 3 else self.layer(x[:, None])[:, 0]


class Recurrent(nn.Module):
    """A recurrence, which returns a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x if x.dim() == 3 else x[:, None])
        return out if x.dim() == 3 else out[:, 0]


class Again(Residual):
    """Runs again for its backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Normed(nn.Module):
    """A batch norm over features, also of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.tanh(self.norm(h) if h.dim() == 2 else self.norm(h.mT).mT)


class Buffered(nn.Module):
    """Reads a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table


class Inplace(nn.Module):
    """Writes its own activations in place, as ReLU(inplace=True) does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        h = self.net(x) * 2
        return h.add_(0.1)


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "residual": Residual,
    "deep": Deep,
    "nested": lambda: nn.Sequential(Deep(2), nn.Sequential(Residual(), Deep(1))),
    "attends": Attends,
    "encoder": Encoder,
    "recurrent": Recurrent,
    "again": Again,
    "buffered": Buffered,
    "inplace": Inplace,
    "identity": nn.Identity,
}
#: parts of which one device with the whole batch is no measure
DRAWING: dict[str, Callable[[], nn.Module]] = {
    "drops": Drops,
    "dropout": lambda: nn.Dropout(0.25),
}
NORMING: dict[str, Callable[[], nn.Module]] = {
    "normed": Normed,
    "batchnorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Normed()),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {"two": Two, "named": Named, "mixed": Mixed}
PARTS = {**PLAIN, **DRAWING, **NORMING, **OTHERS}


def draws(module: nn.Module) -> bool:
    """Whether the module's own code draws: it has a stream of its own."""
    return isinstance(module, (Drops, nn.Dropout, nn.MultiheadAttention))


def make_part(kind: str) -> nn.Module:
    """A part by its name in a program."""
    return PARTS[kind]()


def choose_plain(source: random.Random) -> str:
    """The name of a part that takes a value and returns one."""
    return source.choice(sorted(PLAIN))
