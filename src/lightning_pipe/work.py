"""One step over the stages of this rank, as the engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import PipelineError
from lightning_pipe.guards import Finite
from lightning_pipe.home import CutStep
from lightning_pipe.iterated import Iterated
from lightning_pipe.runtime.accelerator import is_out_of_memory
from lightning_pipe.runtime.shards import sparse_weights
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.ends import Skipped, StepResult
from lightning_pipe.split.graph import leaves_of
from lightning_pipe.split.nest import copy_tensors, describe
from lightning_pipe.split.parted import as_ordinary
from lightning_pipe.split.rng import mix
from lightning_pipe.split.rows import Pieces
from lightning_pipe.split.saved import KeptBytes
from lightning_pipe.split.snapshot import Snapshot
from lightning_pipe.split.spec import ValueSpec
from lightning_pipe.split.trace import ValueKey
from lightning_pipe.split.units import modules_of
from lightning_pipe.statistics import DeferredStatistics
from lightning_pipe.synced import SyncedNorms
from lightning_pipe.tail import Tail
from lightning_pipe.tail.denominators import Denominators
from lightning_pipe.tail.losses import need_loss

Context = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class StepRun:
    """One step while it runs.

    Attributes:
        module: The user's module.
        tail: What takes the traces of the last stage.
        context: The precision context of a step, by its name.
        name: Name of the step method.
        rest: Its arguments after the batch.
        pieces: The micro-batches.
        cuts: The cut of each.
        key: Random key of the step.
        training: Whether a loss is wanted.
        loss_scale: What the loss is multiplied with, besides its share of the rows.
        trial: Takes what goes wrong while derived cuts are watched; None if there are none.
        record: Values to keep of each micro-batch, on the last stage.
        recorded: These, one tuple per micro-batch.
        denominators: What watches the losses of the last stage, if anything does.
        metrics: The metric objects of the module; looked for in each micro-batch if None.
        statistics: What notes the running statistics of batch norms, if they are deferred.
        iterated: Gives micro-batches the same vectors of spectral norms, if the step trains.
        kept: Counts what is kept for the backward, in steps that are watched for it.
        finite: Takes note of what is made, to find what is not finite.
        weights: Weights of each stage of this rank.
        synced: Batch norms that wait for the other copies of the pipeline.
        need: Called before a stage first runs: its weights may still be on their way.
    """

    module: nn.Module
    tail: Tail
    context: Context
    name: str
    rest: tuple[Any, ...]
    pieces: Pieces
    cuts: Sequence[CutStep]
    key: int
    training: bool
    loss_scale: float
    trial: Trial | None = None
    record: Sequence[ValueKey] | None = None
    recorded: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    denominators: Denominators | None = None
    metrics: Sequence[nn.Module] | None = None
    statistics: DeferredStatistics | None = None
    iterated: Iterated | None = None
    kept: KeptBytes | None = None
    finite: Finite | None = None
    weights: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    synced: SyncedNorms | None = None
    need: Callable[[int], None] | None = None

    def run(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.synced is not None:
            with self.synced.needing_losses():
                return self._run(stage, microbatch, received)
        if self.trial is None:
            return self._run(stage, microbatch, received)
        try:
            return self._run(stage, microbatch, received)
        except Exception as error:
            if is_out_of_memory(error):  # another trace would need as much
                raise
            self.trial.note(error)
            specs = self.cuts[microbatch].programs[stage].outputs
            is_last = self.cuts[microbatch].programs[stage].is_last
            return self.trial.stand_in(specs, has_loss=is_last and self.training)

    def _run(self, stage: int, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        program = self.cuts[microbatch].programs[stage]
        if self.iterated is not None:
            self.iterated.restart(partial(self.cuts[microbatch].units_of_others, stage))
        piece = self.pieces.batches[microbatch]
        if len(self.pieces.batches) > 1 or len(self.cuts[microbatch].programs) > 1:
            piece = copy_tensors(piece)
        step = partial(getattr(self.module, self.name), piece, *self.rest)
        key = mix(self.key, microbatch)
        traces = self.tail.microbatch() if program.is_last else self.tail.undone()
        record = (self.record or ()) if program.is_last else ()
        watch = self.denominators if program.is_last else None
        kept = nullcontext() if self.kept is None else self.kept.counting(stage, microbatch)
        counted = (
            nullcontext()
            if self.statistics is None
            else self.statistics.microbatch(stage, microbatch)
        )
        said = noted(self.name, piece) if len(self.pieces.batches) > 1 else nullcontext()
        with self.context(self.name), traces, kept, counted, said:
            result = program.run(
                step,
                received,
                key=key,
                record=record,
                watch=watch,
                metrics=self.metrics,
                keep_random=self.metrics is None,
            )
        if not isinstance(result, StepResult):
            if self.finite is not None:
                self.finite.note(stage, microbatch, program.inputs, program.outputs, result)
            return result
        self.recorded.append(result.recorded)
        if self.training and result.value is None:
            raise Skipped
        value = as_ordinary(result.value)
        if self.training:
            need_loss(value)
        loss, factor = self.tail.returned(value, microbatch)
        if self.finite is not None and factor != 0:
            self.finite.note_loss(microbatch, loss)
        return (self._weighted(loss, factor, received),) if self.training else ()

    def _weighted(self, loss: Tensor, factor: float, received: tuple[Tensor, ...]) -> Tensor:
        """The loss of a micro-batch as it goes backward."""
        if factor == 0 and self.synced is not None:
            raise Skipped
        if factor == 0:
            return self._nothing(loss, received)
        weight = factor * self.loss_scale
        return loss if weight == 1.0 else loss * weight

    def _nothing(self, loss: Tensor, received: tuple[Tensor, ...]) -> Tensor:
        """A loss of zero: the mean of a micro-batch that counts nothing is not a number, and so
        would its gradients be. They are zero for all that the loss was made of, which is not none.
        """
        sparse = sparse_weights(self.module)  # whose optimizers take no dense zeros
        reached = [t for t in leaves_of(loss) if not is_fake(t) and id(t) not in sparse]
        roots = {id(t): t for t in (*received, *reached) if t.requires_grad}.values()
        nothing = torch.zeros((), device=loss.device, requires_grad=True)
        for root in roots:
            nothing = nothing + as_ordinary((0.0 * root).nan_to_num().sum()).float()
        return nothing


class Trial:
    """A step whose cuts were derived and may be wrong: nothing of it counts until all ranks agree.

    A stage that finds its cut to be wrong goes on with zeros, so that no other stage waits for it;
    the step is undone afterwards and runs again on cuts that are traced.

    Args:
        module: The user's module.
        device: Where its stages live.
        units: Modules whose attributes need not be put back: a step of a known way does not change
            those, and of one that may leave it all others count. None if its way is known.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, units: Collection[str] | None = None
    ) -> None:
        self._device = device
        self._outside = None if units is None else Snapshot(module, units)
        buffers = [b for m in modules_of(module) for b in m._buffers.values() if b is not None]
        self._buffers = [(b, b.detach().clone()) for b in buffers if not is_fake(b)]
        self.error: str | None = None

    def note(self, error: Exception) -> None:
        """A stage of this rank has failed."""
        if self.error is None:
            self.error = f"{type(error).__name__}: {error}"

    def stand_in(self, specs: Sequence[ValueSpec], *, has_loss: bool) -> tuple[Tensor, ...]:
        """What a stage returns that has failed."""
        if has_loss:
            return (torch.zeros((), device=self._device, requires_grad=True),)
        return tuple(
            torch.zeros(spec.shape, dtype=spec.dtype, device=self._device) for spec in specs
        )

    def undo(self) -> None:
        """Puts what the step changed back as it was; gradients and traces are thrown away by
        others."""
        if self._outside is not None:
            self._outside.restore()
        with torch.no_grad():
            for buffer, content in self._buffers:
                if not torch.equal(buffer, content):
                    buffer.copy_(content)


class StageOfStep:
    """One local stage of a step, as the engine sees it."""

    def __init__(self, step: StepRun, stage: int) -> None:
        self._step = step
        self._stage = stage
        self._has_run = False

    def inputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return self._step.cuts[microbatch].programs[self._stage].inputs

    def outputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        return self._step.cuts[microbatch].programs[self._stage].outputs

    def weights(self) -> Sequence[Tensor]:
        return self._step.weights.get(self._stage, ())

    def recomputes(self, microbatch: int) -> bool:
        return self._step.cuts[microbatch].programs[self._stage].recomputes

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self._has_run and self._step.need is not None:
            self._step.need(self._stage)
        self._has_run = True
        return self._step.run(self._stage, microbatch, received)


@contextmanager
def noted(name: str, piece: Any) -> Iterator[None]:
    """Says with an exception of the user's step that it saw one micro-batch."""
    try:
        yield
    except PipelineError:
        raise
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(
                f"{name} was given a micro-batch: {describe(piece)}. If it fails only because it "
                "needs all rows of the batch together, use num_microbatches=1; if something in it "
                "was split along the wrong dimension, or should be whole, say so with split_batch"
            )
        raise
