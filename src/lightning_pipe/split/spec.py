"""The one thing that neighbours on a pipeline must agree on: what a boundary value looks like."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """One value that crosses from a stage to the next.

    Attributes:
        name: Names the value; equal on both sides, and equal at every boundary that relays it.
        shape: Sizes of the tensor.
        dtype: Element type.
        requires_grad: Whether a gradient comes back for it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
