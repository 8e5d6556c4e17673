"""The LightningModule of an example, and its batches. Plain Lightning."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from tests.fuzz.parts import TOKENS, WIDTH, make_part
from tests.fuzz.programs import Example, Op
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


@dataclass
class Record:
    """A batch as a dataclass."""

    tokens: Tensor
    x: Tensor
    y: Tensor
    mask: Tensor
    flag: Any


class Program(nn.Module):
    """Some parts and the operations over them."""

    def __init__(self, parts: nn.ModuleDict, ops: Sequence[Op]) -> None:
        super().__init__()
        self.parts, self.ops = parts, ops
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("table", torch.linspace(-0.5, 0.5, WIDTH))
        self.kept: Any = None

    def forward(self, values: list[Tensor], batch: dict[str, Any]) -> list[Tensor]:
        for op in self.ops:
            values = values + self.run(op, values, batch)
        return values

    def run(self, op: Op, values: list[Tensor], batch: dict[str, Any]) -> list[Tensor]:
        kind, *places = op
        return getattr(self, f"_{kind}")(values, batch, *places)

    def part(self, number: int) -> nn.Module:
        return self.parts[f"p{number}"]

    def _call(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        return [self.part(p)(v[i])]

    def _two(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        return list(self.part(p)(v[i]))

    def _named(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        out = self.part(p)(v[i])
        return [out["hidden"] * (1 + out["norm"]) / out["n"]]

    def _mixed(self, v: Any, _: Any, p: int, i: int, j: int) -> list[Tensor]:
        return [self.part(p)(v[i], other=v[j])]

    def _tied(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        part = self.part(p)
        weight = part.weight if isinstance(part, nn.Linear) else part.linear.weight
        return [F.linear(v[i], weight.t())]

    def _flag(self, v: Any, batch: Any, p: int, i: int) -> list[Tensor]:
        return [self.part(p)(v[i]) if batch["flag"] else v[i] * 2]

    def _long(self, v: Any, batch: Any, p: int, i: int) -> list[Tensor]:
        return [self.part(p)(v[i]) if batch["x"].dim() == 3 else v[i].tanh()]

    def _ask(self, v: Any, batch: Any, p: int, i: int) -> list[Tensor]:
        return [self.part(p)(v[i]) if batch["x"].sum() > 0 else v[i] + 0.5]

    def _peek(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        return [self.part(p)(v[i]) if v[i].sum() > 0 else v[i] + 0.5]

    def _coin(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        return [v[i] + self.part(p)(v[i]) if torch.rand(()) < 0.5 else v[i]]

    def _add(self, v: Any, _: Any, i: int, j: int) -> list[Tensor]:
        return [v[i] + 0.5 * v[j]]

    def _mul(self, v: Any, _: Any, i: int, j: int) -> list[Tensor]:
        return [v[i] * torch.sigmoid(v[j])]

    def _mean(self, v: Any, _: Any, i: int, j: int) -> list[Tensor]:
        return [torch.stack([v[i], v[j], v[0]]).mean(0)]

    def _inplace(self, v: Any, _: Any, i: int, j: int) -> list[Tensor]:
        h = v[i] * 1.5
        h += v[j]
        return [h]

    def _scale(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i] * self.scale]

    def _detach(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i].detach() + 0.1]

    def _roll(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i].roll(1, -1)]

    def _split(self, v: Any, _: Any, i: int) -> list[Tensor]:
        left, right = v[i].chunk(2, -1)
        return [torch.cat([right, left], -1)]

    def _relu(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [F.relu(v[i])]

    def _table(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i] + self.table]

    def _cast(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i] + torch.arange(WIDTH, device=v[i].device).to(v[i].dtype) / WIDTH]

    def _where(self, v: Any, batch: Any, i: int) -> list[Tensor]:
        mask = batch["mask"].view(-1, *[1] * (v[i].dim() - 1))
        return [torch.where(mask, v[i], -v[i])]

    def _keep(self, v: Any, _: Any, i: int) -> list[Tensor]:
        self.kept = v[i].detach()
        return [v[i] - self.kept.mean(-1, keepdim=True)]

    def _nograd(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        with torch.no_grad():
            teacher = self.part(p)(v[i])
        return [v[i] + teacher]

    def _again(self, v: Any, _: Any, p: int, i: int) -> list[Tensor]:
        return [checkpoint(self.part(p), v[i], use_reentrant=False)]

    def _drop(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [F.dropout(v[i], 0.3, self.training)]

    def _noise(self, v: Any, _: Any, i: int) -> list[Tensor]:
        return [v[i] + 0.1 * torch.randn_like(v[i]) + 0.1 * random.random()]


class FuzzModule(pl.LightningModule):
    """Embeds, runs the program, and takes a loss of its last values."""

    def __init__(self, example: Example) -> None:
        super().__init__()
        self.example = example
        self.embed, self.tokens = nn.Linear(WIDTH, WIDTH), nn.Embedding(TOKENS, WIDTH)
        parts = {f"p{i}": make_part(kind) for i, kind in enumerate(example.parts)}
        for number in example.frozen:
            parts[f"p{number}"].requires_grad_(False)
        half = len(example.ops) // 2
        spans = [example.ops[:half], example.ops[half:]]
        if example.home != "halves":
            spans = [example.ops]
        shared = nn.ModuleDict(parts)
        self.programs = nn.ModuleList(Program(shared, ops) for ops in spans)
        if example.alias:
            self.first = parts["p0"]
        self.head = nn.Linear(WIDTH, 3)
        if example.counts:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def run_program(self, batch: dict[str, Any]) -> list[Tensor]:
        start = self.embed(batch["x"]) + self.tokens(batch["tokens"])
        values = [start]
        for program in self.programs:
            if self.example.home == "step":
                for op in program.ops:
                    values = values + program.run(op, values, batch)
            else:
                values = program(values, batch)
        return values

    def loss_of(self, batch: dict[str, Any]) -> tuple[Tensor, Any]:
        """The loss, and what it divides by."""
        values = self.run_program(batch)
        last = values[-1]
        kind = self.example.loss
        if kind in ("entropy", "weighted", "sum"):
            logits = self.head(last if last.dim() == 2 else last.mean(1))
            target = batch["tokens"].view(len(logits), -1)[:, 0] % 3
            if kind == "sum":
                return F.cross_entropy(logits, target, reduction="sum"), "sum"
            if kind == "weighted":
                target = torch.where(batch["mask"], target, -100)
                count = (target != -100).sum()
                loss = F.cross_entropy(logits, target, reduction="sum") / count.clamp(min=1)
                return loss, count
            return F.cross_entropy(logits, target), None
        loss = F.mse_loss(last, batch["y"])
        if kind == "two":
            loss = loss + 0.3 * values[len(values) // 2].square().mean()
        return loss, None

    def training_step(self, given: Any, batch_idx: int) -> Any:
        batch = as_dict(given)
        loss, weight = self.loss_of(batch)
        if self.example.counts:
            self.count += 1
            self.seen += len(batch["x"])
        if weight is not None:
            return {"loss": loss, "loss_weight": weight}
        self.log("loss", loss, batch_size=len(batch["x"]))
        if self.example.loss == "dict":
            return {"loss": loss, "shown": loss.detach()}
        return loss

    def validation_step(self, given: Any, batch_idx: int) -> None:
        batch = as_dict(given)
        self.log("validated", F.mse_loss(self.run_program(batch)[-1], batch["y"]),
                 batch_size=len(batch["x"]))  # fmt: skip

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_for(self, self.example.optimizer)


def optimizer_for(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    """An optimizer; a large eps keeps Adam from making steps of rounding."""
    if kind == "sgd":
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    if kind == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-3)
    wide = [p for p in module.parameters() if p.dim() >= 2]
    rest = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": rest, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=3e-3, eps=1e-3, weight_decay=0.0)


def build(example: Example) -> FuzzModule:
    """The module, equal in every process."""
    torch.manual_seed(example.seed)
    return FuzzModule(example).double()


def as_dict(given: Any) -> dict[str, Any]:
    """A batch by the names of its values."""
    if isinstance(given, Record):
        return vars(given)
    if isinstance(given, dict):
        return {**given.get("inputs", {}), **given}
    tokens, x, y, mask, flag = given[:5]
    return {"tokens": tokens, "x": x, "y": y, "mask": mask, "flag": flag}


def batches_of(example: Example) -> list[Any]:
    """Three optimizer steps' worth of batches; the last one may be shorter."""
    source = torch.Generator().manual_seed(example.seed)
    count = 3 * example.accumulate
    sizes = [example.rows] * (count - 1) + [example.short]
    return [_batch(example, rows, number, source) for number, rows in enumerate(sizes)]


