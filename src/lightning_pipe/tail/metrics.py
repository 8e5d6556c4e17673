"""torchmetrics objects in a step: updated once per step, as one device would, and equal on every
rank.

While a micro-batch runs, the calls of `update` and `forward` are noted and their effect is undone.
After the step the last stage makes each call once, with the arguments of all micro-batches put
together. The states then go to the other ranks, whose metrics never saw a sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from lightning_pipe.split.microbatch import merge_values
from lightning_pipe.split.patching import ENTRIES, attributes, find_metrics
from lightning_pipe.split.tree import map_tensors

_CALLS = ("update", "forward")
_PLAIN = (bool, int, float, str, type(None), Tensor)
_CONTAINERS = (set, dict, list, tuple, deque, np.ndarray)


Sync = Callable[[Tensor, Any], list[Tensor]]
"""Gives a state of all copies of the pipeline; as torchmetrics calls its `dist_sync_fn`."""


@dataclass(frozen=True, slots=True)
class MetricState:
    """What a metric holds: list states as what was added to those that all ranks have."""

    states: Mapping[str, Any]
    lists: Mapping[str, tuple[int, list[Any]]]
    plain: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Call:
    metric: int
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class MetricTape:
    """All metrics of a module, and what a step does to them.

    Args:
        root: The user's module. Metrics in plain lists and dicts of it are found too.
        sync: How states are gathered from copies of the pipeline; None if there are none.
    """

    def __init__(self, root: nn.Module, sync: Sync | None = None) -> None:
        self._root = root
        self._sync = sync
        self.metrics: list[nn.Module] = []
        self._saved: dict[int, dict[str, Any]] = {}
        self.calls: list[list[_Call]] = []
        self._synced: list[tuple[Metric, dict[str, Any]]] = []
        self._inside = False
        self.find()

    def find(self) -> None:
        """Looks for metrics again; those that were known keep their numbers."""
        known = {id(metric) for metric in self.metrics}
        for metric in find_metrics(self._root):
            if id(metric) not in known:
                known.add(id(metric))
                self.metrics.append(metric)
        for metric in self.metrics:
            if isinstance(metric, Metric):
                self._replace_sync(metric)

    def release(self) -> None:
        """Lets metrics synchronise again as they did before."""
        for metric, before in self._synced:
            vars(metric).update(before)
        self._synced = []

    def _replace_sync(self, metric: Metric) -> None:
        """Its peers are copies of the pipeline; the other ranks hold the same state."""
        if self._sync is None:
            now: dict[str, Any] = {"sync_on_compute": False, "_to_sync": False}
            if not metric.sync_on_compute:
                return
        else:
            now = {"dist_sync_fn": self._sync, "distributed_available_fn": _available}
            if metric.dist_sync_fn is not None:
                return
        self._synced.append((metric, {name: vars(metric)[name] for name in now}))
        vars(metric).update(now)

    def index_of(self, metric: Any) -> int:
        """The number of a metric, equal on all ranks."""
        if not any(known is metric for known in self.metrics):
            self.find()
        return next(i for i, known in enumerate(self.metrics) if known is metric)

    def start(self) -> None:
        """Begins a step; a hook may have made metrics since the last one."""
        self.find()
        self._saved = {}
        self.calls = []

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Notes the calls of one micro-batch and undoes what they did."""
        calls: list[_Call] = []
        patches = [
            (metric, method, self._noting(calls, index, method))
            for index, metric in enumerate(self.metrics)
            for method in _CALLS
        ]
        try:
            with attributes(patches):
                yield
        finally:
            for index, saved in self._saved.items():
                _restore(self.metrics[index], saved)
        self.calls.append(calls)

    def finish(self, rows: Sequence[int]) -> dict[int, MetricState]:
        """Makes the calls of the whole batch; returns the states of the metrics that were
        touched."""
        with torch.no_grad():
            for call in self.merged_calls(rows):
                getattr(self.metrics[call.metric], call.method)(*call.args, **call.kwargs)
        touched = set(self._saved)
        for index in self._saved:
            metric = self.metrics[index]
            if isinstance(
                metric, MetricCollection
            ):  # members of a compute group share their states
                list(metric.items(keep_base=True, copy_state=False))
        states = {i: self._state(i) for i in sorted(touched) if isinstance(self.metrics[i], Metric)}
        self._saved = {}
        return states

    def apply(self, states: Mapping[int, MetricState]) -> None:
        """Takes over the states of the last stage, on another rank."""
        for index, state in states.items():
            metric = self.metrics[index]
            for name, value in state.states.items():
                setattr(metric, name, value)
            for name, (size, items) in state.lists.items():
                setattr(metric, name, [*getattr(metric, name)[:size], *items])
            vars(metric).update(state.plain)

    def merged_calls(self, rows: Sequence[int]) -> list[_Call]:
        """The calls that the whole batch would have made."""
        shapes = [[(call.metric, call.method) for call in calls] for calls in self.calls]
        if any(shape != shapes[0] for shape in shapes):
            return [call for calls in self.calls for call in calls]
        merged = []
        for column in zip(*self.calls, strict=True):
            args = tuple(
                merge_values(values, rows)
                for values in zip(*(call.args for call in column), strict=True)
            )
            kwargs = {
                name: merge_values([call.kwargs[name] for call in column], rows)
                for name in column[0].kwargs
            }
            merged.append(_Call(column[0].metric, column[0].method, args, kwargs))
        return merged

    def _noting(self, calls: list[_Call], index: int, method: str) -> Callable[..., Any]:
        metric = self.metrics[index]
        original = getattr(metric, method)

        def noted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._save(index)
            arguments = map_tensors(torch.Tensor.detach, (args, kwargs))
            calls.append(_Call(index, method, *arguments))
            self._inside = True
            try:
                return original(*args, **kwargs)
            finally:
                self._inside = False

        return noted

    def _save(self, index: int) -> None:
        """Remembers a metric and all inside it as they were before the step."""
        for child in self.metrics[index].modules():
            number = next((i for i, known in enumerate(self.metrics) if known is child), None)
            if number is not None and number not in self._saved:
                self._saved[number] = _copy_state(child)

    def _state(self, index: int) -> MetricState:
        metric = self.metrics[index]
        assert isinstance(metric, Metric)
        saved = self._saved[index]
        states: dict[str, Any] = {}
        lists: dict[str, tuple[int, list[Any]]] = {}
        for name in metric._defaults:
            value = getattr(metric, name)
            if not isinstance(value, list):
                states[name] = value
                continue
            before = saved[name] if isinstance(saved.get(name), list) else []
            size = len(before)
            if len(value) < size or any(
                a is not b for a, b in zip(value[:size], before, strict=True)
            ):
                size = 0
            lists[name] = (size, value[size:])
        plain = {
            name: value
            for name, value in vars(metric).items()
            if name not in metric._defaults and name not in _own_space() and _is_sent(value)
        }
        return MetricState(states, lists, plain)


