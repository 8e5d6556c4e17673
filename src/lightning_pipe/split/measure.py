"""Times every unit of a step on a device, one unit at a time.

A model that is larger than the device is measured too: only the weights of the unit that runs are
there, and weights that are fakes are stood in for by random numbers. The values that pass through
the units are real ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.planning.costs import CostTable, LinkCosts, UnitCosts
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.nest import mapped
from lightning_pipe.split.overhead import now_s, stage_overhead_s
from lightning_pipe.split.patching import (
    attributes,
    find_metrics,
    routed,
    silent_metrics,
    silent_talk,
)
from lightning_pipe.split.rng import preserved
from lightning_pipe.split.snapshot import Snapshot
from lightning_pipe.split.tree import flatten, tensors, unflatten

_WARM_UP = 2

Grads = Sequence[Tensor | None]
Backward = Callable[[Sequence[Tensor], Grads], None]
Halves = Callable[[Sequence[Tensor], Grads, Sequence[Tensor]], tuple[Grads, Callable[[], None]]]


def measure_units(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    num_stages: int,
    device: torch.device,
    rows: int,
    backward: Backward,
    halves: Halves,
    repeats: int = 5,
) -> CostTable:
    """Runs the step unit by unit and times F, I and W of each.

    Args:
        root: The module; its weights may be fakes.
        step: The step as a function of one micro-batch.
        batch: One micro-batch.
        num_stages: Stages that the units must be fine enough for.
        device: Where to run.
        rows: Rows of the micro-batch.
        backward: Accumulates the gradients of all leaves of a graph, given roots and their
            gradients.
        halves: Computes those of the inputs only; what it returns accumulates those of the weights.
        repeats: Timed runs of each unit, of which the median counts; two come before them.

    Returns:
        The costs by unit call, with the glue's time added to the calls that it leads to, and what a
        stage's forward takes beside its units; without a link. Nothing of the module is changed.
    """
    trace = trace_step(root, step, batch, num_stages=num_stages)
    units = {name: root.get_submodule(name) for name in trace.unit_names}
    batch = mapped(batch, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)
    snapshot = Snapshot(root)
    stopwatch = _Stopwatch(device, repeats, backward, halves)
    try:
        with preserved(device.type), torch.enable_grad(), ExitStack() as stack:
            stack.enter_context(_on_device(root, device, trace.glue_parameters))
            for timed in (False, True):  # what the glue does first is slow
                stopwatch.begin(timed)
                with _watched(root, units, stopwatch):
                    result = step(mapped(batch, _copied))
                    stopwatch.end(result)
            beside_s = stage_overhead_s(
                root,
                trace,
                lambda: step(mapped(batch, _copied)),
                device,
                lambda unit: _on_device(unit, device, _names(unit)),
            )
    finally:
        snapshot.restore()
    return CostTable(
        tuple(stopwatch.costs), LinkCosts(), str(device), rows, forward_overhead_s=beside_s
    )


@contextmanager
def _watched(root: nn.Module, units: dict[str, nn.Module], stopwatch: _Stopwatch) -> Iterator[None]:
    routes = [(module, stopwatch.wrapper(name, module)) for name, module in units.items()]
    with ExitStack() as stack:
        stack.enter_context(attributes(silent_metrics(find_metrics(root), lambda given: None)))
        stack.enter_context(attributes(silent_talk(root, lambda given: None)))
        stack.enter_context(attributes(list(routed(routes))))
        yield


@dataclass
class _Stopwatch:
    """Times the calls of units, and the glue between them."""

    device: torch.device
    repeats: int
    backward: Backward
    halves: Halves

    def __post_init__(self) -> None:
        self.costs: list[UnitCosts] = []
        self._timed = False
        self._busy = False
        self._since_s = 0.0

    def begin(self, timed: bool) -> None:
        """A run of the step begins."""
        self.costs = []
        self._timed = timed
        self._since_s = self._now_s()

    def end(self, result: Any) -> None:
        """The step has returned: the tail, and its backward, are the last unit's."""
        tail_s = self._now_s() - self._since_s
        losses = [t for t in tensors(result) if t.requires_grad and t.numel() == 1]
        before_s = self._now_s()
        if losses:
            losses[0].backward()
        backward_s = self._now_s() - before_s
        if self.costs:
            last = self.costs[-1]
            self.costs[-1] = replace(
                last, forward_s=last.forward_s + tail_s, input_s=last.input_s + backward_s
            )

    def wrapper(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """Stands in for a unit's call."""

        def wrap(original: Callable[..., Any], entry: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if self._busy:
                    return original(*args, **kwargs)
                glue_s = self._now_s() - self._since_s
                self._busy = True
                try:
                    out = self._call(name, module, original, (args, kwargs), glue_s)
                finally:
                    self._busy = False
                self._since_s = self._now_s()
                return out

            return call

        return wrap

    def _call(
        self, name: str, module: nn.Module, original: Any, arguments: Any, glue_s: float
    ) -> Any:
        leaves, structure = flatten(arguments)
        inputs = [_leaf(value) for value in leaves]
        with _on_device(module, self.device, _names(module)):
            parameters = [p for p in module.parameters() if p.requires_grad]
            times: list[tuple[float, float, float]] = []
            for _ in range(_WARM_UP + self.repeats if self._timed else 1):
                args, kwargs = unflatten([_copied(value) for value in inputs], structure)
                start_s = self._now_s()
                out = original(*args, **kwargs)
                forward_s = self._now_s() - start_s
                if self._timed:
                    times.append((forward_s, *self._backward(out, inputs)))
            for parameter in parameters:  # between runs they stay: a run adds to what is there
                parameter.grad = None
        if self._timed:
            forward_s, input_s, weight_s = (
                statistics.median(column) for column in zip(*times[_WARM_UP:], strict=True)
            )
            self.costs.append(UnitCosts(name, forward_s + glue_s, input_s, weight_s))
        else:
            self.costs.append(UnitCosts(name, 0.0, 0.0, 0.0))
        return mapped(out, lambda leaf: _leaf(leaf) if isinstance(leaf, Tensor) else leaf)

    def _backward(self, out: Any, inputs: list[Any]) -> tuple[float, float]:
        """Seconds of the gradients of the inputs, and of those of the weights."""
        roots = [t for t in tensors(out) if t.requires_grad]
        wanted = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
        if not roots:
            return 0.0, 0.0
        grads = [torch.ones_like(root) for root in roots]
        start_s = self._now_s()
        if not wanted:
            self.backward(roots, grads)
            return 0.0, self._now_s() - start_s
        _, weights = self.halves(roots, grads, wanted)
        middle_s = self._now_s()
        weights()
        return middle_s - start_s, self._now_s() - middle_s

    def _now_s(self) -> float:
        return now_s(self.device)


def _names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, _ in module.named_parameters())


def _leaf(value: Any) -> Any:
    """A value without its history, of which gradients are wanted where they were."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad and value.is_floating_point())


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _on_device(module: nn.Module, device: torch.device, names: frozenset[str]) -> Iterator[None]:
    """Lets some parameters, and all buffers, of a module be on a device for a while."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    made: dict[int, nn.Parameter] = {}
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            full = f"{prefix}.{name}" if prefix else name
            if parameter is None or (full not in names and id(parameter) not in made):
                continue
            if parameter.device == device and not is_fake(parameter):
                continue
            if id(parameter) not in made:
                stand_in = _stand_in(parameter, device)
                made[id(parameter)] = nn.Parameter(stand_in, parameter.requires_grad)
            saved.append((child._parameters, name, parameter))
            child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None and (buffer.device != device or is_fake(buffer)):
                saved.append((child._buffers, name, buffer))
                child._buffers[name] = _stand_in(buffer, device)
    try:
        yield
    finally:
        for space, name, value in saved:
            space[name] = value


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device; random numbers, small ones, where it has no data."""
    if not is_fake(tensor):
        return tensor.detach().to(device)
    made = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device=device)
    return made.normal_(0.0, 0.02) if made.is_floating_point() else made
