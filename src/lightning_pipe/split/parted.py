"""SEAM: tensors of which each process of a stage holds a part: torch's `DTensor`.

What a user's `parallelize_module` has made is one: a wrapper of this process's part. Its part can
be a fake, or be exchanged, while the wrapper stays the same object in modules and optimizers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_pipe.split.tree import map_tensors, tensors


def is_parted(value: Any) -> bool:
    """Whether processes may hold different parts of a tensor."""
    return isinstance(value, DTensor)


def is_divided(value: Any) -> bool:
    """Whether this process has only a part of a tensor."""
    if not isinstance(value, DTensor) or value.device_mesh.size() == 1:
        return False
    return not all(placement.is_replicate() for placement in value.placements)


def part_of(value: Any) -> Any:
    """What this process holds of a tensor: the very object; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def held_numbers(value: Tensor) -> int:
    """Most numbers of a tensor that one process holds; the same on all that share it."""
    if not isinstance(value, DTensor):
        return value.numel()
    sizes = list(value.shape)
    for placement, count in zip(value.placements, value.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            sizes[placement.dim] = -(-sizes[placement.dim] // count)
    return math.prod(sizes)


def set_part(parted: Tensor, part: Tensor) -> None:
    """Lets a tensor have another part, of the same shape."""
    assert isinstance(parted, DTensor)
    parted._local_tensor = part


def parted_like(like: Tensor, part: Tensor) -> Tensor:
    """A tensor laid out as another one, with a part of its own."""
    assert isinstance(like, DTensor)
    with torch.no_grad():
        made: Tensor = DTensor.from_local(
            part,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return made


@dataclass(frozen=True, slots=True)
class Layout:
    """How a value is laid out over the processes that share its stage.

    Attributes:
        shape: Sizes of the whole.
        stride: Its strides.
        placements: What each process has of it; sums that are not complete are completed before
            they go anywhere.
        mesh: These processes.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: Any = field(compare=False, repr=False)

    @classmethod
    def of(cls, value: Tensor) -> Layout | None:
        """The layout of a value; None if it is an ordinary tensor."""
        if not isinstance(value, DTensor):
            return None
        placements = tuple(Replicate() if p.is_partial() else p for p in value.placements)
        return cls(tuple(value.shape), tuple(value.stride()), placements, value.device_mesh)

    def whole(self, part: Tensor) -> Tensor:
        """The value of which this is a part; gradients flow back to the part."""
        made: Tensor = DTensor.from_local(
            part,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )
        return made

    def part(self, value: Tensor) -> Tensor:
        """What this process has of a value; gradients flow back."""
        assert isinstance(value, DTensor)
        if value.placements != self.placements:
            value = value.redistribute(placements=self.placements)
        made: Tensor = value.to_local()
        return made


def as_ordinary(value: Any) -> Any:
    """A nest as each process would have it alone: its tensors whole. Gradients flow back.

    The very object where nothing in it is shared.
    """
    if not any(map(is_parted, tensors(value))):
        return value
    return map_tensors(lambda t: t.full_tensor() if isinstance(t, DTensor) else t, value)


__all__ = [
    "Layout",
    "as_ordinary",
    "held_numbers",
    "is_divided",
    "is_parted",
    "part_of",
    "parted_like",
    "set_part",
]
