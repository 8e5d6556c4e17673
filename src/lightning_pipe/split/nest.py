"""Walk the nests that batches are: lists, tuples, mappings of any class, dataclasses.

Unlike torch's pytree it needs no registration: a `UserDict`, a `BatchEncoding` or a dataclass is
gone through too, and rebuilt as a shallow copy of itself.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def items(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a container with their keys; None for anything else."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return None


def leaves(value: Any) -> Iterator[Any]:
    """Yield everything that is no container."""
    found = items(value)
    if found is None:
        yield value
        return
    for _, item in found:
        yield from leaves(item)


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply ``function`` to every leaf."""
    if items(value) is None:
        return function(value)
    return rebuilt(value, lambda item: mapped(item, function))


def rebuilt(value: Any, function: Callable[[Any], Any]) -> Any:
    """Make a container like ``value`` of the results of ``function``, asked for in order."""
    if isinstance(value, tuple):
        made = [function(item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if isinstance(value, Mapping):
        pairs = [(key, function(item)) for key, item in value.items()]
        if not isinstance(value, MutableMapping):
            return dict(pairs)
        rebuilt_mapping = copy.copy(value)
        for key, item in pairs:
            rebuilt_mapping[key] = item
        return rebuilt_mapping
    if isinstance(value, list):
        rebuilt_list = copy.copy(value)
        rebuilt_list[:] = [function(item) for item in value]
        return rebuilt_list
    rebuilt_record = copy.copy(value)
    for field in dataclasses.fields(value):
        object.__setattr__(rebuilt_record, field.name, function(getattr(value, field.name)))
    return rebuilt_record


def copy_tensors(batch: Any) -> Any:
    """Copy the tensors of a batch: a step that writes into its batch does so once for each
    stage."""
    return mapped(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def first_size(leaf: Any) -> int | None:
    """How many rows a tensor, an array or a packed sequence has along its first dimension."""
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    if isinstance(leaf, Tensor):
        return int(leaf.size(0)) if leaf.dim() else None
    if isinstance(leaf, np.ndarray):
        return leaf.shape[0] if leaf.ndim else None
    return None


def is_text_list(value: Any) -> bool:
    """Tell whether ``value`` is a list or tuple of nothing but texts."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(item, (str, bytes)) for item in value)
    )


def describe(value: Any, depth: int = 2) -> str:
    """Say in a few words what a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    found = items(value)
    if found is None or not depth:
        return type(value).__name__
    shown = [f"{key}: {describe(item, depth - 1)}" for key, item in found[:6]]
    more = ", ..." if len(found) > 6 else ""
    return f"{type(value).__name__} of {len(found)} ({', '.join(shown)}{more})"
