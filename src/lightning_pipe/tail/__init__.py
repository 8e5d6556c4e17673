"""The tail of a step, what follows its last unit, runs on the last stage only. This carries all
that it leaves behind to the other ranks: the step's output, logged values, metric states,
attributes and buffers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_pipe.split.microbatch import NumberMemory
from lightning_pipe.split.patching import attributes as patched
from lightning_pipe.split.tree import map_tensors
from lightning_pipe.tail import loggers
from lightning_pipe.tail.attributes import Attributes, Place
from lightning_pipe.tail.changes import Change
from lightning_pipe.tail.loggers import LoggerCall
from lightning_pipe.tail.logs import LogCall, LogTape, MetricReference
from lightning_pipe.tail.losses import LossWeights, need_loss, split_loss
from lightning_pipe.tail.metrics import MetricState, MetricTape, Sync
from lightning_pipe.tail.notes import Notes, PrintCall, differences, merged_prints
from lightning_pipe.tail.shown import show_loss


@dataclass(frozen=True, slots=True)
class Traces:
    """What the tail of one step leaves behind; sent from the last stage to all ranks."""

    output: Any
    logs: Sequence[LogCall]
    metrics: Mapping[int, MetricState]
    attributes: Mapping[Place, Change]
    prints: Sequence[PrintCall] = ()
    #: what the gradients of the step are multiplied with
    correction: float = 1.0
    #: what the guards of the last stage tell the others
    told: Any = None

    def without_output(self) -> Traces:
        """The same for ranks that need not know what the step returned."""
        return replace(self, output=None)


class Tail:
    """The tail of the steps of one module, on one rank.

    Args:
        root: The user's LightningModule.
        sync: How metrics gather their states from copies of the pipeline; None if there are none.
    """

    def __init__(self, root: nn.Module, sync: Sync | None = None) -> None:
        self._root = root
        self._notes = Notes(())
        self._losses = LossWeights()
        self._metrics = MetricTape(root, sync)
        self._logs = LogTape(self._metrics.index_of)
        self._numbers = NumberMemory()
        self._step = ""
        self._attributes = Attributes(root, memory=self._numbers)

    def start(
        self,
        rows: Sequence[int],
        watched: Iterable[Place],
        changing: Iterable[Place] = (),
        step: str = "",
    ) -> None:
        """Begins a step.

        Args:
            rows: Rows of the micro-batches.
            watched: Buffers outside of units, besides the module's own.
            changing: Attributes and buffers that its trace saw change outside of units.
            step: Its name.
        """
        self._step = step
        self._losses = LossWeights(rows)
        self._metrics.start()
        self._attributes.close()
        self._attributes = Attributes(self._root, watched, changing, memory=self._numbers)
        self._attributes.freeze()
        self._swap(Notes(rows))

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
        prints: list[PrintCall] = []
        self._notes.prints.append(prints)
        said: list[LoggerCall] = []
        self._notes.loggers.append(said)

        def noted(*values: Any, **kwargs: Any) -> None:
            prints.append(PrintCall(values, kwargs))  # detached later: it is no call of the step

        replaced = [
            (self._root, "log", self._logs.log),
            (self._root, "print", noted),
            *loggers.noting(self._root, said),
        ]
        try:
            with patched(replaced), self._metrics.microbatch():
                yield
        except Exception:
            self._attributes.undo()
            raise
        for index, call in enumerate(prints):
            prints[index] = replace(call, values=map_tensors(Tensor.detach, call.values))
        loggers.detached(said)
        self._attributes.take()

    def whole(self, run: Callable[[], Any]) -> Notes:
        """Notes what one run on the whole batch does, apart from the micro-batches.

        Args:
            run: Runs the tail of the step on the whole batch; returns what the step returned.
        """
        kept = self._swap(Notes((sum(self._notes.rows),)))
        try:
            with self.microbatch():
                value = run()
            self._notes.outputs.append(map_tensors(Tensor.detach, value))
            loss, weight = split_loss(value)
            if weight is not None:
                self._logs.weigh(loss, weight)
        finally:
            notes = self._swap(kept)
        return notes

    def differences(self, whole: Notes) -> list[str]:
        """Names what the merged micro-batches leave otherwise than the whole batch does."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of values that cannot be merged; they are found here
            merged = self._merged()
        kept = self._swap(whole)
        try:
            return list(differences(merged, self._merged()))
        finally:
            self._swap(kept)

    def loss_differs(self, whole: Notes) -> bool:
        """Whether the loss of the whole batch is another than that of its micro-batches."""
        loss, trained = split_loss(whole.outputs[0])[0], split_loss(self._output())[0]
        return any(differences(trained, loss, "loss"))

    def use(self, whole: Notes, *, training: bool) -> None:
        """Takes what the whole batch left for what the step left.

        Args:
            whole: What it left.
            training: Whether gradients were taken: then the loss stays the one of these.
        """
        if training:
            loss, trained = split_loss(whole.outputs[0])[0], split_loss(self._output())[0]
            show_loss(whole, need_loss(loss), need_loss(trained))
        self._swap(whole)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undoes what a stage before the last changes: the last one re-runs it and is the one that
        counts."""
        try:
            with patched(loggers.noting(self._root, [])):
                yield
        finally:
            self._attributes.undo()

    def returned(self, value: Any, microbatch: int) -> tuple[Any, float]:
        """Notes what the step returned for a micro-batch; they come in their order.

        Returns:
            Its loss, and what that is multiplied with before the backward.
        """
        outputs = self._notes.outputs
        assert microbatch == len(outputs), "the last stage takes micro-batches in order"
        outputs.append(map_tensors(Tensor.detach, value))
        loss, weight = split_loss(value)
        factor = self._losses.factor(weight)
        if weight is not None:
            self._logs.weigh(loss, weight)
        return loss, factor

    @property
    def is_weighted(self) -> bool:
        """Whether the step gives weights to its losses."""
        return any(weight is not None for weight in self._losses.given)

    @property
    def asks_metrics(self) -> bool:
        """Whether the step calls metrics for their values of a batch, and not only updates them."""
        return any(call.method == "forward" for calls in self._metrics.calls for call in calls)

    def finish(self) -> Traces:
        """What the whole batch leaves behind; on the rank of the last stage, after the micro-
        batches."""
        rows = self._notes.rows
        return Traces(
            self._output(),
            self._logs.merged(rows),
            self._metrics.finish(rows),
            self._attributes.merged(rows),
            merged_prints(self._notes.prints, rows, self._numbers),
            self._losses.correction,
        )

    @property
    def total(self) -> float | str:
        """What the loss of the batch divides by, after the micro-batches."""
        return self._losses.total

    def among_copies(self, traces: Traces, totals: Sequence[Any]) -> Traces:
        """Gives a step its share among those of all copies of the pipeline.

        Their gradients, and what they log with `sync_dist`, are averaged; the loss of all their
        rows is a mean with weights.

        Args:
            traces: Of this copy.
            totals: What the losses of all copies divide by.
        """
        correction = self._losses.correction_among(totals)
        if correction == traces.correction:
            return traces
        total = self._losses.total
        share = correction if isinstance(total, str) else total * len(totals) / sum(totals)
        logs = [call.scaled(share) if call.is_synced_loss else call for call in traces.logs]
        return replace(traces, correction=correction, logs=logs)

    def _output(self) -> Any:
        outputs = self._notes.outputs
        if len(outputs) == 1:
            return outputs[0]
        return self._losses.merged_output(outputs, self._numbers, self._step)

    def _merged(self) -> dict[str, Any]:
        """All that is left behind, by what users call it."""
        rows, output = self._notes.rows, self._output()
        if isinstance(output, Tensor) and not output.dim():
            output = {"loss": output}
        logged = {
            f"log({call.name!r})": (call.value, call.kwargs) for call in self._logs.merged(rows)
        }
        attributes = {
            ".".join(filter(None, place[:2])): change
            for place, change in self._attributes.merged(rows).items()
        }
        calls = self._metrics.merged_calls(rows)
        prints = merged_prints(self._notes.prints, rows, self._numbers)
        said = [
            (noted.logger, repr(noted.call.path), noted.call.args, noted.call.kwargs)
            for noted in loggers.merged_calls(self._notes.loggers, rows, self._numbers)
        ]
        return {
            "output": output,
            "logged": logged,
            "self": attributes,
            "metrics": calls,
            "prints": prints,
            "loggers": said,
        }

    def _swap(self, notes: Notes) -> Notes:
        before, self._notes = self._notes, notes
        self._logs.calls, self._metrics.calls = notes.logs, notes.metrics
        self._attributes.changes = notes.attributes
        return before

    def apply(self, traces: Traces, *, is_last: bool) -> None:
        """Leaves the traces on this rank, as the step would have."""
        if is_last:
            said = loggers.merged_calls(self._notes.loggers, self._notes.rows, self._numbers)
            loggers.make_calls(self._root, said)
        else:
            self._metrics.apply(traces.metrics)
        self._attributes.apply(traces.attributes)
        for text in traces.prints:
            self._root.print(*text.values, **text.kwargs)  # type: ignore[operator]
        for call in traces.logs:
            value = call.value
            if isinstance(value, MetricReference):
                value = self._metrics.metrics[value.index]
            self._root.log(call.name, value, **call.kwargs)  # type: ignore[operator]
