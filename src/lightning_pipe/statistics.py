"""Running statistics of batch norms, updated once per step with those of the whole mini-batch.

As they are, batch norms update them once per micro-batch. Here each call only notes count, mean and
spread of its micro-batch; these are put together after the step (Chan et al., "Updating formulae
and a pairwise algorithm for computing sample variances", 1979), so the statistics are those that
one device takes of the batch. Normalisation stays that of the micro-batch. torchgpipe calls it
deferred batch normalisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_pipe.split.batchnorm import BATCH_NORMS
from lightning_pipe.split.patching import attributes

#: values of `PipelineStrategy(batchnorm=...)`
POLICIES = ("micro-batch", "deferred")


class Moments(NamedTuple):
    """Of one call of one batch norm: values per channel, their mean, sum of squared deviations."""

    values: int
    mean: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True)
class Noted:
    """One call.

    Attributes:
        norm: Name of the module.
        microbatch: Number of the micro-batch.
        place: Stage, and the how-manieth call there.
        moments: What it saw.
    """

    norm: str
    microbatch: int
    place: tuple[int, int]
    moments: Moments


def joined(parts: Sequence[Moments]) -> Moments:
    """The moments of all values together."""
    count, mean, squares = parts[0]
    for part in parts[1:]:
        total = count + part.values
        delta = part.mean - mean
        mean = mean + delta * (part.values / total)
        squares = squares + part.squares + delta**2 * (count * part.values / total)
        count = total
    return Moments(count, mean, squares)


class DeferredStatistics:
    """Keeps the batch norms of a module from updating their statistics, and updates them after.

    Args:
        norms: Name and module of those with statistics of their own.
    """

    def __init__(self, norms: Sequence[tuple[str, nn.Module]]) -> None:
        self._norms: dict[str, Any] = {name: norm for name, norm in norms if _keeps(norm)}
        self._noted: list[Noted] = []
        self._here: tuple[int, int] | None = None
        self._calls = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """While all micro-batches of a step run, forward and backward."""
        self._noted.clear()
        patches = [
            (norm, "forward", self._forward(name, norm, norm.forward))
            for name, norm in self._norms.items()
        ]
        with attributes(patches):
            yield

    @contextmanager
    def microbatch(self, stage: int, microbatch: int) -> Iterator[None]:
        """While one runs forward; what runs outside is a recomputation, and counts no more."""
        self._here, self._calls = (stage, microbatch), 0
        try:
            yield
        finally:
            self._here = None

    def _forward(self, name: str, norm: Any, original: Callable[..., Tensor]) -> Any:
        def forward(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not (norm.training and norm.track_running_stats):
                return original(values, *args, **kwargs)
            if self._here is not None:
                stage, microbatch = self._here
                place = (stage, self._calls)
                self._calls += 1
                self._noted.append(Noted(name, microbatch, place, _moments(values)))
            with attributes([(norm, "track_running_stats", False)]):
                return original(values, *args, **kwargs)

        return forward

    def take(self, names: Sequence[str]) -> list[Noted]:
        """Takes what was noted of some batch norms, on the host, to be sent to other ranks."""
        found = [noted for noted in self._noted if noted.norm in names]
        self._noted = [noted for noted in self._noted if noted.norm not in names]
        return [
            replace(noted, moments=Moments(m.values, m.mean.cpu(), m.squares.cpu()))
            for noted in found
            for m in (noted.moments,)
        ]

    def put(self, noted: Sequence[Noted]) -> None:
        """Puts in what was noted elsewhere."""
        self._noted += noted

    def finish(self, others: Sequence[Noted] = ()) -> None:
        """Updates the statistics, for each call of a batch norm once.

        Args:
            others: What was noted on all ranks of batch norms that several ranks call.
        """
        calls: dict[str, dict[int, list[Noted]]] = {}
        for noted in (*self._noted, *others):
            calls.setdefault(noted.norm, {}).setdefault(noted.microbatch, []).append(noted)
        for name, by_microbatch in calls.items():
            columns = [
                sorted(found, key=lambda noted: noted.place)
                for _, found in sorted(by_microbatch.items())
            ]
            for number in range(max(map(len, columns))):
                parts = [column[number].moments for column in columns if number < len(column)]
                _update(self._norms[name], joined(parts))
        self._noted.clear()


def _keeps(norm: nn.Module) -> bool:
    return isinstance(norm, BATCH_NORMS) and norm.running_mean is not None


@torch.no_grad()
def _moments(values: Tensor) -> Moments:
    exact = values.detach()
    exact = exact if exact.dtype is torch.float64 else exact.float()
    places = [place for place in range(exact.dim()) if place != 1]
    variance, mean = torch.var_mean(exact, dim=places, correction=0)
    count = exact.numel() // exact.shape[1]
    return Moments(count, mean, variance * count)


@torch.no_grad()
def _update(norm: Any, moments: Moments) -> None:
    """As torch does it for one batch, with the unbiased variance."""
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:
        factor = 1.0 / float(norm.num_batches_tracked)
    variance = moments.squares / max(1, moments.values - 1)
    for buffer, found in ((norm.running_mean, moments.mean), (norm.running_var, variance)):
        buffer.mul_(1 - factor).add_(found.to(buffer), alpha=factor)
