"""What the runs of a step noted, and whether two ways to put it together agree."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.split.frozen import fields_of, is_open
from lightning_pipe.split.microbatch import NumberMemory, merge_values
from lightning_pipe.tail.loggers import LoggerCall

_CLOSE = 1e-5
_CLOSE_HALF = 2e-2  # bf16 and fp16


@dataclass(frozen=True, slots=True)
class PrintCall:
    """One call of `self.print`."""

    values: tuple[Any, ...]
    kwargs: dict[str, Any]


def merged_prints(
    calls: Sequence[Sequence[PrintCall]],
    rows: Sequence[int],
    memory: NumberMemory | None = None,
) -> list[PrintCall]:
    """What the whole batch would have printed; texts that differ are those of the first
    micro-batch."""
    merged = []
    for number, column in enumerate(zip(*calls, strict=False)):
        values = []
        for index, parts in enumerate(zip(*(call.values for call in column), strict=False)):
            numbers = all(isinstance(part, (Tensor, int, float)) for part in parts)
            place = ("print", number, index)
            values.append(
                merge_values(parts, rows, memory=memory, place=place) if numbers else parts[0]
            )
        merged.append(PrintCall(tuple(values), column[0].kwargs))
    return merged


@dataclass(slots=True)
class Notes:
    """What some runs of a step did.

    Attributes:
        rows: Rows of each run.
        outputs: What each returned.
        logs: The calls of `self.log` of each.
        metrics: The calls of metrics of each.
        attributes: What each changed.
        prints: The calls of `self.print` of each.
        loggers: What each said to loggers directly.
    """

    rows: Sequence[int]
    outputs: list[Any] = field(default_factory=list)
    logs: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    attributes: list[Any] = field(default_factory=list)
    prints: list[list[PrintCall]] = field(default_factory=list)
    loggers: list[list[LoggerCall]] = field(default_factory=list)


def differences(value: Any, other: Any, name: str = "") -> Iterator[str]:
    """Yields the places where two nests of values are not the same, up to rounding."""
    parts, others = _parts(value), _parts(other)
    if parts is None or others is None:
        if not _same(value, other):
            yield name
    elif type(value) is not type(other) or parts.keys() != others.keys():
        yield name
    else:
        for key, part in parts.items():
            yield from differences(part, others[key], f"{name}.{key}" if name else str(key))


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _same_tensors(value, other)
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        same = value.shape == other.shape and value.dtype == other.dtype
        return same and bool(np.allclose(value, other, rtol=_CLOSE, equal_nan=True))
    if _is_real(value) and _is_real(other):
        return bool(np.isclose(value, other, rtol=_CLOSE, atol=1e-9, equal_nan=True))
    return type(value) is type(other) and _equal(value, other)


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, deque)):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in fields(value)}
    return fields_of(value) if is_open(value) else None


def _same_tensors(value: Tensor, other: Tensor) -> bool:
    if value.shape != other.shape or value.dtype != other.dtype:
        return False
    if not value.is_floating_point():
        return torch.equal(value, other)
    close = _CLOSE_HALF if value.dtype.itemsize < 4 else _CLOSE
    return torch.allclose(value, other, rtol=close, atol=1e-3 * close, equal_nan=True)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except (TypeError, ValueError, RuntimeError):
        return False