def _batch(example: Example, rows: int, number: int, source: torch.Generator) -> Any:
    shape = (rows, example.length) if example.length else (rows,)
    x = torch.randn(*shape, WIDTH, generator=source, dtype=torch.float64)
    y = torch.randn(*shape, WIDTH, generator=source, dtype=torch.float64)
    tokens = torch.randint(0, TOKENS, shape, generator=source)
    mask = torch.rand(rows, generator=source) < 0.7
    mask[0] = True  # a micro-batch may have no valid row, a batch has one
    flag = number % 2 == 0 or example.seed % 4 != 0  # a flag that changes costs a trace
    if example.batch == "record":
        return Record(tokens, x, y, mask, flag)
    extras = example.extras and rows > 1  # of sizes, 1 counts last
    if example.batch in ("list", "tuple"):
        found = [tokens, x, y, mask, flag]
        if extras:
            found += [torch.ones(rows + 7), [f"row {i}" for i in range(rows)]]
        return found if example.batch == "list" else tuple(found)
    named: dict[str, Any] = {"tokens": tokens, "x": x, "y": y, "mask": mask, "flag": flag}
    if extras:
        named |= {"classes": torch.ones(rows + 7), "names": [f"row {i}" for i in range(rows)]}
    if example.batch == "nested":
        return {"inputs": {"tokens": named.pop("tokens"), "x": named.pop("x")}, **named}
    return named
