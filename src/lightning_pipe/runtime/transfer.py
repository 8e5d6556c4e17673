"""Tensors between neighbouring ranks: what goes on the wire, and how long it is kept.

Both sides know name, shape and type of every value beforehand (`ValueSpec`), so only contents
travel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import PeerError, StageMismatchError
from lightning_pipe.runtime._torch import post
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.spec import ValueSpec

# Messages under way to one peer before the sender waits for the oldest. Every wait is for a message
# that is earlier in the schedule than the sender is, and so is safe (see `_torch.lower`).
_MAX_UNDER_WAY = 8

# Types that both gloo and NCCL know; others travel as bytes.
_WIRE_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32}
    | {torch.int8, torch.uint8, torch.bool}
)


Moved = Tensor | ValueSpec | None
"""What goes to another rank or comes from it, as far as it is known."""


@dataclass(slots=True, eq=False)
class Message:
    """Tensors under way, in one direction.

    Attributes:
        works: What to wait for; emptied by the wait, since to wait for the same send a second time
            never ends on gloo.
        tensors: Kept alive until then.
    """

    works: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    def done(self) -> bool:
        """Whether all of it has arrived, as far as can be told without waiting."""
        return all(work.is_completed() for work in self.works)


class Links:
    """A rank's connections to the others, for one step.

    Args:
        ranks: This rank.
        device: Where values live.
        waits: Told of a wait until a rank has taken what it was sent: which one, and whether the
            wait is over.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        waits: Callable[[int, bool], None] = lambda position, is_over: None,
    ) -> None:
        self._ranks = ranks
        self._device = device
        self._waits = waits
        self._sent: dict[int, deque[Message]] = {}

    def send(self, values: Sequence[Tensor], position: int) -> Message:
        """Starts to send values to a rank."""
        wire = [_to_wire(value) for value in values if value.numel()]
        message = self._post(True, wire, position)
        sent = self._sent.setdefault(position, deque())
        sent.append(message)
        while sent and (len(sent) > _MAX_UNDER_WAY or sent[0].done()):
            self._wait_sent(sent.popleft(), position)
        return message

    def receive(
        self, specs: Sequence[ValueSpec], position: int
    ) -> tuple[Message, tuple[Tensor, ...]]:
        """Starts to receive values from a rank.

        Returns:
            What to wait for before the values are read, and the values.
        """
        values = tuple(empty(spec, self._device) for spec in specs)
        wire = [_to_wire(value) for value in values if value.numel()]
        return self._post(False, wire, position), values

    def settle(self, message: Message, position: int) -> None:
        """Waits for what was sent and forgets it; used when a reply shows that it arrived."""
        self._wait_sent(message, position)
        sent = self._sent[position]
        self._sent[position] = deque(other for other in sent if other is not message)

    def wait(self, message: Message, position: int, what: object = "") -> None:
        """Waits until a message has arrived.

        Args:
            message: The message.
            position: Where it comes from, or goes to.
            what: What this rank does meanwhile, for an error.
        """
        try:
            for work in message.works:
                work.wait()
            message.works = message.tensors = ()
        except RuntimeError as error:
            where = f" where it {what}" if str(what) else ""
            raise PeerError(
                f"{self._ranks}: the connection to rank {position} "
                f"(global rank {self._ranks.global_rank_of(position)}) broke{where}; the reason is "
                f"in that rank's output. Here: {error}"
            ) from error

    def finish(self) -> None:
        """Waits for all that was sent."""
        for position, sent in self._sent.items():
            while sent:
                self._wait_sent(sent.popleft(), position)

    def _wait_sent(self, message: Message, position: int) -> None:
        if not message.works:
            return
        self._waits(position, False)
        self.wait(message, position)
        self._waits(position, True)

    def _post(self, sends: bool, tensors: Sequence[Tensor], position: int) -> Message:
        group = self._ranks.pipeline_group
        assert group is not None, "another rank to talk to means a group to talk through"
        peer = self._ranks.global_rank_of(position)
        try:
            return Message(tuple(post(sends, tensors, peer, group)), tuple(tensors))
        except RuntimeError as error:
            raise PeerError(
                f"{self._ranks}: cannot reach rank {position} (global rank {peer}): {error}"
            ) from error


def empty(spec: ValueSpec, device: torch.device) -> Tensor:
    """A tensor to receive a value into."""
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def zeros(spec: ValueSpec, device: torch.device) -> Tensor:
    """The gradient of a value on which nothing depends."""
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def check_values(
    specs: Sequence[ValueSpec], values: Sequence[Tensor], made: Iterable[int], stage: int
) -> None:
    """Refuses values other than the neighbour expects, before they break the connection.

    Args:
        specs: The boundary.
        values: What the stage returned for it.
        made: Which of them are to be sent; the others are relayed.
        stage: Its index.

    Raises:
        StageMismatchError: With the name of the value and both shapes and types.
    """
    if len(values) != len(specs):
        raise StageMismatchError(
            f"stage {stage} gave {len(values)} values; its boundary has {len(specs)}: "
            f"{', '.join(spec.name for spec in specs)}"
        )
    for spec, value in ((specs[index], values[index]) for index in made):
        if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
            raise StageMismatchError(
                f"stage {stage} gave {spec.name!r} as {describe(value)}; the next stage was told "
                f"{describe(spec)}. The step does not do the same with every micro-batch"
            )


def describe(value: Tensor | ValueSpec) -> str:
    """Shape and type as text."""
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def _to_wire(value: Tensor) -> Tensor:
    """The memory of a value in a form that can be sent; not a copy if it is contiguous."""
    value = value.detach().resolve_conj().resolve_neg().contiguous()
    if value.dtype in _WIRE_DTYPES:
        return value
    return value.reshape(-1).view(torch.uint8)
