"""What a trace of a step depends on in its batch: the structure, and the sizes in it.

Two batches of one *skeleton* differ in sizes only; a trace for one may tell the shapes for another
(:mod:`lightning_pipe.split.shapes`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.split.nest import items


class Signature(NamedTuple):
    """A batch without its data; hashable, and equal for batches that may share a trace.

    Attributes:
        skeleton: Structure, types and numbers of dimensions.
        sizes: Every size of every tensor, whole numbers and lengths of plain lists, in order.
    """

    skeleton: Hashable
    sizes: tuple[int, ...]


def signature(value: Any) -> Signature:
    """Take the signature of a batch."""
    sizes: list[int] = []
    return Signature(_skeleton(value, sizes), tuple(sizes))


def _skeleton(value: Any, sizes: list[int]) -> Hashable:
    if isinstance(value, Tensor):
        nested = value.is_nested
        sizes.extend([value.size(0)] if nested else value.shape)
        place = "cpu" if value.device.type == "cpu" else "device"
        return (value.dim(), value.dtype, value.requires_grad, value.layout, place)
    if isinstance(value, np.ndarray):
        sizes.extend(value.shape)
        return ("array", value.ndim, str(value.dtype))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        sizes.append(value)
        return "int"
    found = items(value)
    if found is None:
        return type(value).__qualname__
    if isinstance(value, (list, tuple)) and value and all(_is_plain(item) for item in value):
        sizes.append(len(value))
        return (type(value).__qualname__, tuple(sorted({type(item).__name__ for item in value})))
    return (
        type(value).__qualname__,
        tuple((key, _skeleton(item, sizes)) for key, item in found),
    )


def _is_plain(value: Any) -> bool:
    """Tell whether a step sees no sizes in ``value``."""
    return (
        items(value) is None
        and value is not None
        and not isinstance(value, (bool, Tensor, np.ndarray, torch.Size))
    )
