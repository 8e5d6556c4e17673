"""The tail of a step, what follows its last unit, runs on the last stage only. This carries all
that it leaves behind to the other ranks: the step's output, logged values, metric states,
attributes and buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_pipe.split.microbatch import merge_values
from lightning_pipe.split.patching import attributes as patched
from lightning_pipe.split.tree import map_tensors
from lightning_pipe.tail.attributes import Attributes, Place
from lightning_pipe.tail.changes import Change
from lightning_pipe.tail.logs import LogCall, LogTape, MetricReference
from lightning_pipe.tail.metrics import MetricState, MetricTape


@dataclass(frozen=True, slots=True)
class Traces:
    """What the tail of one step leaves behind; sent from the last stage to all ranks."""

    output: Any
    logs: Sequence[LogCall]
    metrics: Mapping[int, MetricState]
    attributes: Mapping[Place, Change]

    def without_output(self) -> Traces:
        """The same for ranks that need not know what the step returned."""
        return replace(self, output=None)


class Tail:
    """The tail of the steps of one module, on one rank.

    Args:
        root: The user's LightningModule.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._outputs: list[Any] = []
        self._metrics = MetricTape(root)
        self._logs = LogTape(self._metrics.index_of)
        self._attributes = Attributes(root)

    def start(self, watched: Iterable[Place], changing: Iterable[Place] = ()) -> None:
        """Begins a step.

        Args:
            watched: Buffers outside of units, besides the module's own.
            changing: Attributes and buffers that its trace saw change outside of units.
        """
        self._outputs = []
        self._metrics.start()
        self._logs.start()
        self._attributes = Attributes(self._root, watched, changing)
        self._attributes.freeze()

    def find_metrics(self) -> None:
        """Looks for metrics that hooks have made since."""
        self._metrics.find()

    def release(self) -> None:
        """Gives metrics back their own way to synchronise."""
        self._metrics.release()

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Notes what one micro-batch does on the last stage, and undoes it."""
        self._logs.next_microbatch()
        try:
            with patched([(self._root, "log", self._logs.log)]), self._metrics.microbatch():
                yield
        except Exception:
            self._attributes.undo()
            raise
        self._attributes.take()

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undoes what a stage before the last changes: the last one re-runs it and is the one that
        counts."""
        try:
            yield
        finally:
            self._attributes.undo()

    def returned(self, value: Any) -> None:
        """Notes what the step returned for a micro-batch."""
        self._outputs.append(map_tensors(Tensor.detach, value))

    def finish(self, rows: Sequence[int]) -> Traces:
        """What the whole batch leaves behind; on the rank of the last stage, after the micro-
        batches."""
        return Traces(
            merge_values(self._outputs, rows),
            self._logs.merged(rows),
            self._metrics.finish(rows),
            self._attributes.merged(rows),
        )

    def apply(self, traces: Traces, *, is_last: bool) -> Any:
        """Leaves the traces on this rank, as the step would have; returns the step's output."""
        if not is_last:
            self._metrics.apply(traces.metrics)
        self._attributes.apply(traces.attributes)
        for call in traces.logs:
            value = call.value
            if isinstance(value, MetricReference):
                value = self._metrics.metrics[value.index]
            self._root.log(call.name, value, **call.kwargs)  # type: ignore[operator]
        return traces.output
