"""What changed in a value: found against how it was, and made again on any rank.

A change says where something happened inside of containers and objects, so that it can be made in
another rank's own containers and objects, whatever else they hold.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.split.frozen import (
    Frozen,
    Name,
    drop_field,
    fields_of,
    is_open,
    same_plain,
    set_field,
    version_of,
)

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Put:
    """A value was set."""

    value: Any


@dataclass(frozen=True, slots=True)
class Grown:
    """A list or deque grew at its end."""

    items: tuple[Any, ...]
    inner: Mapping[int, Change] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Members:
    """A set gained and lost members."""

    added: frozenset[Any]
    removed: frozenset[Any]


@dataclass(frozen=True, slots=True)
class Items:
    """Entries of a dict, or containers in a list, changed."""

    changes: Mapping[Any, Change]
    removed: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of an object changed, and what it holds if it is a container too."""

    changes: Mapping[str, Change]
    removed: tuple[str, ...] = ()
    content: Change | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """An attribute was deleted."""


Change = Put | Grown | Members | Items | Fields | Gone


def change_of(frozen: Frozen | Name, now: Any) -> Change | None:
    """Says how `now` differs from the value as it was; None if it does not."""
    if now is not frozen.value:
        return None if same_plain(now, frozen.value) else Put(detached(now))
    if isinstance(frozen, Name):
        return None
    if isinstance(now, Tensor):
        return _tensor_change(frozen, now)
    if isinstance(now, (np.ndarray, bytearray)):
        return Put(now.copy()) if frozen.data_differs() else None
    content: Change | None = None
    if isinstance(now, dict):
        content = _dict_change(frozen, now)
    elif isinstance(now, (list, deque, tuple)):
        content = _list_change(frozen, now)
    elif isinstance(now, set):
        added, removed = now - frozen.content, frozen.content - now
        content = Members(frozenset(added), frozenset(removed)) if added or removed else None
    if not is_open(now):
        return content
    fields = fields_of(now)
    changes = _entries(fields, frozen.fields, frozen.inner)
    gone = tuple(name for name in frozen.fields if name not in fields)
    return Fields(changes, gone, content) if changes or gone or content else None


def _tensor_change(frozen: Frozen, now: Tensor) -> Change | None:
    written = version_of(now) != frozen.version
    if written and frozen.content is None:
        raise CutError(
            f"a tensor of shape {tuple(now.shape)} in an attribute or buffer was written in this "
            "step and not in the first one, and it is too large to be remembered before each step; "
            "write it in every step (times one, where there is nothing new), or in a hook"
        )
    return Put(now.detach().clone()) if frozen.was_written() else None


def _entries(
    now: Mapping[Any, Any], before: Mapping[Any, Any], children: Mapping[Any, Frozen | Name]
) -> dict[Any, Change]:
    changes: dict[Any, Change] = {}
    for key, item in now.items():
        old = before.get(key, _MISSING)
        if item is old:
            change = change_of(children[key], item) if key in children else None
            if change is not None:
                changes[key] = change
        elif not same_plain(item, old):
            changes[key] = Put(detached(item))
    return changes


def _dict_change(frozen: Frozen, now: dict[Any, Any]) -> Change | None:
    changes = _entries(now, frozen.content, frozen.children)
    removed = tuple(key for key in frozen.content if key not in now)
    return Items(changes, removed) if changes or removed else None


def _list_change(frozen: Frozen, now: Any) -> Change | None:
    before = frozen.content
    if before is None:
        kept = frozen.version if len(now) >= frozen.version else -1
    else:
        kept = _kept(now, before, full=len(now) == getattr(now, "maxlen", None))
    if kept < 0:
        return Put(detached(type(now)(now)))
    inner = {
        key: change
        for key, child in frozen.children.items()
        if key < len(now) and now[key] is child.value and (change := change_of(child, now[key]))
    }
    if len(now) > kept:
        return Grown(tuple(detached(item) for item in list(now)[kept:]), inner)
    return Items(inner) if inner else None


def _kept(now: Any, before: Sequence[Any], *, full: bool) -> int:
    """How many of the first items were there before; -1 if the list did not just grow.

    A full deque drops items at its beginning.
    """
    if full:
        fits = range(min(len(before), len(now)), -1, -1)
        return next(k for k in fits if _same_items(now, before[len(before) - k :]))
    grew = len(now) >= len(before) and _same_items(now, before)
    return len(before) if grew else -1


def _same_items(now: Any, before: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(now, before, strict=False))


# ---------------------------------------------------------------------- making changes


def apply_change(value: Any, change: Change) -> Any:
    """Makes one change to a value, in place where that is possible, and returns it."""
    if isinstance(change, Put):
        return _put(value, change.value)
    if isinstance(change, Grown):
        _apply_items(value, Items(change.inner))
        value.extend(change.items)
    elif isinstance(change, Members):
        value |= change.added
        value -= change.removed
    elif isinstance(change, Items):
        _apply_items(value, change)
    elif isinstance(change, Fields):
        _apply_fields(value, change)
    return value


def _put(before: Any, value: Any) -> Any:
    if isinstance(before, Tensor) and isinstance(value, Tensor):
        same = before.shape == value.shape and before.dtype == value.dtype
        if same and not before.requires_grad and not before.is_inference():
            with torch.no_grad():
                return before.copy_(value)
        return value.to(before.device)
    is_array = isinstance(before, np.ndarray) and isinstance(value, np.ndarray)
    if is_array and before.shape == value.shape and before.dtype == value.dtype:
        before[...] = value
        return before
    return value


def _apply_items(value: Any, change: Items) -> None:
    for key in change.removed:
        dict.pop(value, key, None)
    for key, inner in change.changes.items():
        before = value[key] if not isinstance(value, dict) or key in value else None
        after = apply_change(before, inner)
        if not isinstance(value, tuple) and after is not before:
            value[key] = after


def _apply_fields(value: Any, change: Fields) -> None:
    fields = fields_of(value)
    for name in change.removed:
        drop_field(value, name)
    for name, inner in change.changes.items():
        set_field(value, name, apply_change(fields.get(name), inner))
    if change.content is not None:
        apply_change(value, change.content)


def detached(value: Any) -> Any:
    """A value as it goes to other ranks: without a graph."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (list, tuple):
        return type(value)(detached(item) for item in value)
    if type(value) is deque:
        return deque((detached(item) for item in value), value.maxlen)
    if type(value) is dict:
        return {key: detached(item) for key, item in value.items()}
    if is_open(value):
        return rebuilt(value, {k: detached(field) for k, field in fields_of(value).items()})
    return value


def rebuilt(value: Any, fields: Mapping[str, Any]) -> Any:
    """An object like another with other fields."""
    is_container = isinstance(value, (dict, list, set, deque))
    made = copy.copy(value) if is_container else object.__new__(type(value))
    for name, content in fields.items():
        set_field(made, name, content)
    return made
