"""Changes of micro-batches, merged into the one that the whole batch would have made.

Whether a number is summed, averaged or counted once is read from the source where it says so
(`Kinds`), and from the values where they tell: what equals the rows of each micro-batch counts
rows.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.split.frozen import Frozen, Name, fields_of, is_open
from lightning_pipe.split.microbatch import (
    NumberMemory,
    merge_numbers,
    merge_values,
    weighted_mean,
)
from lightning_pipe.tail.changes import Change, Fields, Gone, Grown, Items, Members, Put, rebuilt
from lightning_pipe.tail.kinds import Kind, Kinds, kinds_of

_SUMS = (Kind.SUM, Kind.SET_SUM)


@dataclass(frozen=True, slots=True)
class Where:
    """A place in an attribute.

    Args:
        kinds: What the source of the class of its owner says.
        path: The attribute's name, and the keys from there.
        name: What it is called, for messages.
        memory: What numbers were seen to be in earlier steps.
    """

    kinds: Kinds
    path: tuple[Any, ...]
    name: str
    memory: NumberMemory | None = None

    def kind(self, *, appended: bool = False) -> Kind:
        """What a step does here."""
        return self.kinds.of(*self.path, appended=appended)

    def entry(self, key: Any) -> Where:
        """A place inside a container."""
        return Where(self.kinds, (*self.path, key), f"{self.name}[{key!r}]", self.memory)

    def field(self, owner: Any, name: str) -> Where:
        """A field of the object that is here."""
        return Where(kinds_of(type(owner)), (name,), f"{self.name}.{name}", self.memory)


def merge_changes(
    changes: Sequence[Change], rows: Sequence[int], frozen: Frozen | None, where: Where
) -> Change:
    """Merges what the micro-batches changed in one place.

    Args:
        changes: One per micro-batch that changed it.
        rows: The rows of those.
        frozen: The value before, if there was one.
        where: The place.
    """
    first = changes[0]
    if len({type(change) for change in changes}) > 1:
        kept: Change = _last(changes, where.name)
        return kept
    if isinstance(first, Grown):
        return _merge_grown(changes, rows, frozen, where)
    if isinstance(first, Items):
        return _merge_dicts(changes, rows, frozen, where)
    if isinstance(first, Fields):
        return _merge_fields(changes, rows, frozen, where)
    if isinstance(first, Members):
        sets = [change for change in changes if isinstance(change, Members)]
        added = frozenset().union(*(change.added for change in sets))
        return Members(added, frozenset().union(*(change.removed for change in sets)) - added)
    if isinstance(first, Gone):
        return first
    values = [change.value for change in changes if isinstance(change, Put)]
    return Put(merge_puts(values, rows, _before(frozen), where))


class _Before:
    """A plain value before the step: what `merge_changes` asks of a `Frozen`."""

    __slots__ = ("children", "content", "value")

    def __init__(self, value: Any) -> None:
        self.value = self.content = value
        self.children: dict[Any, Any] = {}


def _known(children: Mapping[Any, Any], before: Any, key: Any) -> Any:
    """What was at a key: a `Frozen`, a plain value, or nothing."""
    if key in children:
        child = children[key]
        return child.target if isinstance(child, Name) else child
    known = isinstance(before, dict) and key in before
    return _Before(before[key]) if known else None


def _before(frozen: Frozen | None) -> Any:
    """The value before, for comparison."""
    if frozen is None:
        return None
    has_copy = isinstance(frozen.value, (Tensor, np.ndarray, list, deque))
    return frozen.content if has_copy else frozen.value


def _removed(changes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(key for change in changes for key in change.removed))


def _merge_entries(
    tables: Sequence[Mapping[Any, Change]],
    rows: Sequence[int],
    frozen: Callable[[Any], Any],
    where: Callable[[Any], Where],
) -> dict[Any, Change]:
    merged = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        present = [(t[key], n) for t, n in zip(tables, rows, strict=True) if key in t]
        changes, sizes = [change for change, _ in present], [n for _, n in present]
        merged[key] = merge_changes(changes, sizes, frozen(key), where(key))
    return merged


def _merge_dicts(
    changes: Sequence[Any], rows: Sequence[int], frozen: Frozen | None, where: Where
) -> Items:
    children: Mapping[Any, Any] = {} if frozen is None else frozen.children
    before = {} if frozen is None else frozen.content
    tables = [change.changes for change in changes]
    if frozen is not None and isinstance(frozen.value, Counter):
        keys = dict.fromkeys(key for table in tables for key in table)
        old = {key: before.get(key, 0) for key in keys}
        grown = {k: old[k] + sum(t[k].value - old[k] for t in tables if k in t) for k in keys}
        return Items({key: Put(value) for key, value in grown.items()}, _removed(changes))
    merged = _merge_entries(tables, rows, lambda k: _known(children, before, k), where.entry)
    return Items(merged, _removed(changes))


def _merge_grown(
    changes: Sequence[Any], rows: Sequence[int], frozen: Frozen | None, where: Where
) -> Grown:
    children: Mapping[Any, Any] = {} if frozen is None else frozen.children
    tables = [change.inner for change in changes]
    inner = _merge_entries(tables, rows, lambda k: _known(children, None, k), where.entry)
    return Grown(_merge_items([c.items for c in changes], rows, where, appended=True), inner)


def _merge_fields(
    changes: Sequence[Any], rows: Sequence[int], frozen: Frozen | None, where: Where
) -> Fields:
    assert frozen is not None, "fields change in an object that was there"
    inner, before, owner = frozen.inner, frozen.fields, frozen.value
    merged = _merge_entries(
        [change.changes for change in changes],
        rows,
        lambda key: _known(inner, before, key),
        lambda key: where.field(owner, key),
    )
    inside = [(c.content, n) for c, n in zip(changes, rows, strict=True) if c.content is not None]
    content = None
    if inside:
        parts, sizes = [c for c, _ in inside], [n for _, n in inside]
        content = merge_changes(parts, sizes, frozen, where)
    return Fields(merged, _removed(changes), content)


def _merge_items(
    items: Sequence[tuple[Any, ...]], rows: Sequence[int], where: Where, *, appended: bool
) -> tuple[Any, ...]:
    """Merges what was appended: item by item, unless each row brought one."""
    lengths = [len(part) for part in items]
    one_per_row = lengths == list(rows) and max(rows) > 1
    if len(set(lengths)) > 1 or one_per_row:
        return tuple(item for part in items for item in part)
    sums = where.kind(appended=appended) in _SUMS
    return tuple(
        merge_values(
            column, rows, extensive=sums, memory=where.memory, place=(where.name, "item", number)
        )
        for number, column in enumerate(zip(*items, strict=True))
    )


def merge_puts(values: Sequence[Any], rows: Sequence[int], before: Any, where: Where) -> Any:
    """Merges the values that the micro-batches set.

    Args:
        values: One per micro-batch that set it.
        rows: The rows of those.
        before: The value before the step, or None.
        where: The place.
    """
    first, kind = values[0], where.kind()
    if all(map(_is_number, values)):
        return _merge_numbers(values, rows, before, where)
    if all(isinstance(value, Tensor) for value in values):
        return _merge_tensors(values, rows, before, kind)
    if isinstance(first, np.ndarray) and isinstance(before, np.ndarray):
        tensors = [torch.from_numpy(value) for value in values]
        return _merge_tensors(tensors, rows, torch.from_numpy(before), kind).numpy()
    if isinstance(before, (list, deque)) and all(type(v) is type(first) for v in values):
        size = len(before)
        if isinstance(first, (list, deque)) and all(_begins_with(v, before) for v in values):
            tails = [tuple(value)[size:] for value in values]
            return type(first)([*before, *_merge_items(tails, rows, where, appended=False)])
    if is_open(first) and all(type(value) is type(first) for value in values):
        return _merge_objects(values, rows, before, where)
    merged = merge_values(
        values, rows, extensive=kind in _SUMS, memory=where.memory, place=(where.name,)
    )
    unclear = isinstance(merged, list) and not isinstance(first, list)
    return _last(values, where.name) if unclear else merged


def _begins_with(value: Any, before: Sequence[Any]) -> bool:
    return len(value) >= len(before) and all(a is b for a, b in zip(value, before, strict=False))


def _merge_objects(values: Sequence[Any], rows: Sequence[int], before: Any, where: Where) -> Any:
    """Merges objects of one class that were made anew, field by field."""
    old = fields_of(before) if type(before) is type(values[0]) else {}
    tables = [fields_of(value) for value in values]
    fields = {
        key: merge_puts(
            [table[key] for table in tables], rows, old.get(key), where.field(values[0], key)
        )
        for key in tables[0]
        if all(key in table for table in tables)
    }
    return rebuilt(values[0], fields)


def _merge_numbers(values: Sequence[Any], rows: Sequence[int], before: Any, where: Where) -> Any:
    kind, place = where.kind(), (where.name,)
    adds = kind in (Kind.SUM, Kind.MEAN, Kind.COUNT)
    if before is None and adds:
        before = 0
    if not _is_number(before):
        return merge_values(values, rows, extensive=kind in _SUMS, memory=where.memory, place=place)
    steps = [value - before for value in values]
    whole = all(isinstance(value, int) for value in (*values, before))
    if kind is Kind.COUNT and len(set(steps)) == 1:
        return values[0]
    if kind is Kind.SUM or (whole and adds) or (not adds and _count_rows(steps, rows, where)):
        return before + sum(steps)
    if kind is Kind.MEAN:
        return sum(value * size for value, size in zip(values, rows, strict=True)) / sum(rows)
    if whole and kind is Kind.UNKNOWN:
        return before + merge_numbers(steps, rows)
    sums = kind is Kind.SET_SUM
    return merge_values(values, rows, extensive=sums, memory=where.memory, place=place)


def _count_rows(steps: Sequence[Any], rows: Sequence[int], where: Where) -> bool:
    counts = max(rows) > 1 and all(a == b for a, b in zip(steps, rows, strict=True))
    if where.memory is not None and len(set(steps)) == 1:
        return not where.memory.is_constant((where.name, "step"), counts_rows=counts)
    return counts


def _merge_tensors(
    values: Sequence[Tensor], rows: Sequence[int], before: Any, kind: Kind
) -> Tensor:
    first = values[0]
    if not isinstance(before, Tensor) or any(v.shape != before.shape for v in values):
        return torch.as_tensor(merge_values(values, rows, extensive=kind in _SUMS))
    if all(torch.equal(value, first) for value in values[1:]) and kind is Kind.COUNT:
        return first
    if first.dtype is torch.bool:
        return torch.as_tensor(merge_values(values, rows))
    if first.is_floating_point() and kind not in _SUMS:
        return weighted_mean(values, rows)
    if kind is Kind.SET_SUM:
        return torch.stack(list(values)).sum(0).to(first.dtype)
    total = before + sum(value - before for value in values)
    assert isinstance(total, Tensor)
    return total


def _last(values: Sequence[Any], name: str) -> Any:
    warnings.warn(
        f"micro-batches of one batch leave different values in {name or 'an attribute'}, which "
        "are neither numbers nor tensors: that of the last one is kept",
        stacklevel=2,
    )
    return values[-1]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
