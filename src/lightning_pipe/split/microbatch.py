"""Split a batch into micro-batches, and merge what they return into what the whole batch would
have.

Rows are what most tensors of the batch have along their first dimension. Values with that many rows
are split, everything else goes whole to every micro-batch. Pieces may be uneven; their weights are
their rows. Knows nothing of stages.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.errors import BatchError


@dataclass(frozen=True, slots=True)
class Pieces:
    """A batch, split.

    Attributes:
        batches: The micro-batches, each of the structure of the batch.
        rows: Rows of each.
    """

    batches: tuple[Any, ...]
    rows: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """The share of each micro-batch in a mean over the rows; they sum to 1."""
        total = sum(self.rows)
        return tuple(rows / total for rows in self.rows)


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the most frequent first size among its tensors.

    Raises:
        BatchError: Nothing in the batch has rows, or there are none.

    >>> count_rows({"x": torch.ones(6, 4), "y": torch.ones(6), "classes": torch.ones(3)})
    6
    """
    votes = Counter(size for size in map(_array_rows, _leaves(batch)) if size is not None)
    if not votes:
        votes = Counter(len(texts) for texts in _text_lists(batch))
    if not votes:
        raise BatchError(
            f"the batch cannot be split into micro-batches: it is {describe(batch)} and "
            "no tensor in it "
            "has a first dimension; give num_microbatches=1, or batches of tensors with rows"
        )
    best = max(votes.values())
    rows = next(size for size, count in votes.items() if count == best)
    if rows == 0:
        raise BatchError(
            f"the batch cannot be split into micro-batches: {describe(batch)} has 0 rows; "
            "give batches with 1 row at least"
        )
    return rows


def piece_sizes(rows: int, num_pieces: int) -> tuple[int, ...]:
    """Return how many rows each piece gets: the first ones take the remainder.

    >>> piece_sizes(6, 4)
    (2, 2, 1, 1)
    """
    least, more = divmod(rows, num_pieces)
    return tuple(least + (piece < more) for piece in range(num_pieces))


def split_batch(batch: Any, num_microbatches: int) -> Pieces:
    """Split a batch by rows into that many pieces, or into single rows if there are fewer.

    Row-wise tensors, arrays and lists of strings are split (tensors as views), all else is the same
    object in each piece.

    Raises:
        BatchError: The batch has no rows.

    >>> split_batch([torch.arange(5), "all"], 2).batches
    ([tensor([0, 1, 2]), 'all'], [tensor([3, 4]), 'all'])
    """
    rows = 1 if num_microbatches == 1 and not has_rows(batch) else count_rows(batch)
    sizes = piece_sizes(rows, min(num_microbatches, rows))
    if len(sizes) == 1:
        return Pieces((batch,), sizes)
    stops = np.cumsum(sizes).tolist()
    return Pieces(
        tuple(
            _take_rows(batch, rows, slice(stop - size, stop))
            for size, stop in zip(sizes, stops, strict=True)
        ),
        sizes,
    )


def has_rows(batch: Any) -> bool:
    """Tell whether a batch could be split at all."""
    return any(_array_rows(leaf) for leaf in _leaves(batch)) or any(_text_lists(batch))


def copy_tensors(batch: Any) -> Any:
    """Copy the tensors of a batch: a step that writes into its batch does so once for each
    stage."""
    return _mapped(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def signature(value: Any) -> Any:
    """Return what a trace of a step on this batch depends on: structure, shapes, types, and
    constants.

    The result can be hashed and is equal for batches that may share a trace.
    """
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad, value.layout)
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype))
    if isinstance(value, str) or value is None or isinstance(value, (bool, int)):
        return type(value).__name__ if isinstance(value, (str, int)) else None
    items = _items(value)
    if items is None:
        return type(value).__qualname__
    return (type(value).__qualname__, tuple((key, signature(item)) for key, item in items))


def describe(value: Any, depth: int = 2) -> str:
    """Say in a few words what a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    items = _items(value)
    if items is None or not depth:
        return type(value).__name__
    shown = [f"{key}: {describe(item, depth - 1)}" for key, item in items[:6]]
    more = ", ..." if len(items) > 6 else ""
    return f"{type(value).__name__} of {len(items)} ({', '.join(shown)}{more})"


# ---------------------------------------------------------------------- merging


def merge_values(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Merge what the micro-batches made into what the whole batch would have made.

        row-wise tensors and lists    one after the other
        means (floats)                weighted by rows
        counts (integers)             their sum; numbers that are equal, unless they count the rows,
        stay dicts, tuples, dataclasses    item by item equal objects                 one of them;
        unequal ones a list of all

    Args:
        values: What each micro-batch made, of one structure.
        rows: Rows of each micro-batch.

    >>> merge_values([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    """
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, Tensor) for value in values):
        return merge_tensors(values, rows)
    if all(isinstance(value, np.ndarray) for value in values):
        return merge_tensors([torch.from_numpy(value) for value in values], rows).numpy()
    if all(isinstance(value, (bool, np.bool_)) for value in values):
        return first if len(set(values)) == 1 else list(values)
    if all(isinstance(value, (int, float, np.number)) for value in values):
        return merge_numbers(values, rows)
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if isinstance(first, (list, tuple)) and _are_row_lists(values, rows):
        return type(first)(item for value in values for item in value)
    items = [_items(value) for value in values]
    keys = [None if found is None else [key for key, _ in found] for found in items]
    if keys[0] is None or any(other != keys[0] for other in keys):
        return _one_or_all(values)
    parts = [[item for _, item in found or ()] for found in items]
    merged = iter([merge_values(column, rows) for column in zip(*parts, strict=True)])
    return _rebuilt(first, lambda _: next(merged))


