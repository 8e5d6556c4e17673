"""Times what a stage does beside its units: glue that runs again, stand-ins for calls of others.

A stage in the middle of the step that owns one call is run on made-up values. What its forward
takes longer than the unit itself is what every stage pays for each micro-batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.spec import ValueSpec
from lightning_pipe.split.trace import Trace

_WARM_UP = 3
_TRIES = 4  # calls that are asked, where a cut beside one is not possible


def stage_overhead_s(
    root: nn.Module,
    trace: Trace,
    step: Callable[[], Any],
    device: torch.device,
    on_device: Callable[[nn.Module], Any],
    *,
    repeats: int = 7,
) -> float:
    """Seconds that the forward of a stage takes beside its units.

    Args:
        root: The module that was traced.
        trace: Its step.
        step: The step on the micro-batch of the trace, which is on the device.
        device: Where it runs.
        on_device: Makes a context in which the weights of a unit are there.
        repeats: Timed runs, of which the median counts.

    Returns:
        Seconds; 0 where no call has a stage of its own, or none of them can run on made-up values.
    """
    calls = len(trace.calls)
    middle = calls // 2
    for call in sorted(range(1, calls - 1), key=lambda c: abs(c - middle))[:_TRIES]:
        try:
            cut = StepCut(trace, place(trace, (0, call, call + 1)))
            unit = root.get_submodule(trace.calls[call].unit)
            with on_device(unit):
                return _measure(cut, root, unit, step, device, repeats)
        except Exception:
            continue  # a cut that cannot be, or a step that needs true values
    return 0.0


def _measure(
    cut: StepCut,
    root: nn.Module,
    unit: nn.Module,
    step: Callable[[], Any],
    device: torch.device,
    repeats: int,
) -> float:
    program = StageProgram(cut, 1, root, device_type=device.type)
    received = tuple(_made_up(spec, device) for spec in program.inputs)
    beside = []
    with _clocked(unit, device) as inside:
        for _ in range(_WARM_UP + repeats):
            inside.clear()
            start_s = now_s(device)
            program.run(step, received, key=0)
            beside.append(now_s(device) - start_s - sum(inside))
    return max(0.0, statistics.median(beside[_WARM_UP:]))


def _made_up(spec: ValueSpec, device: torch.device) -> Tensor:
    value = torch.zeros(spec.shape, dtype=spec.dtype, device=device)
    if value.is_floating_point():
        value.normal_()
    return value.requires_grad_(spec.requires_grad)


@contextmanager
def _clocked(unit: nn.Module, device: torch.device) -> Iterator[list[float]]:
    """Collects the seconds of the calls of a unit."""
    seconds: list[float] = []
    starts: list[float] = []

    def end(*_: Any) -> None:
        seconds.append(now_s(device) - starts.pop())

    handles = [
        unit.register_forward_pre_hook(lambda *_: starts.append(now_s(device))),
        unit.register_forward_hook(end),
    ]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()


def now_s(device: torch.device) -> float:
    """The time when all that the device was given is done."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
    return time.perf_counter()
