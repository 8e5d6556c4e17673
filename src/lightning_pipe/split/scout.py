"""Find out which way a micro-batch takes through a step of random depth, without tracing it.

The step runs with its keyed numbers, all units being ghosts that do what they did before
(:mod:`lightning_pipe.split.memo`). What it calls on what, units and torch functions, is its *way*:
two micro-batches of one way share a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_pipe.split._fake import (
    GHOSTS,
    DispatchMode,
    TorchFunctionMode,
    function_mode_off,
    inside_step,
    without_modes,
)
from lightning_pipe.split.memo import UnitMemo, arguments_key, rebuild
from lightning_pipe.split.nest import copy_tensors
from lightning_pipe.split.nested import opened_encoders
from lightning_pipe.split.patching import (
    Wrapper,
    attributes,
    find_metrics,
    outermost,
    routed,
    run_forward_hooks,
    silent_metrics,
    silent_talk,
)
from lightning_pipe.split.provenance import function_name
from lightning_pipe.split.recompute import Regions
from lightning_pipe.split.rng import Generator, KeyedRandom, is_draw, preserved
from lightning_pipe.split.snapshot import AttributeKeeper, Snapshot
from lightning_pipe.split.streams import (
    Streams,
    callable_modules,
    draw_in_vain,
    draws_by_values,
    has_fakes,
)
from lightning_pipe.split.trace import Trace
from lightning_pipe.split.tree import flatten, tensors, unflatten
from lightning_pipe.split.typed import address_of, asking_files


class _Lost(BaseException):
    """A unit does something that nobody has seen: only a trace can tell."""


def find_way(
    root: nn.Module,
    like: Trace,
    memo: UnitMemo,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    key: int,
    device_type: str,
    generators: tuple[Generator, ...],
) -> Hashable | None:
    """Return what tells the way of a micro-batch from others; None if only a trace can.

    Nothing that the step changes is left behind. Gradient mode is that of the caller.

    Args:
        root: The user's module.
        like: A trace of the same step.
        memo: What units do.
        step: The step as a function of one micro-batch.
        batch: One micro-batch.
        key: Its random key.
        device_type: Device whose random generator is keyed beside the CPU's.
        generators: Others that the step may draw from.
    """
    units = {name: root.get_submodule(name) for name in like.units}
    snapshot = Snapshot(root, units)
    keeper = AttributeKeeper(root, like.changed_attributes | like.ghost_attributes)
    random = KeyedRandom(key, device_type, generators)
    streams = Streams(callable_modules(root), random, like.drawing)
    try:
        with preserved(device_type, generators), inside_step():
            return _Scout(root, units, memo, streams).go(step, copy_tensors(batch))
    except (_Lost, Exception):  # the trace says it better
        return None
    finally:
        snapshot.restore()
        keeper.restore()
        GHOSTS.tainted.clear()


class _Draws(DispatchMode):
    """Counts the operators that draw."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        self.count += is_draw(func, args, kwargs)
        return func(*args, **kwargs)


class _Scout(TorchFunctionMode):
    """Runs a step on ghosts and writes down what is called on what."""

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        memo: UnitMemo,
        streams: Streams,
    ) -> None:
        super().__init__()
        self._root = root
        self._units = units
        self._memo = memo
        self._draws = _Draws()
        self._streams = streams
        self._way: list[Hashable] = []
        self._number: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._calls = 0
        self._place = (0, 0)
        self._busy = False

    def go(self, step: Callable[[Any], Any], batch: Any) -> Hashable:
        """Run the step; may be called once."""
        units = [(module, self._wrapper(name, module)) for name, module in self._units.items()]
        regions = Regions(lambda: self._busy, draws=lambda: self._draws.count)
        with ExitStack() as stack:
            metrics = find_metrics(self._root)
            stack.enter_context(attributes(silent_metrics(metrics, self._note)))
            stack.enter_context(attributes(silent_talk(self._root, self._note)))
            stack.enter_context(attributes(asking_files(self._root, self._units.values())))
            stack.enter_context(attributes(list(opened_encoders(self._root, self._units.values()))))
            stack.enter_context(attributes(self._streams.replacements()))
            stack.enter_context(attributes(list(routed(units))))
            stack.enter_context(regions.watched())
            stack.enter_context(self._draws)
            stack.enter_context(self)
            self._streams.begin()
            result = step(batch)
            self._busy = True
            self._note(result)
        return tuple(self._way)

    def _note(self, value: Any) -> None:
        self._way.append(self._numbers(tensors(value)))

    def _numbers(self, found: list[Tensor]) -> tuple[int, ...]:
        """Say which tensors these are, by when they were first seen."""
        for tensor in found:
            if id(tensor) not in self._number:
                self._number[id(tensor)] = len(self._number)
                self._kept.append(tensor)
        return tuple(self._number[id(tensor)] for tensor in found)

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if self._busy:
            return func(*args, **kwargs)
        address = address_of(func, args)
        if address is not None:
            return address
        segment, count = self._place
        before = self._draws.count
        out = func(*args, **kwargs)
        if self._draws.count != before:
            vain = not has_fakes(args, kwargs) or draw_in_vain(func, args, kwargs)
            if not vain or draws_by_values(function_name(func)):
                self._streams.anew()
        made = tensors(out)
        if made:
            self._place = segment, count + 1
            given = self._numbers(tensors((args, kwargs)))
            looks = tuple((tuple(t.shape), t.dtype) for t in made)
            self._way.append((function_name(func), given, looks))
            self._numbers(made)
        return out

    def _wrapper(self, name: str, module: nn.Module) -> Wrapper:
        return outermost(lambda: self._busy, partial(self._call, name, module))

    def _call(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        entry: str,
        args: Any,
        kwargs: Any,
    ) -> Any:
        self._busy = True
        try:
            with function_mode_off(self), without_modes():
                arguments, structure = flatten((args, kwargs))
                described = arguments_key(arguments)
                known = self._memo.get(self._memo.key(name, module, described), structure)
                if known is None:
                    raise _Lost
                self._streams.pass_over(name, known.entered)
                given = self._numbers([a for a in arguments if isinstance(a, Tensor)])
                self._way.append((name, described, given))
                values = rebuild(known, arguments)
                self._numbers([v for v in values if isinstance(v, Tensor)])
                out = unflatten(values, known.made)
            if entry == "_call_impl" and module._forward_hooks:
                run_forward_hooks(module, args, kwargs, out, known.hooks_done)
        finally:
            self._busy = False
        self._calls += 1
        self._place = (self._calls, 0)
        return out