#: what a step replaces for its length: put back from a copy, each step would wrap that of the last
_PATCHED = (*ENTRIES, "update", "compute")


def _copy_state(metric: nn.Module) -> dict[str, Any]:
    """The attributes of a metric, its states copied: updates may write in place."""
    states = getattr(metric, "_defaults", {})
    return {
        name: (
            value.clone()
            if name in states and isinstance(value, Tensor)
            else value.copy()
            if type(value) in (list, dict, set, deque) and name not in _CALLS
            else value
        )
        for name, value in vars(metric).items()
        if name not in ("_modules", "_parameters", "_buffers", *_PATCHED)
    }


def _restore(metric: nn.Module, saved: Mapping[str, Any]) -> None:
    states = getattr(metric, "_defaults", {})
    space = vars(metric)
    for name, value in saved.items():
        if isinstance(value, (Tensor, list)) and name in states:
            value = value.clone() if isinstance(value, Tensor) else list(value)
        space[name] = value


@cache
def _own_space() -> frozenset[str]:
    """Containers that torch and torchmetrics keep in every metric."""
    bare = vars(MeanMetric())
    return frozenset(n for n, v in bare.items() if not isinstance(v, _PLAIN)) | {"_cache"}


def _available() -> bool:
    return True


def _is_sent(value: Any) -> bool:
    """Whether an attribute of a metric is data that its updates may have changed."""
    if isinstance(value, (*_PLAIN, np.ndarray)):
        return True
    if isinstance(value, dict):
        return all(map(_is_sent, value)) and all(map(_is_sent, value.values()))
    return isinstance(value, _CONTAINERS) and all(map(_is_sent, value))
