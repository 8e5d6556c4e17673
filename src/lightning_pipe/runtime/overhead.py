"""Times what the engine itself takes for an action, on this device: a stage that computes next to
nothing is run by one rank."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor

from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.spec import ValueSpec

_MICROBATCHES, _CHUNKS = 8, 2
_WARM_UP = 2


class _Little:
    """A stage of a single number."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self._stage = stage
        self._weight = torch.ones((), device=device, requires_grad=True)
        self._spec = ValueSpec("a number", (), torch.float32, requires_grad=True)

    def inputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return (self._spec,) if self._stage else ()

    def outputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return () if self._stage == _CHUNKS - 1 else (self._spec,)

    def weights(self) -> tuple[Tensor, ...]:
        return (self._weight,)

    def recomputes(self, microbatch: int) -> bool:
        return False

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (sum(received, self._weight),)


def action_overhead_s(device: torch.device, *, repeats: int = 7) -> float:
    """Seconds of an action, F or B, that are the engine's.

    Args:
        device: Where the marks of actions are set.
        repeats: Timed steps, of which the median counts.
    """
    schedule = make_schedule(
        "interleaved_1f1b", num_ranks=1, num_microbatches=_MICROBATCHES, virtual_stages=_CHUNKS
    )
    engine = Engine(Ranks(1, 0, 0, 1, (0,)), device)
    stages = {stage: _Little(stage, device) for stage in range(_CHUNKS)}
    seconds = []
    for _ in range(_WARM_UP + repeats):
        spans = engine.run(schedule, stages, training=True)
        seconds.append((spans[-1].end_s - spans[0].start_s) / len(spans))
    return statistics.median(seconds[_WARM_UP:])
