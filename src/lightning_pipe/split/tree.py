"""Flatten any nest of tensors, plain dataclasses and ``UserDict``s included.

torch's pytree knows tuples, dicts, named tuples and the ``ModelOutput`` classes that register
themselves. Plain dataclasses and ``UserDict``s (``BatchEncoding`` is one) are leaves to it, so a
step that returns one would hide its tensors.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class _Record(NamedTuple):
    """How to rebuild one record: its class, the fields that were flattened and their structure."""

    cls: type
    fields: tuple[str, ...]
    inner: TreeSpec
    num_leaves: int
    rest: tuple[tuple[str, Any], ...]


class TreeSpec(NamedTuple):
    """The structure that :func:`flatten` took apart; :func:`unflatten` puts it together again."""

    outer: Any
    records: tuple[_Record | None, ...]

    @property
    def num_leaves(self) -> int:
        """Leaves that this structure takes."""
        return sum(1 if record is None else record.num_leaves for record in self.records)


def _is_record(value: Any) -> bool:
    if isinstance(value, UserDict):
        return True
    return (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not isinstance(value, (dict, Tensor))
    )


def _record_fields(value: Any) -> tuple[str, ...]:
    if isinstance(value, UserDict):
        return ("data",)
    return tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))


_ONE_LEAF = TreeSpec(pytree.tree_flatten(0)[1], (None,))


def flatten(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of ``value`` in a fixed order and the structure to rebuild it."""
    if isinstance(value, Tensor):  # by far the most frequent output of a unit
        return [value], _ONE_LEAF
    outer_leaves, outer = pytree.tree_flatten(value)
    leaves: list[Any] = []
    records: list[_Record | None] = []
    for leaf in outer_leaves:
        if not _is_record(leaf):
            leaves.append(leaf)
            records.append(None)
            continue
        fields = _record_fields(leaf)
        inner_leaves, inner = flatten([getattr(leaf, name) for name in fields])
        rest = tuple((k, v) for k, v in getattr(leaf, "__dict__", {}).items() if k not in fields)
        leaves.extend(inner_leaves)
        records.append(_Record(type(leaf), fields, inner, len(inner_leaves), rest))
    return leaves, TreeSpec(outer, tuple(records))


def unflatten(leaves: Iterable[Any], spec: TreeSpec) -> Any:
    """Rebuild what :func:`flatten` took apart, with new ``leaves``."""
    if spec is _ONE_LEAF:
        return next(iter(leaves))
    stream = iter(leaves)
    outer_leaves: list[Any] = []
    for record in spec.records:
        if record is None:
            outer_leaves.append(next(stream))
            continue
        values = unflatten([next(stream) for _ in range(record.num_leaves)], record.inner)
        rebuilt: Any = object.__new__(record.cls)
        for name, item in (*zip(record.fields, values, strict=True), *record.rest):
            object.__setattr__(rebuilt, name, item)
        outer_leaves.append(rebuilt)
    return pytree.tree_unflatten(outer_leaves, spec.outer)


def tensors(value: Any) -> list[Tensor]:
    """Return every tensor in ``value``."""
    found: list[Tensor] = []
    _collect(value, found)
    return found


_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device, torch.layout)


def _collect(value: Any, found: list[Tensor]) -> None:
    kind = type(value)
    if isinstance(value, Tensor):
        found.append(value)
    elif kind is tuple or kind is list:
        for item in value:
            _collect(item, found)
    elif kind is dict:
        for item in value.values():
            _collect(item, found)
    elif kind not in _PLAIN:
        found += [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply ``function`` to every tensor in ``value`` and keep everything else."""
    leaves, spec = flatten(value)
    return unflatten([function(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
