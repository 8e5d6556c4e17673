"""What the ranks of a pipeline tell each other besides boundary values.

Objects travel over the control group (gloo, on the host), so they never queue behind activations.
Every function here is called by all ranks of the pipeline, unless it says otherwise, and does
nothing when there is one rank.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.errors import ConfigError, CutError, GuardError
from lightning_pipe.runtime.packing import (
    Packed,
    TensorSpec,
    as_bytes,
    empty_tensors,
    pack,
    unpack,
    unpicklable,
)
from lightning_pipe.runtime.ranks import Ranks, talks

T = TypeVar("T")

_SMALL_BYTES = 1 << 18  # smaller tensors travel together, larger ones from where they are


@dataclass(frozen=True, slots=True)
class _Refused:
    """In the place of an object that cannot be pickled."""

    text: str


@talks
def broadcast_object(
    ranks: Ranks,
    value: T | None,
    source: int,
    *,
    what: str = "an object",
    error: type[Exception] = CutError,
) -> T:
    """Gives the object of one position to all.

    Args:
        ranks: This rank.
        value: The object, on the source; ignored elsewhere.
        source: The position that has it.
        what: What it is, for the message.
        error: What is raised, on all ranks, if it cannot be pickled.
    """
    if ranks.num_positions == 1:
        return cast(T, value)
    packed = None
    if ranks.position == source:
        sent = _sendable(value, what)
        packed = sent if isinstance(sent, Packed) else pack(sent)
    received = unpack(_broadcast(ranks, packed, source))
    if isinstance(received, _Refused):
        raise error(received.text)
    return cast(T, received)


class Handing:
    """Gives the objects of one position to all, which take them when they get there.

    A broadcast over gloo holds its source until the last rank takes part. Here the source goes on
    at once; it waits at its next object for those who have not taken the last one.

    Args:
        ranks: This rank.
        what: What the objects are, for messages.
    """

    def __init__(self, ranks: Ranks, what: str) -> None:
        self._ranks = ranks
        self._what = what
        self._under_way: list[tuple[Any, Tensor]] = []

    def __call__(self, value: T | None, source: int) -> T:
        """Gives an object, or takes it; called by all.

        Args:
            value: The object, on the source; ignored elsewhere.
            source: The position that has it.

        Raises:
            CutError: It cannot be pickled; on all ranks.
        """
        if self._ranks.num_positions == 1:
            return cast(T, value)
        found = _hand_out(self._ranks, self, value, source)
        if isinstance(found, _Refused):
            raise CutError(found.text)
        return cast(T, found)

    def give(self, value: Any, source: int) -> Any:
        """The object, on its way to the others."""
        for work, _ in self._under_way:
            work.wait()
        sent = _sendable(value, self._what)
        group = self._ranks.control_group
        peers = [p for p in range(self._ranks.num_positions) if p != source]
        self._under_way = [
            (dist.isend(buffer, self._ranks.global_rank_of(peer), group=group), buffer)
            for buffer in _to_buffers(sent if isinstance(sent, Packed) else pack(sent))
            for peer in peers
        ]
        return value if isinstance(sent, Packed) else sent


@talks
def _hand_out(ranks: Ranks, handing: Handing, value: Any, source: int) -> Any:
    if ranks.position == source:
        return handing.give(value, source)
    return receive_object(ranks, source)


def _sendable(value: Any, what: str) -> Packed | _Refused:
    """An object as it is sent, or why it cannot be."""
    try:
        return pack(value)
    except Exception as reason:
        text = (
            f"{what} cannot be given to the other ranks of the pipeline: {unpicklable(value)} "
            f"cannot be pickled ({reason}). Keep tensors, numbers, texts and containers of "
            "them there, and make other objects on every rank, in __init__ or a hook"
        )
        return _Refused(text)


@talks
def gather_objects(ranks: Ranks, value: T, target: int | None = None) -> list[T] | None:
    """Collects the objects of all positions.

    Args:
        ranks: This rank.
        value: The object of this rank.
        target: The position that gets them; None for all.

    Returns:
        The objects by position, where they are wanted; None elsewhere.
    """
    if ranks.num_positions == 1:
        return [value]
    # By place in the group; the group does not know positions.
    gathered: list[Any] = [None] * ranks.num_positions
    if target is None:
        dist.all_gather_object(gathered, value, group=ranks.control_group)
    else:
        wanted = ranks.position == target
        dist.gather_object(
            value,
            gathered if wanted else None,
            dst=ranks.global_rank_of(target),
            group=ranks.control_group,
        )
        if not wanted:
            return None
    return [gathered[place] for place in ranks.order]


@talks
def broadcast_read(ranks: Ranks, value: T | None, instead: Callable[[Exception], T]) -> T:
    """Gives what the first global rank of the pipeline has read to all.

    Args:
        ranks: This rank.
        value: What that rank has read; ignored elsewhere.
        instead: Makes what all are given in its place if it cannot be pickled, of the reason.

    Returns:
        The value, on that rank the very object.
    """
    if ranks.num_positions == 1:
        return cast(T, value)
    packed = None
    if ranks.is_first:
        try:
            packed = pack(value)
            if not packed.tensors:  # as for exceptions, which may pickle and not come back
                unpack(packed)
        except Exception as error:
            value = instead(error)
            packed = pack(value)
    received = _broadcast(ranks, packed, ranks.first_position)
    return cast(T, value if ranks.is_first else unpack(received))


def broadcast_everywhere(
    ranks: Ranks, value: T | None, source: int = 0, *, of_part: bool = False
) -> T:
    """Gives the object of a global rank to all ranks of all pipelines.

    Args:
        ranks: This rank.
        value: The object, on the source; ignored elsewhere.
        source: The global rank that has it.
        of_part: Whether it differs between those that share the tensors of a stage; each is then
            given that of its own part.
    """
    lines = [line for line in (ranks, *ranks.others) if not of_part or line is not ranks.tensor]
    for number, line in enumerate(lines):
        # its own line first, then what is across of each in it
        if all(other.position == other.position_of(source) for other in lines[number + 1 :]):
            value = broadcast_object(line, value, line.position_of(source))
    return cast(T, value)


def gather_everywhere(ranks: Ranks, value: T) -> list[T]:
    """Collects the objects of all ranks of all pipelines, those of one together by position."""
    found = gather_objects(ranks, value) or []
    for others in ranks.others:
        found = [one for part in gather_objects(others, found) or [] for one in part]
    return found


@talks
def send_object(ranks: Ranks, value: Any, target: int) -> None:
    """Sends an object to a position, which has to call `receive_object`. Called by one rank."""
    peer = ranks.global_rank_of(target)
    for buffer in _to_buffers(pack(value)):
        dist.send(buffer, peer, group=ranks.control_group)


@talks
def receive_object(ranks: Ranks, source: int) -> Any:
    """Receives what `send_object` sends. Called by one rank."""
    peer = ranks.global_rank_of(source)
    return unpack(_from_buffers(lambda b: dist.recv(b, peer, group=ranks.control_group)))


@talks
def sum_replicated(
    ranks: Ranks,
    grads: Mapping[str, Tensor | None],
    owners: Mapping[str, Sequence[int]],
    checksums: Mapping[str, int] | None = None,
) -> dict[str, Tensor | None]:
    """Sums the gradients of parameters that several positions hold.

    The first owner adds them up in the order of the owners and returns the sum, so all get the same
    bits each time. Messages go in the order of the names, which is the same everywhere.

    Args:
        ranks: This rank.
        grads: The gradients of this rank's replicated parameters; None where there is none.
        owners: For every replicated parameter of the model the positions that hold it, without
            repetition, the same on all ranks.
        checksums: Of the values of this rank's replicated parameters, if they are to be compared.

    Raises:
        GuardError: Two positions have other values of a parameter; on all ranks.

    Returns:
        The sums of this rank's parameters, None where no owner has a gradient. Tensors of `grads`
        may have been written to.
    """
    mine = {
        name: list(positions)
        for name, positions in sorted(owners.items())
        if ranks.position in positions and len(positions) > 1
    }
    missing = sorted(set(mine) - set(grads))
    assert not missing, f"no gradients given for {missing}"
    for name in mine:
        grad = grads[name]
        if grad is not None and grad.layout != torch.strided:
            raise ConfigError(
                f"{name}: its gradient is {grad.layout} and it is used on ranks {mine[name]}; only "
                "dense gradients can be summed over stages. Use sparse=False"
            )
    own = {name: (_grad_spec(grads[name]), (checksums or {}).get(name)) for name in mine}
    told = gather_objects(ranks, own)
    assert told is not None
    _refuse_different(told)
    present = [{name: spec for name, (spec, _) in other.items()} for other in told]
    sums = dict(grads)
    for name, positions in mine.items():
        specs = {p: present[p][name] for p in positions if present[p][name] is not None}
        if specs:
            sums[name] = _sum_over(ranks, grads[name], positions, specs)
    return sums


def _refuse_different(told: Sequence[Mapping[str, tuple[Any, int | None]]]) -> None:
    """Raises if a parameter has other values on one position than on another."""
    for name in sorted({name for other in told for name in other}):
        sums = {p: other[name][1] for p, other in enumerate(told) if name in other}
        known = {p: checksum for p, checksum in sums.items() if checksum is not None}
        if len(set(known.values())) > 1:
            raise GuardError(
                f"the weight {name} is on several ranks and no longer the same on them: its "
                f"checksums by rank are {known}. Something writes to it on one rank alone: take a "
                "condition on the rank (`is_global_zero`, `global_rank == 0`) away from what "
                "changes weights"
            )


def _sum_over(
    ranks: Ranks, grad: Tensor | None, positions: list[int], specs: Mapping[int, Any]
) -> Tensor:
    """The sum over owners; `specs` has (shape, dtype, device type) of those with a gradient."""
    root, group = positions[0], ranks.pipeline_group
    shape, dtype, device_type = next(iter(specs.values()))
    if ranks.position != root:
        peer = ranks.global_rank_of(root)
        if grad is not None:
            dist.send(grad.contiguous(), peer, group=group)
        result = torch.empty(shape, dtype=dtype, device=device_type)
        dist.recv(result, peer, group=group)
        return result
    total = grad
    for position in positions[1:]:
        if position in specs:
            other = torch.empty(shape, dtype=dtype, device=device_type)
            dist.recv(other, ranks.global_rank_of(position), group=group)
            total = other if total is None else total.add_(other)
    assert total is not None
    total = total.contiguous()
    for position in positions[1:]:
        dist.send(total, ranks.global_rank_of(position), group=group)
    return total


def _grad_spec(grad: Tensor | None) -> tuple[tuple[int, ...], torch.dtype, str] | None:
    return None if grad is None else (tuple(grad.shape), grad.dtype, grad.device.type)


def _broadcast(ranks: Ranks, packed: Packed | None, source: int) -> Packed:
    first, group = ranks.global_rank_of(source), ranks.control_group
    if packed is not None:
        for buffer in _to_buffers(packed):
            dist.broadcast(buffer, first, group=group)
        return packed
    return _from_buffers(lambda buffer: dist.broadcast(buffer, first, group=group))


def _to_buffers(packed: Packed) -> list[Tensor]:
    """What goes over the wire: sizes; the pickle with all small tensors; each large tensor."""
    head = pickle.dumps((packed.structure, packed.specs))
    small = [as_bytes(t) for t in packed.tensors if 0 < t.nbytes < _SMALL_BYTES]
    body = torch.cat([torch.frombuffer(bytearray(head), dtype=torch.uint8), *small])
    large = [as_bytes(t) for t in packed.tensors if t.nbytes >= _SMALL_BYTES]
    return [torch.tensor([len(head), len(body)]), body, *large]


def _from_buffers(receive: Any) -> Packed:
    sizes = torch.empty(2, dtype=torch.int64)
    receive(sizes)
    num_head, num_body = sizes.tolist()
    body = torch.empty(num_body, dtype=torch.uint8)
    receive(body)
    structure, specs = pickle.loads(body[:num_head].numpy().tobytes())
    tensors = empty_tensors(cast("tuple[TensorSpec, ...]", specs))
    start = num_head
    for tensor in tensors:
        if 0 < tensor.nbytes < _SMALL_BYTES:
            as_bytes(tensor).copy_(body[start : start + tensor.nbytes])
            start += tensor.nbytes
        elif tensor.nbytes:
            receive(as_bytes(tensor))
    return Packed(structure, specs, tensors)
