"""Merge what the micro-batches made into what the whole batch would have made.

How a batch is split is in :mod:`lightning_pipe.split.rows`. Knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.split.nest import items, rebuilt


class NumberMemory:
    """What equal numbers of micro-batches are, by their place: seen once, known from then on.

    A 2 in each micro-batch of 2 rows may count rows, or be the index of the batch.
    """

    def __init__(self) -> None:
        self._is_constant: dict[Hashable, bool] = {}

    def is_constant(self, place: Hashable, *, counts_rows: bool) -> bool:
        """Tell whether the number at a place has nothing to do with rows.

        Args:
            place: Where it is.
            counts_rows: Whether it equals the rows this time.
        """
        return self._is_constant.setdefault(place, not counts_rows)


def merge_values(
    values: Sequence[Any],
    rows: Sequence[int],
    *,
    extensive: bool = False,
    memory: NumberMemory | None = None,
    place: tuple[Hashable, ...] = (),
) -> Any:
    """Merge what the micro-batches made into what the whole batch would have made.

        row-wise tensors and lists    one after the other
        means (floats)                weighted by rows
        counts (integers)             their sum; equal ones stay, unless they count the rows
        dicts, tuples, dataclasses    item by item
        equal objects                 one of them; unequal ones a list of all

    Args:
        values: What each micro-batch made, of one structure.
        rows: Rows of each micro-batch.
        extensive: Numbers that are no counts are sums over rows too, not means.
        memory: What numbers were seen to be in earlier steps.
        place: Where these values are, for the memory.

    >>> merge_values([torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    tensor(2.)
    """
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, Tensor) for value in values):
        return merge_tensors(values, rows, extensive=extensive)
    if all(isinstance(value, np.ndarray) for value in values):
        arrays = [torch.from_numpy(value) for value in values]
        return merge_tensors(arrays, rows, extensive=extensive).numpy()
    if all(isinstance(value, (bool, np.bool_)) for value in values):
        return first if len(set(values)) == 1 else list(values)
    if all(isinstance(value, (int, float, np.number)) for value in values):
        return sum(values) if extensive else merge_numbers(values, rows, memory, place)
    if any(type(value) is not type(first) for value in values):
        return list(values)
    if isinstance(first, (list, tuple)) and _are_row_lists(values, rows):
        return type(first)(item for value in values for item in value)
    found = [items(value) for value in values]
    keys = [None if pairs is None else [key for key, _ in pairs] for pairs in found]
    if keys[0] is None or any(other != keys[0] for other in keys):
        return _one_or_all(values)
    parts = [[item for _, item in pairs or ()] for pairs in found]
    merged = iter(
        [
            merge_values(column, rows, extensive=extensive, memory=memory, place=(*place, str(key)))
            for key, column in zip(keys[0], zip(*parts, strict=True), strict=True)
        ]
    )
    return rebuilt(first, lambda _: next(merged))


def merge_tensors(
    values: Sequence[Tensor], rows: Sequence[int], *, extensive: bool = False
) -> Tensor:
    """Merge tensors: along their rows, as counts or other sums, or as means over the rows."""
    first = values[0]
    if first.dim() and all(
        value.dim() == first.dim() and value.shape[1:] == first.shape[1:] for value in values
    ):
        row_wise = all(v.shape[0] == size for v, size in zip(values, rows, strict=True))
        flattened = _are_flattened_rows(values, rows)
        if row_wise or flattened:
            return torch.cat(list(values))
    if _are_states_of_rows(values, rows):
        return torch.cat(list(values), dim=1)
    if any(value.shape != first.shape for value in values):
        same_rest = first.dim() and all(value.shape[1:] == first.shape[1:] for value in values)
        return torch.cat(list(values)) if same_rest else first
    if extensive and first.dtype is not torch.bool:
        return torch.stack(list(values)).sum(0).to(first.dtype)
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


def merge_numbers(
    values: Sequence[Any],
    rows: Sequence[int],
    memory: NumberMemory | None = None,
    place: Hashable = (),
) -> Any:
    """Merge Python numbers as `merge_values` says."""
    first = values[0]
    counts_rows = list(values) == list(rows)
    equal = all(value == first for value in values)
    if memory is not None and (counts_rows or equal):
        is_constant = memory.is_constant(place, counts_rows=counts_rows)
        if is_constant and equal:
            return first
    if all(isinstance(value, (int, np.integer)) for value in values):
        return first if equal and not counts_rows else sum(values)
    if max(rows) > 1 and counts_rows:
        return sum(values)
    if equal:
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


def _are_states_of_rows(values: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Whether these are the states of a recurrent network: layers x rows x features."""
    sizes = {(v.shape[0], v.shape[2]) for v in values if v.dim() == 3 and v.is_floating_point()}
    shaped = all(v.dim() == 3 and v.shape[1] == n for v, n in zip(values, rows, strict=True))
    return shaped and len(sizes) == 1


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
