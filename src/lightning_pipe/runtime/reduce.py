"""Sums and means over the copies of a pipeline: gradients in buckets, values one by one.

All functions take the copies of one position (`Ranks.copies`) and are called by all of them.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime import share
from lightning_pipe.runtime.meeting import at, meet
from lightning_pipe.runtime.ranks import Ranks, connected

_IN_FLIGHT = 4  # buckets that exist at once
_NONE, _DENSE, _SPARSE, _BOTH = range(4)
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


def reduce_value(copies: Ranks, value: Tensor, op: str) -> Tensor:
    """A value of all copies as one: their "mean", "sum", "max", "min" or "product".

    Raises:
        ConfigError: Another operation.
    """
    mean = op in ("mean", "avg")
    if not mean and op not in _OPS:
        raise ConfigError(f"reduce_op={op!r}: give 'mean' or one of {', '.join(_OPS)}")
    result = value.detach().clone().contiguous()
    with at(copies, f"takes the {op} of a value over the copies of the pipeline"):
        dist.all_reduce(result, _OPS["sum" if mean else op], group=_group_for(copies, value))
    return result / copies.num_positions if mean else result


def gather_values(copies: Ranks, value: Tensor) -> list[Tensor]:
    """The values of all copies; each may have a size of its own.

    Tensors of one shape go from where they are; others by way of the host.
    """
    seen = (tuple(value.shape), value.dtype)
    with at(copies, "gathers a value from the copies of the pipeline"):
        shapes = share.gather_objects(copies, seen) or []
        if len(set(shapes)) > 1:
            found = share.gather_objects(copies, value.detach().cpu()) or []
            return [one.to(value.device) for one in found]
        own = value.detach().contiguous()
        gathered = [torch.empty_like(own) for _ in shapes]
        dist.all_gather(gathered, own, group=_group_for(copies, value))
        return gathered


def mean_gradients(
    copies: Ranks,
    gradients: Mapping[str, Tensor | None],
    shapes: Mapping[str, Tensor],
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The means of gradients over all copies.

    Buckets are filled in the order of the names, which is the same everywhere, and are under way
    while the next ones are filled. A copy that has no gradient of a parameter counts as zero.

    Args:
        copies: This position in all copies.
        gradients: Those of this copy; dense ones are overwritten.
        shapes: The parameters, by the same names.
        bucket_bytes: Bytes of a bucket; a larger gradient has one of its own.
        dtype: What is sent, if not the type of the gradients.

    Returns:
        The gradients that any copy has.
    """
    kinds = agreed_kinds(copies, gradients)
    means: dict[str, Tensor] = {}
    dense: list[tuple[str, Tensor]] = []
    for name, gradient in gradients.items():
        if kinds[name] == _SPARSE:
            means[name] = _sparse_mean(copies, gradient).to(shapes[name].device)
        elif kinds[name] != _NONE:
            if gradient is None:
                gradient = torch.zeros_like(shapes[name])
            dense.append((name, gradient.to_dense() if _kind(gradient) == _SPARSE else gradient))
    flying: deque[_Bucket] = deque()
    with connected(copies):
        for items in _buckets(dense, bucket_bytes):
            flying.append(_Bucket(copies, items, dtype))
            if len(flying) >= _IN_FLIGHT:
                flying.popleft().land(means)
        while flying:
            flying.popleft().land(means)
    return means


class _Bucket:
    """Gradients of one type that travel as one."""

    def __init__(
        self, copies: Ranks, items: Sequence[tuple[str, Tensor]], dtype: torch.dtype | None
    ) -> None:
        self._items = items
        flat = torch.cat([gradient.reshape(-1) for _, gradient in items])
        flat.div_(copies.num_positions)  # before the sum, which half precision may not hold
        self._flat = flat if dtype is None else flat.to(dtype)
        self._work: Any = dist.all_reduce(self._flat, group=copies.pipeline_group, async_op=True)

    def land(self, means: dict[str, Tensor]) -> None:
        """Waits, and puts the means into the gradients."""
        self._work.wait()
        start = 0
        for name, gradient in self._items:
            part = self._flat[start : start + gradient.numel()]
            means[name] = gradient.copy_(part.view(gradient.shape))
            start += gradient.numel()


def _buckets(
    gradients: Sequence[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, Tensor]]]:
    open_ones: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for name, gradient in gradients:
        kind = gradient.dtype, gradient.device
        held = open_ones.setdefault(kind, [])
        if held and sizes[kind] + gradient.nbytes > bucket_bytes:
            yield held
            held = open_ones[kind] = []
            sizes[kind] = 0
        held.append((name, gradient))
        sizes[kind] = sizes.get(kind, 0) + gradient.nbytes
    yield from (held for held in open_ones.values() if held)


def agreed_kinds(copies: Ranks, gradients: Mapping[str, Tensor | None]) -> dict[str, int]:
    """What each gradient is, over all copies; 0 where none has one."""
    kinds = [_kind(gradient) for gradient in gradients.values()]
    text = repr([(name, kind) for name, kind in zip(gradients, kinds, strict=True)])
    flags = meet(copies, "averages the gradients of a step", zlib.crc32(text.encode()))
    if len(set(flags)) > 1:
        found = share.gather_objects(copies, dict(zip(gradients, kinds, strict=True))) or []
        kinds = [_union(part.get(name, _NONE) for part in found) for name in gradients]
    return dict(zip(gradients, kinds, strict=True))


def _union(kinds: Iterator[int]) -> int:
    union = _NONE
    for kind in kinds:
        union |= kind
    return union


def _kind(gradient: Tensor | None) -> int:
    if gradient is None:
        return _NONE
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _sparse_mean(copies: Ranks, gradient: Tensor | None) -> Tensor:
    """The rows of all copies, put together; those of a row that several have are added up."""
    with connected(copies):
        own = None if gradient is None else gradient.coalesce()
        sent = None if own is None else (own.indices().cpu(), own.values().cpu(), own.shape)
        parts = [part for part in share.gather_objects(copies, sent) or [] if part is not None]
    indices = torch.cat([part[0] for part in parts], dim=1)
    values = torch.cat([part[1] for part in parts]) / copies.num_positions
    return torch.sparse_coo_tensor(indices, values, parts[0][2]).coalesce()


def _group_for(copies: Ranks, value: Tensor) -> dist.ProcessGroup | None:
    return copies.control_group if value.device.type == "cpu" else copies.pipeline_group


__all__ = ["agreed_kinds", "gather_values", "mean_gradients", "reduce_value"]
