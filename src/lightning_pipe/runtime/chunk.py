"""One stage within one step: its inputs, graphs and gradients, from F to the end of B or W.

A relayed value never enters the stage's autograd graph as an output. It goes on as it came, and the
gradient that comes back for it is added to the one that this stage computes:

    inputs   h ──► stage ──► h'    outputs        gradients   h ◄── stage ◄── h'
             e ─┬─► stage                                     e ◄─(+)◄─ stage
                └──────────► e                                     └◄───────── e
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from lightning_pipe.errors import GuardError
from lightning_pipe.planning.ir import Action, Op
from lightning_pipe.runtime.backward import backward_full, backward_input
from lightning_pipe.runtime.progress import Wait
from lightning_pipe.runtime.transfer import Links, Message, Moved, check_values, describe, zeros
from lightning_pipe.split.spec import ValueSpec

if TYPE_CHECKING:
    from lightning_pipe.runtime.engine import StageWork

Grads = tuple[Tensor | None, ...]


class Observer(Protocol):
    """Who wants to know what a stage is doing."""

    def waits(self, wait: Wait) -> None:
        """A wait for another rank begins."""

    def waited(self) -> None:
        """It is over."""

    def moves(self, action: Action, is_sent: bool, position: int, values: Sequence[Moved]) -> None:
        """Values are on their way to another rank, or from one to an action."""

    def starts(self, action: Action, values: Sequence[Moved]) -> Any:
        """An action begins with some values; what is returned comes back in `ends`."""

    def ends(self, action: Action, start: Any) -> None:
        """The action has ended."""


@dataclass(slots=True)
class _Forwarded:
    """What a micro-batch leaves behind for its backward."""

    leaves: tuple[Tensor, ...]  # of the inputs that require gradients
    roots: tuple[Tensor, ...]  # outputs that require gradients, or the loss
    root_indices: tuple[int, ...]  # their places among the outputs


class StageChunk:
    """A stage of this rank, for one step; driven by `_torch.run`."""

    def __init__(
        self,
        work: StageWork,
        stage: int,
        rank_of: Sequence[int],
        *,
        links: Links,
        observer: Observer,
        device: torch.device,
        training: bool,
    ) -> None:
        self._work = work
        self._stage = stage
        self._is_last = stage == len(rank_of) - 1
        self._previous = rank_of[stage - 1] if stage else rank_of[stage]
        self._next = rank_of[stage] if self._is_last else rank_of[stage + 1]
        self._rank = rank_of[stage]
        self._links = links
        self._observer = observer
        self._device = device
        self._training = training
        # By micro-batch; an entry is popped by whoever needs it last.
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._arriving: dict[int, Message] = {}
        self._outputs: dict[int, tuple[Tensor, ...]] = {}
        self._sent: dict[int, Message] = {}
        self._forwarded: dict[int, _Forwarded] = {}
        self._output_grads: dict[int, Grads] = {}
        self._arriving_grads: dict[int, Message] = {}
        self._input_grads: dict[int, Grads] = {}
        self._weights: dict[int, Callable[[], None]] = {}
        self._versions: dict[int, int] = {}
        self._watched = tuple(work.weights()) if training else ()

    # Forward

    def receive_forward(self, microbatch: int) -> None:
        specs = self._work.inputs(microbatch)
        action = Action(self._stage, Op.FORWARD, microbatch)
        self._observer.moves(action, False, self._previous, specs)
        message, values = self._links.receive(specs, self._previous)
        self._arriving[microbatch] = message
        self._inputs[microbatch] = values

    def hand_forward(self, microbatch: int, values: tuple[Tensor, ...]) -> None:
        self._inputs[microbatch] = values

    def forward(self, microbatch: int) -> tuple[Tensor, ...]:
        action = Action(self._stage, Op.FORWARD, microbatch)
        specs = self._work.inputs(microbatch)
        self._wait(self._arriving.pop(microbatch, None), action, self._stage - 1, specs)
        values = self._inputs.pop(microbatch, ())
        assert len(values) == len(specs), "a stage gets the values of its boundary"
        leaves, given = self._make_leaves(specs, values)
        with self._noted(action, specs), self._observed(action, specs):
            returned = self._work.forward(microbatch, given)
        if self._training:
            self._versions[microbatch] = self._version()
        if self._is_last:
            if self._training:
                self._forwarded[microbatch] = _Forwarded(leaves, returned, ())
            return ()
        received = {spec.name: value for spec, value in zip(specs, values, strict=True)}
        return self._keep_outputs(microbatch, received, leaves, returned)

    def send_forward(self, microbatch: int) -> None:
        outputs = self._outputs.pop(microbatch)
        action = Action(self._stage, Op.FORWARD, microbatch)
        self._observer.moves(action, True, self._next, self._work.outputs(microbatch))
        self._sent[microbatch] = self._links.send(outputs, self._next)
        if not self._training:
            del self._sent[microbatch]

    # Backward

    def receive_backward(self, microbatch: int) -> None:
        specs = [spec for spec in self._work.outputs(microbatch) if spec.requires_grad]
        action = Action(self._stage, Op.BACKWARD, microbatch)
        self._observer.moves(action, False, self._next, specs)
        message, values = self._links.receive(specs, self._next)
        self._arriving_grads[microbatch] = message
        arriving = iter(values)
        self._output_grads[microbatch] = tuple(
            next(arriving) if spec.requires_grad else None
            for spec in self._work.outputs(microbatch)
        )

    def hand_backward(self, microbatch: int, grads: Grads) -> None:
        self._output_grads[microbatch] = grads

    def backward(self, microbatch: int, *, full: bool) -> None:
        action = Action(self._stage, Op.BACKWARD if full else Op.INPUT, microbatch)
        message = self._arriving_grads.pop(microbatch, None)
        specs = self._work.outputs(microbatch)
        self._wait(message, action, self._stage + 1, specs)
        if microbatch in self._sent:
            self._links.settle(self._sent.pop(microbatch), self._next)
        forwarded = self._forwarded.pop(microbatch)
        grads = self._output_grads.pop(microbatch, ())
        roots = forwarded.roots
        root_grads: Grads = (None,) * len(roots)
        if not self._is_last:
            # None: the next stage, on this rank, found no way from its outputs to the value; as
            # the gradient of a root it would mean that of a loss, one
            pairs = zip(roots, (grads[i] for i in forwarded.root_indices), strict=True)
            known = [(root, grad) for root, grad in pairs if grad is not None]
            roots, root_grads = tuple(r for r, _ in known), tuple(g for _, g in known)
        with self._noted(action), self._observed(action, grads):
            self._check_version(microbatch)
            # where a forward runs again, half a backward would cost a whole forward
            if full or self._work.recomputes(microbatch):
                backward_full(roots, root_grads)
                found = tuple(leaf.grad for leaf in forwarded.leaves)
                if not full:
                    self._weights[microbatch] = lambda: None
            else:
                found, self._weights[microbatch] = backward_input(
                    roots, root_grads, forwarded.leaves
                )
        self._input_grads[microbatch] = self._join_relayed(microbatch, found, grads)
        if full:
            del self._versions[microbatch]

    def weight(self, microbatch: int) -> None:
        action = Action(self._stage, Op.WEIGHT, microbatch)
        run = self._weights.pop(microbatch)
        with self._noted(action), self._observed(action):
            self._check_version(microbatch)
            run()
        del self._versions[microbatch]

    def send_backward(self, microbatch: int) -> None:
        specs = self._work.inputs(microbatch)
        grads = self._input_grads.pop(microbatch)
        values = [
            zeros(spec, self._device) if grad is None else grad
            for spec, grad in zip(specs, grads, strict=True)
            if spec.requires_grad
        ]
        if values:
            action = Action(self._stage, Op.BACKWARD, microbatch)
            self._observer.moves(action, True, self._previous, values)
            self._links.send(values, self._previous)

    def take_backward(self, microbatch: int) -> Grads:
        return self._input_grads.pop(microbatch)

    # Parts

    def _version(self) -> int:
        """Goes up whenever a weight of the stage is written to."""
        return sum([weight._version for weight in self._watched])

    def _check_version(self, microbatch: int) -> None:
        """Refuses to mix the gradients of two versions of the weights."""
        if self._version() != self._versions[microbatch]:
            raise GuardError(
                f"a weight of stage {self._stage} was written to between the forward of micro-"
                f"batch {microbatch} and its backward, so the gradient would be that of no weights "
                "that there were. Change weights between steps (in a hook or an optimizer), not in "
                "the step"
            )

    def _make_leaves(
        self, specs: Sequence[ValueSpec], values: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The leaves of this stage's graph, and the inputs made of them that the stage may write
        to.
        """
        leaves, given = [], []
        for spec, value in zip(specs, values, strict=True):
            value = value.detach()
            if self._training and spec.requires_grad:
                leaves.append(value.requires_grad_())
                value = cast(Tensor, _Enter.apply(value))  # type: ignore[no-untyped-call]
            given.append(value)
        return tuple(leaves), tuple(given)

    def _keep_outputs(
        self,
        microbatch: int,
        received: dict[str, Tensor],
        leaves: tuple[Tensor, ...],
        returned: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        specs = self._work.outputs(microbatch)
        made = {i: spec for i, spec in enumerate(specs) if spec.name not in received}
        check_values(specs, returned, made, self._stage)
        outputs = tuple(
            returned[i].detach() if i in made else received[spec.name]
            for i, spec in enumerate(specs)
        )
        if self._training:
            roots = {
                i: returned[i]
                for i, spec in made.items()
                if spec.requires_grad and returned[i].requires_grad
            }
            self._forwarded[microbatch] = _Forwarded(leaves, tuple(roots.values()), tuple(roots))
        if self._next != self._rank:
            self._outputs[microbatch] = outputs
        return outputs

    def _join_relayed(self, microbatch: int, found: Grads, output_grads: Grads) -> Grads:
        """The gradient of each input: what this stage found, plus what came back for a relay."""
        outputs = self._work.outputs(microbatch)
        passing = dict(zip((spec.name for spec in outputs), output_grads, strict=False))
        own = iter(found)
        return tuple(
            _add(next(own), passing.get(spec.name)) if spec.requires_grad else None
            for spec in self._work.inputs(microbatch)
        )

    def _wait(
        self, message: Message | None, action: Action, stage: int, specs: Sequence[ValueSpec]
    ) -> None:
        if message is not None and message.works:
            rank = self._previous if stage < self._stage else self._next
            wait = Wait(rank, stage, action, specs)
            self._observer.waits(wait)
            self._links.wait(message, rank, wait)
            self._observer.waited()

    @contextmanager
    def _observed(self, action: Action, values: Sequence[Moved] = ()) -> Iterator[None]:
        start = self._observer.starts(action, values)
        yield
        self._observer.ends(action, start)

    @contextmanager
    def _noted(self, action: Action, specs: Sequence[ValueSpec] = ()) -> Iterator[None]:
        """Says in an exception where it happened; its type stays the user's."""
        try:
            yield
        except BaseException as error:
            if hasattr(error, "add_note"):  # Python 3.11
                given = "".join(f", given {spec.name} {describe(spec)}" for spec in specs)
                error.add_note(
                    f"stage {self._stage}, rank {self._rank}, action {action}, "
                    f"micro-batch {action.microbatch}{given}"
                )
            raise


class _Enter(torch.autograd.Function):
    """The identity, without a copy; unlike a leaf, its result may be written to by the stage."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _add(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
