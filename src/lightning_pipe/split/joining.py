"""Join batches of a loader into the batch of one step, the opposite of splitting it.

What has rows is put one after the other; what has none has to be the same in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_pipe.errors import BatchError
from lightning_pipe.split.nest import describe, first_size, items, rebuilt
from lightning_pipe.split.rows import (
    LIST,
    UNRULED,
    Rule,
    count_rows,
    is_list_of_rows,
    join_path,
    rule_for,
)


def join_batches(batches: Sequence[Any], rules: Mapping[str, Rule]) -> Any:
    """Make one batch of several, as if the loader had given their rows at once.

    Args:
        batches: Of one structure.
        rules: What the user says about keys, as for splitting.

    Raises:
        BatchError: Something has other sizes behind its rows, or has no rows and differs.

    >>> join_batches([[torch.ones(2, 3), "all"], [torch.ones(1, 3), "all"]], {})[0].shape
    torch.Size([3, 3])
    """
    if len(batches) == 1:
        return batches[0]
    rows = [count_rows(batch, rules) for batch in batches]
    return _joined(batches, "", rows, rules)


def _joined(
    values: Sequence[Any], path: str, rows: Sequence[int], rules: Mapping[str, Rule]
) -> Any:
    first = values[0]
    rule: Any = rule_for(path, rules)
    if rule is not UNRULED and not isinstance(rule, int):
        return _lists(values) if rule == LIST else _one(values, path)
    if isinstance(rule, int) and items(first) is None:
        return _along(values, rule, path)
    sizes = [first_size(value) for value in values]
    if rule is UNRULED and sizes[0] is not None:
        return _along(values, 0, path) if sizes == list(rows) else _one(values, path)
    found = [items(value) for value in values]
    if found[0] is None:
        return _one(values, path)
    if rule is UNRULED and all(map(is_list_of_rows, values, rows)):
        return _lists(values)
    keys = [None if pairs is None else [key for key, _ in pairs] for pairs in found]
    if any(other != keys[0] for other in keys):
        raise _differ(values, path)
    columns = iter(zip(*([item for _, item in pairs or ()] for pairs in found), strict=True))
    names = iter(keys[0] or ())
    inner = dict(rules)

    def joined(_: Any) -> Any:
        key = next(names)
        below = join_path(path, key)
        if rule is not UNRULED:
            inner[below] = rule
        return _joined(next(columns), below, rows, inner)

    return rebuilt(first, joined)


def _lists(values: Sequence[Any]) -> Any:
    return type(values[0])([item for value in values for item in value])


def _along(values: Sequence[Any], dim: int, path: str) -> Any:
    """Tensors, one after the other."""
    first = values[0]
    try:
        if isinstance(first, PackedSequence):
            return _packed(values)
        if isinstance(first, np.ndarray):
            return np.concatenate(values, axis=dim)
        if isinstance(first, Tensor) and first.is_nested:
            rows = [row for value in values for row in value.unbind()]
            return torch.nested.nested_tensor(rows, layout=first.layout)
        if isinstance(first, Tensor):
            return _cat(values, dim)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _differ(values, path) from error
    return _one(values, path)


def _cat(values: Sequence[Tensor], dim: int) -> Tensor:
    first = values[0]
    if first.layout in (torch.strided, torch.sparse_coo):
        return torch.cat(list(values), dim)
    return torch.cat([value.to_sparse_coo() for value in values], dim).to_sparse(
        layout=first.layout
    )


def _packed(values: Sequence[PackedSequence]) -> PackedSequence:
    rows = [row for value in values for row in unpack_sequence(value)]
    return pack_sequence(rows, enforce_sorted=False)


def _one(values: Sequence[Any], path: str) -> Any:
    """What has no rows: the same in all batches."""
    first = values[0]
    for value in values[1:]:
        if value is not first and not _equal(value, first):
            raise _differ(values, path)
    return first


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    try:
        return bool(np.all(value == other))
    except (TypeError, ValueError, RuntimeError):
        return False


def _differ(values: Sequence[Any], path: str) -> BatchError:
    shown = " and ".join(dict.fromkeys(describe(value) for value in values))
    what = f"{path!r}" if path else "the batch"
    return BatchError(
        f"microbatch_size: batches of the loader cannot be joined into the batch of a step: {what} "
        f"is {shown}, and not the same or of the same sizes behind the rows. Let the loader give "
        "a whole step, batch_size = num_microbatches x microbatch_size, or give all batches one "
        "length; split_batch={key: ...} says what has rows"
    )


__all__ = ["join_batches"]