def merge_tensors(values: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Merge tensors: along their rows, as counts, or as means over the rows."""
    first = values[0]
    if first.dim() and all(
        value.dim() == first.dim() and value.shape[1:] == first.shape[1:] for value in values
    ):
        row_wise = all(v.shape[0] == size for v, size in zip(values, rows, strict=True))
        flattened = _are_flattened_rows(values, rows)
        if row_wise or flattened:
            return torch.cat(list(values))
    if any(value.shape != first.shape for value in values):
        same_rest = first.dim() and all(value.shape[1:] == first.shape[1:] for value in values)
        return torch.cat(list(values)) if same_rest else first
    if all(torch.equal(value, first) for value in values) and not _is_count(first):
        return first
    if _is_count(first):
        return torch.stack(list(values)).sum(0).to(first.dtype)
    if first.dtype is torch.bool:
        return torch.stack(list(values)).all(0)
    return weighted_mean(values, rows)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the mean of tensors of one shape, weighted; exactly the first if all are equal."""
    first = values[0]
    if all(torch.equal(value, first) for value in values):
        return first
    total = sum(weights)
    mean = first * (weights[0] / total)
    for value, weight in zip(values[1:], weights[1:], strict=True):
        mean = mean + value * (weight / total)
    return mean


def merge_numbers(values: Sequence[Any], rows: Sequence[int]) -> Any:
    """Merge Python numbers as `merge_values` says."""
    first = values[0]
    if all(isinstance(value, (int, np.integer)) for value in values):
        counts_rows = list(values) == list(rows) and len(set(rows)) <= len(rows)
        if len(set(values)) == 1 and not counts_rows:
            return first
        return sum(values)
    if all(value == first for value in values):
        return first
    return sum(value * size for value, size in zip(values, rows, strict=True)) / sum(rows)


def _is_count(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _are_flattened_rows(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Whether the first dimension is rows x something, as in ``logits.view(-1, classes)``."""
    if len(set(rows)) == 1 and len({v.shape[0] for v in values}) == 1:
        return False
    factors = {divmod(v.shape[0], size) for v, size in zip(values, rows, strict=True)}
    return len(factors) == 1 and next(iter(factors))[1] == 0


def _are_row_lists(values: Sequence[Any], rows: Sequence[int]) -> bool:
    if type(values[0]) not in (list, tuple):
        return False
    lengths = [len(value) for value in values]
    return lengths == list(rows) and (type(values[0]) is list or len(set(rows)) > 1)


def _one_or_all(values: Sequence[Any]) -> Any:
    try:
        equal = all(value is values[0] or bool(value == values[0]) for value in values)
    except (TypeError, ValueError, RuntimeError):
        equal = False
    return values[0] if equal else list(values)


# ---------------------------------------------------------------------- walking


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container with their keys; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def _leaves(value: Any) -> Iterator[Any]:
    items = _items(value)
    if items is None:
        yield value
        return
    for _, item in items:
        yield from _leaves(item)


def _text_lists(value: Any) -> Iterator[Sequence[str]]:
    if _is_text_list(value):
        yield value
        return
    for _, item in _items(value) or ():
        yield from _text_lists(item)


def _is_text_list(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, (str, bytes)) for item in value)
    )


def _array_rows(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        return leaf.shape[0] if leaf.dim() else None
    if isinstance(leaf, np.ndarray):
        return leaf.shape[0] if leaf.ndim else None
    return None


def _take_rows(value: Any, rows: int, part: slice) -> Any:
    if _is_text_list(value):
        return value[part] if len(value) == rows else value
    if _items(value) is None:
        return value[part] if _array_rows(value) == rows else value
    return _rebuilt(value, lambda item: _take_rows(item, rows, part))


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if _items(value) is None:
        return function(value)
    return _rebuilt(value, lambda item: _mapped(item, function))


def _rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Make a container like ``value`` of the results of ``function``, asked for in order."""
    if isinstance(value, tuple):
        items = [function(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = [(key, function(item)) for key, item in value.items()]
        if not isinstance(value, MutableMapping):
            return dict(pairs)
        rebuilt = copy.copy(value)
        for key, item in pairs:
            rebuilt[key] = item
        return rebuilt
    if isinstance(value, list):
        rebuilt_list = copy.copy(value)
        rebuilt_list[:] = [function(item) for item in value]
        return rebuilt_list
    rebuilt_record = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(rebuilt_record, field.name, function(getattr(value, field.name)))
    return rebuilt_record
