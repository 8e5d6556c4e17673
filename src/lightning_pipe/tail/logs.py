"""`self.log` in a step: noted per micro-batch, merged, and logged once per key on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pipe.split.microbatch import merge_values, weighted_mean
from lightning_pipe.split.parted import as_ordinary
from lightning_pipe.split.tree import map_tensors
from lightning_pipe.tail.losses import LossWeights, Weight


@dataclass(frozen=True, slots=True)
class MetricReference:
    """Stands for a metric object in a message."""

    index: int


@dataclass(frozen=True, slots=True)
class LogCall:
    """One call of `self.log`."""

    name: str
    value: Any
    kwargs: dict[str, Any]
    #: that of the step's loss, where the loss is what is logged
    weight: Weight = None

    @property
    def is_synced_loss(self) -> bool:
        """Whether a loss that has a weight will be averaged over copies of the pipeline."""
        return self.weight is not None and bool(self.kwargs.get("sync_dist"))

    def scaled(self, factor: float) -> LogCall:
        """The same with a multiple of its value; that of nothing, which is no number, is 0."""
        return replace(self, value=self.value * factor if factor else 0.0)


class LogTape:
    """What the micro-batches of a step logged.

    Args:
        index_of: Gives the number of a metric object.
    """

    def __init__(self, index_of: Callable[[Any], int]) -> None:
        self._index_of = index_of
        self.calls: list[list[LogCall]] = []

    def start(self) -> None:
        """Begins a step."""
        self.calls = []

    def next_microbatch(self) -> None:
        """Begins a micro-batch."""
        self.calls.append([])

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Notes a call; takes what `LightningModule.log` takes."""
        kwargs.update(zip(_POSITIONAL, args, strict=False))
        kwargs.pop("sync_dist_group", None)  # peers are the copies of the pipeline, if any
        value = as_ordinary(value)
        if isinstance(value, Metric):
            value = MetricReference(self._index_of(value))
        elif not kwargs.get("enable_graph"):
            value = map_tensors(torch.Tensor.detach, value)
        self.calls[-1].append(LogCall(name, value, kwargs))

    def weigh(self, loss: Any, weight: Weight) -> None:
        """Gives the weight of the loss of this micro-batch to the calls that logged this loss."""
        self.calls[-1] = [
            replace(call, weight=weight) if _is_same(call.value, loss) else call
            for call in self.calls[-1]
        ]

    def merged(self, rows: Sequence[int]) -> list[LogCall]:
        """One call per key, in the order of their first appearance."""
        columns: dict[tuple[str, int], list[tuple[LogCall, int]]] = {}
        for calls, size in zip(self.calls, rows, strict=True):
            times: dict[str, int] = {}
            for call in calls:
                occurrence = times[call.name] = times.get(call.name, -1) + 1
                columns.setdefault((call.name, occurrence), []).append((call, size))
        return [_merge(column) for column in columns.values()]


_POSITIONAL = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)


def _is_same(value: Any, loss: Any) -> bool:
    if not isinstance(loss, Tensor):
        return False
    if isinstance(value, Tensor):
        return value.data_ptr() == loss.data_ptr() and value.shape == loss.shape
    return isinstance(value, float) and value == loss.item()


def _merge(column: Sequence[tuple[LogCall, int]]) -> LogCall:
    first = column[0][0]
    weights = [call.weight for call, _ in column]
    if weights[0] is not None:
        losses = LossWeights([size for _, size in column])
        losses.given = weights
        return _with_batch_size(
            replace(first, value=losses.merged([call.value for call, _ in column])), column
        )
    sizes = [call.kwargs.get("batch_size") or size for call, size in column]
    values = [call.value for call, _ in column]
    value = _reduce(values, sizes, first.kwargs.get("reduce_fx", "mean"))
    return _with_batch_size(replace(first, value=value), column)


def _with_batch_size(merged: LogCall, column: Sequence[tuple[LogCall, int]]) -> LogCall:
    """The batch size of the whole batch: the sum, unless the user gave that of the whole batch."""
    sizes: list[int | None] = [call.kwargs.get("batch_size") for call, _ in column]
    if any(size is None for size in sizes):
        return merged
    whole = set(sizes) == {sum(rows for _, rows in column)}
    batch_size = sizes[0] if whole else sum(size for size in sizes if size is not None)
    return replace(merged, kwargs={**merged.kwargs, "batch_size": batch_size})


def _reduce(values: Sequence[Any], sizes: Sequence[int], reduce_fx: Any) -> Any:
    first = values[0]
    if isinstance(first, MetricReference) or len(values) == 1:
        return first
    if isinstance(first, dict):
        return {key: _reduce([value[key] for value in values], sizes, reduce_fx) for key in first}
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    tensors = [torch.as_tensor(value) for value in values]
    if name in ("sum", "min", "max"):
        stacked = torch.stack(tensors)
        merged = getattr(torch, "a" + name if name != "sum" else name)(stacked, 0)
    elif all(torch.equal(tensor, tensors[0]) for tensor in tensors):
        merged = tensors[0]
    elif tensors[0].is_floating_point():
        merged = weighted_mean(tensors, sizes)
    else:
        merged = torch.as_tensor(merge_values(tensors, sizes))
    return merged if isinstance(first, Tensor) else merged.item()
