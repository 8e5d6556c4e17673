"""Plain attributes that a step changes: taken from each micro-batch, merged, and set on every rank.

Every micro-batch starts from the attributes as they were before the step, as if all ran side by
side. What each one left is a `Change`; the changes of all micro-batches are merged into the one
that the whole batch would have made: a list grows by one loss, not by M of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._lightning import MODULE_SPACE
from lightning_pipe.split.microbatch import merge_numbers, merge_values, weighted_mean
from lightning_pipe.tail.kinds import Kind, Kinds

_PATCHES = frozenset({"log", "forward", "_call_impl", "update", "compute"})
_LISTS = (list, deque)
_COPY_ITEMS = 1024  # longer lists are taken to grow at their end only
_COPY_ELEMENTS = 1 << 22  # larger tensors are left to be written micro-batch after micro-batch
_DEPTH = 4


@dataclass(frozen=True, slots=True)
class Put:
    """A value was set."""

    value: Any


@dataclass(frozen=True, slots=True)
class Grown:
    """A list or deque grew at its end."""

    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """Entries of a dict, or containers in a list, changed."""

    changes: Mapping[Any, Change]


Change = Put | Grown | Items


class Frozen:
    """A value as it was: containers with their contents, tensors with their data.

    Args:
        value: The value, at any depth of containers up to 4.
    """

    __slots__ = ("children", "content", "size", "value")

    def __init__(self, value: Any, depth: int = _DEPTH) -> None:
        self.value = value
        self.content: Any = None
        self.size = 0
        self.children: dict[Any, Frozen] = {}
        kind = type(value)
        if isinstance(value, dict):
            self.content = dict(value)
            items: Iterable[tuple[Any, Any]] = value.items()
        elif kind in _LISTS:
            self.size = len(value)
            short = self.size <= _COPY_ITEMS
            self.content = list(value) if short else None
            items = enumerate(value) if short else ()
        elif kind is set:
            self.content = set(value)
            return
        elif isinstance(value, Tensor):
            self.size = value._version
            if value.numel() <= _COPY_ELEMENTS:
                self.content = value.detach().clone()
            return
        else:
            return
        if depth:
            self.children = {
                key: Frozen(item, depth - 1)
                for key, item in items
                if isinstance(item, (dict, list, set, deque)) or kind is dict
            }

    def thaw(self) -> Any:
        """Puts the content back into the very object, and returns it."""
        value = self.value
        if isinstance(value, dict):
            if self._dict_differs():
                value.clear()
                value.update(self.content)
        elif type(value) in _LISTS:
            if self.content is None:
                while len(value) > self.size:
                    value.pop()
            elif len(value) != self.size or any(
                a is not b for a, b in zip(value, self.content, strict=True)
            ):
                value.clear()
                value.extend(self.content)
        elif type(value) is set:
            value.clear()
            value.update(self.content)
        elif isinstance(value, Tensor) and self.content is not None and value._version != self.size:
            with torch.no_grad():
                value.copy_(self.content)
            self.size = value._version
        for child in self.children.values():
            child.thaw()
        return value

    def change(self, now: Any) -> Change | None:
        """Says how `now` differs from the value as it was; None if it does not."""
        if now is not self.value:
            if isinstance(now, (bool, int, float, str)) and type(now) is type(self.value):
                return None if now == self.value else Put(now)
            return Put(_detached(now))
        if isinstance(now, dict):
            return self._dict_change(now)
        if type(now) in _LISTS:
            return self._list_change(now)
        if type(now) is set:
            return None if now == self.content else Put(set(now))
        if isinstance(now, Tensor) and now._version != self.size:
            return Put(now.detach().clone())
        return None

    def before(self) -> Any:
        """The value as it was, for comparison."""
        return self.content if isinstance(self.value, Tensor) else self.value

    def _dict_differs(self) -> bool:
        value = self.value
        return len(value) != len(self.content) or any(
            key not in value or value[key] is not item for key, item in self.content.items()
        )

    def _dict_change(self, now: dict[Any, Any]) -> Change | None:
        changes: dict[Any, Change] = {}
        for key, item in now.items():
            if key not in self.content:
                changes[key] = Put(_detached(item))
            elif key in self.children:
                change = self.children[key].change(item)
                if change is not None:
                    changes[key] = change
            elif item is not self.content[key]:
                changes[key] = Put(_detached(item))
        return Items(changes) if changes else None

    def _list_change(self, now: Any) -> Change | None:
        if len(now) < self.size:
            return Put(_detached(type(now)(now)))
        if self.content is not None and any(
            a is not b for a, b in zip(now, self.content, strict=False)
        ):
            return Put(_detached(type(now)(now)))
        if len(now) > self.size:
            return Grown(tuple(_detached(item) for item in list(now)[self.size :]))
        changes = {
            key: change
            for key, child in self.children.items()
            if (change := child.change(now[key])) is not None
        }
        return Items(changes) if changes else None


class Attributes:
    """The plain attributes of a module that its tail may change.

    Args:
        root: The user's module; all its own attributes are watched.
        others: (module name, attribute) of those of its submodules to watch too.
        kinds: How its source adds to its attributes; read from the source if None.
    """

    def __init__(
        self,
        root: nn.Module,
        others: Iterable[tuple[str, str]] = (),
        kinds: Kinds | None = None,
    ) -> None:
        self._root = root
        self._others = sorted(pair for pair in others if pair[0])
        self._kinds = kinds or Kinds(type(root))
        self._frozen: dict[tuple[str, str], Frozen] = {}
        self._changes: list[dict[tuple[str, str], Change]] = []

    def freeze(self) -> None:
        """Notes how everything is before the step."""
        self._changes = []
        self._frozen = {key: Frozen(value) for key, value in self._present()}

    def take(self) -> None:
        """Notes what one micro-batch changed, and undoes it."""
        self._changes.append(self.undo())

    def undo(self) -> dict[tuple[str, str], Change]:
        """Puts everything back as it was before the step; returns what had changed."""
        changes: dict[tuple[str, str], Change] = {}
        for key, value in self._present():
            frozen = self._frozen.get(key)
            change = Put(_detached(value)) if frozen is None else frozen.change(value)
            if change is not None:
                changes[key] = change
                self._space(key[0]).pop(key[1])
        for key in changes:
            if key in self._frozen:
                self._space(key[0])[key[1]] = self._frozen[key].thaw()
        return changes

    def merged(self, rows: Sequence[int]) -> dict[tuple[str, str], Change]:
        """What the whole batch would have changed."""
        keys = dict.fromkeys(key for changes in self._changes for key in changes)
        merged = {}
        for key in keys:
            present = [(c[key], n) for c, n in zip(self._changes, rows, strict=True) if key in c]
            changes, sizes = [c for c, _ in present], [n for _, n in present]
            frozen = self._frozen.get(key)
            merged[key] = merge_changes(changes, sizes, frozen, self._kinds.of(key[1]))
        return merged

    def apply(self, changes: Mapping[tuple[str, str], Change]) -> None:
        """Makes the changes, on any rank."""
        for (module, name), change in changes.items():
            space = self._space(module)
            space[name] = apply_change(space.get(name), change)

    def _space(self, module: str) -> dict[str, Any]:
        return vars(self._root.get_submodule(module))

    def _present(self) -> list[tuple[tuple[str, str], Any]]:
        found = [
            (("", name), value)
            for name, value in vars(self._root).items()
            if name not in MODULE_SPACE and name not in _PATCHES and is_plain(value)
        ]
        for module, name in self._others:
            space = self._space(module)
            if name in space and is_plain(space[name]):
                found.append(((module, name), space[name]))
        return found


def is_plain(value: Any) -> bool:
    """Whether an attribute is data that a step may leave behind, no object with a life of its
    own."""
    return value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, tuple, list, dict, set, deque, Tensor)
    )


def merge_changes(
    changes: Sequence[Change], rows: Sequence[int], frozen: Frozen | None, kind: Kind
) -> Change:
    """Merges what the micro-batches changed in one place.

    Args:
        changes: One per micro-batch that changed it.
        rows: The rows of those.
        frozen: The value before, if there was one.
        kind: What the source says about how it changes.
    """
    if all(isinstance(change, Grown) for change in changes):
        return Grown(_merge_items([c.items for c in changes if isinstance(c, Grown)], rows))
    if all(isinstance(change, Items) for change in changes):
        tables = [change.changes for change in changes if isinstance(change, Items)]
        merged: dict[Any, Change] = {}
        for key in dict.fromkeys(key for table in tables for key in table):
            present = [(t[key], n) for t, n in zip(tables, rows, strict=True) if key in t]
            child = frozen.children.get(key) if frozen is not None else None
            merged[key] = merge_changes(
                [c for c, _ in present], [n for _, n in present], child, kind
            )
        return Items(merged)
    values = [change.value for change in changes if isinstance(change, Put)]
    if len(values) < len(changes):
        return changes[-1]
    before = None if frozen is None else frozen.before()
    return Put(_merge_puts(values, rows, before, kind))


def apply_change(value: Any, change: Change) -> Any:
    """Makes one change to a value, in place where it is a container, and returns it."""
    if isinstance(change, Put):
        if isinstance(value, Tensor) and isinstance(change.value, Tensor):
            same = value.shape == change.value.shape and value.dtype == change.value.dtype
            if same and not value.requires_grad:
                with torch.no_grad():
                    return value.copy_(change.value)
        return change.value
    if isinstance(change, Grown):
        value.extend(change.items)
        return value
    for key, inner in change.changes.items():
        before = value[key] if isinstance(value, list) or key in value else None
        value[key] = apply_change(before, inner)
    return value


def _merge_items(items: Sequence[tuple[Any, ...]], rows: Sequence[int]) -> tuple[Any, ...]:
    """Merges what was appended: item by item, unless each row brought one."""
    lengths = [len(part) for part in items]
    one_per_row = lengths == list(rows) and max(rows) > 1
    if len(set(lengths)) > 1 or one_per_row:
        return tuple(item for part in items for item in part)
    return tuple(merge_values(column, rows) for column in zip(*items, strict=True))


def _merge_puts(values: Sequence[Any], rows: Sequence[int], before: Any, kind: Kind) -> Any:
    first = values[0]
    if all(_is_number(value) for value in (*values, before)):
        if kind is Kind.COUNT:
            return first
        steps = [value - before for value in values]
        whole = all(isinstance(value, int) for value in (*values, before))
        if kind is Kind.SUM or (whole and kind is Kind.MEAN):
            return before + sum(steps)
        if whole and kind is Kind.UNKNOWN:
            return before + merge_numbers(steps, rows)
        return merge_values(values, rows)
    if all(isinstance(value, Tensor) for value in values):
        same_shape = isinstance(before, Tensor) and all(v.shape == before.shape for v in values)
        if not same_shape:
            return merge_values(values, rows)
        if kind is Kind.COUNT:
            return first
        if first.is_floating_point() and kind is not Kind.SUM:
            return weighted_mean(values, rows)
        return before + sum(value - before for value in values)
    merged = merge_values(values, rows)
    plain_list = isinstance(merged, list) and not isinstance(first, list)
    return values[-1] if plain_list else merged


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _detached(value: Any) -> Any:
    """A value as it goes to other ranks: without a graph."""
    if isinstance(value, Tensor):
        return value.detach()
    if type(value) in (list, tuple, deque):
        return type(value)(_detached(item) for item in value)
    if type(value) is dict:
        return {key: _detached(item) for key, item in value.items()}
    return value
