"""A step on one device that takes its micro-batches one after the other.

It is the measure where rows depend on each other by intention: batch norms, dropout with the seeds
that the pipeline gives. And the way to find out what a difference comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_pipe._lightning import MODULE_SPACE
from lightning_pipe.split.batchnorm import BATCH_NORMS, batch_norms
from lightning_pipe.split.generators import generators_of
from lightning_pipe.split.nest import copy_tensors
from lightning_pipe.split.patching import attributes
from lightning_pipe.split.rng import KeyedRandom, mix, preserved
from lightning_pipe.split.rows import Rule, split_batch
from lightning_pipe.split.snapshot import Snapshot
from lightning_pipe.split.streams import DROPOUTS, Streams, callable_modules


@dataclass(slots=True)
class Piecewise:
    """How the micro-batches are taken.

    Attributes:
        count: M.
        rules: How values of the batch are split.
        drawing: Modules that are given the seeds that the pipeline gives them; None for none.
        seed: That of the run.
        carries: Whether a micro-batch finds what the one before left in attributes.
        calm: Whether dropout and batch norms are set aside.
        losses: Of the micro-batches; filled in.
        changed: Attributes that the step changed, by their names; filled in.
    """

    count: int
    rules: Mapping[str, Rule] = field(default_factory=dict)
    drawing: Mapping[str, bool] | None = None
    seed: int = 0
    carries: bool = False
    calm: bool = False
    losses: list[float] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def install(self, module: LightningModule) -> None:
        """Lets the training step of a module be taken so."""
        own = module.training_step

        @wraps(own)
        def training_step(batch: Any, *rest: Any) -> Any:
            with calmed(module) if self.calm else nullcontext():
                return self._run(module, own, batch, rest)

        module.training_step = training_step  # type: ignore[method-assign]

    def _run(self, module: LightningModule, own: Callable[..., Any], batch: Any, rest: Any) -> Any:
        pieces = split_batch(batch, self.count, self.rules)
        losses: list[Tensor] = []
        weights: list[Any] = []
        logs: list[dict[str, Tensor]] = []
        norms = [name for name, _ in batch_norms(module)]  # these go on, as in a pipeline
        before = Snapshot(module, norms)
        for number, piece in enumerate(pieces.batches):
            if number and not self.carries:
                before.restore()
            logs.append({})
            with self._seeded(module, number), _noting(module, logs[-1]):
                value = own(copy_tensors(piece), *rest)
            loss, weight = _parts(value)
            losses.append(loss)
            weights.append(pieces.rows[number] if weight is None else weight)
        self.changed = [
            f"{name}.{key}".strip(".")
            for name, key, _ in before.changed_attributes()
            if key not in MODULE_SPACE
        ]
        self.losses = [float(loss) for loss in losses]
        if weights[0] == "sum":
            return torch.stack(losses).sum()
        shares = [float(weight) / (sum(map(float, weights)) or 1.0) for weight in weights]
        for name in logs[0]:
            values = [log[name] for log in logs if name in log]
            if len(values) == len(shares):
                module.log(name, sum(v * s for v, s in zip(values, shares, strict=True)))
        return torch.stack([loss * s for loss, s in zip(losses, shares, strict=True)]).sum()

    def _seeded(self, module: LightningModule, number: int) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self.drawing is None
            else seeded(module, self.drawing, mix(mix(self.seed, 0, 0), number))
        )


@contextmanager
def seeded(module: nn.Module, drawing: Mapping[str, bool], key: int) -> Iterator[None]:
    """Gives modules that draw the seeds that they have in a pipeline.

    Args:
        module: The user's module.
        drawing: Their names, to whether they draw from Python or NumPy too.
        key: Of the micro-batch.
    """
    generators = generators_of(module)
    with preserved("cpu", generators), ExitStack() as stack:
        streams = Streams(callable_modules(module), KeyedRandom(key, "cpu", generators), drawing)
        stack.enter_context(attributes(streams.replacements()))
        streams.begin()
        yield


def _parts(value: Any) -> tuple[Tensor, Any]:
    """The loss, and what the step says that it divides by."""
    if isinstance(value, Mapping):
        return value["loss"], value.get("loss_weight")
    return value, None


@contextmanager
def _noting(module: LightningModule, found: dict[str, Tensor]) -> Iterator[None]:
    """Takes down numbers that are logged, instead of logging them once for each micro-batch."""

    def log(name: str, value: Any, *_: Any, **__: Any) -> None:
        if isinstance(value, (int, float)):
            found[name] = torch.tensor(float(value))
        elif isinstance(value, Tensor) and value.numel() == 1:
            found[name] = value.detach()

    def log_dict(values: Mapping[str, Any], *_: Any, **__: Any) -> None:
        for name, value in values.items():
            log(name, value)

    with attributes([(module, "log", log), (module, "log_dict", log_dict)]):
        yield


@contextmanager
def calmed(module: nn.Module) -> Iterator[None]:
    """Without dropout, and with batch norms that look at no other row."""
    changes: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        if isinstance(part, DROPOUTS):
            changes.append((part, "p", 0.0))
        elif isinstance(part, nn.MultiheadAttention):
            changes.append((part, "dropout", 0.0))
        elif isinstance(part, BATCH_NORMS):
            changes.append((part, "training", False))
    changes.append((F, "dropout", _no_dropout))
    with attributes(changes):
        yield


def _no_dropout(value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value


@dataclass(slots=True)
class Twice:
    """A step that is taken three times from the same state, to see whether it repeats.

    Attributes:
        losses: Of the first two times.
    """

    losses: list[float] = field(default_factory=list)

    def install(self, module: LightningModule) -> None:
        """Lets the training step of a module be taken so."""
        own = module.training_step

        @wraps(own)
        def training_step(batch: Any, *rest: Any) -> Any:
            for _ in range(2):
                before = Snapshot(module)
                kept = preserved("cpu", generators_of(module))
                with torch.no_grad(), kept, _noting(module, {}):
                    loss, _ = _parts(own(copy_tensors(batch), *rest))
                self.losses.append(float(loss))
                before.restore()
            return own(batch, *rest)

        module.training_step = training_step  # type: ignore[method-assign]
