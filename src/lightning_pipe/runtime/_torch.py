"""The seam to torch: the only file that knows private names of `torch.distributed`.

What is used of `torch.distributed.pipelining` is its lowering pass, which puts sends and receives
into a schedule in an order that cannot deadlock, and its action runtime, which runs the result. Its
stages are replaced: theirs allocate the receive buffers of all micro-batches at once, in the shape
of the first, infer shapes by running the user's step, and keep what was sent to the end of the
step. `tests/runtime/test_seam.py` fails when one of these names or signatures changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.nn.utils import clip_grad

from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.split.parted import is_parted, part_of

_OPS = {
    Op.FORWARD: _ComputationType.FORWARD,
    Op.BACKWARD: _ComputationType.FULL_BACKWARD,
    Op.INPUT: _ComputationType.BACKWARD_INPUT,
    Op.WEIGHT: _ComputationType.BACKWARD_WEIGHT,
}


class Chunk(Protocol):
    """A stage as the runtime drives it: one call per action, in the order of the schedule."""

    def receive_forward(self, microbatch: int) -> None:
        """Starts to receive the stage's inputs."""

    def forward(self, microbatch: int) -> tuple[Tensor, ...]:
        """Waits for the inputs, runs the stage and returns what the next stage gets."""

    def send_forward(self, microbatch: int) -> None:
        """Starts to send what `forward` returned."""

    def hand_forward(self, microbatch: int, values: tuple[Tensor, ...]) -> None:
        """Takes the inputs from the previous stage on the same rank."""

    def receive_backward(self, microbatch: int) -> None:
        """Starts to receive the gradients of the stage's outputs."""

    def backward(self, microbatch: int, *, full: bool) -> None:
        """Waits for the output gradients and computes the input gradients; if full, all others."""

    def weight(self, microbatch: int) -> None:
        """Computes the weight gradients that `backward(full=False)` left."""

    def send_backward(self, microbatch: int) -> None:
        """Starts to send the gradients of the stage's inputs."""

    def take_backward(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """Gives up the gradients of the stage's inputs, for the previous stage on the same rank."""

    def hand_backward(self, microbatch: int, grads: tuple[Tensor | None, ...]) -> None:
        """Takes the output gradients from the next stage on the same rank."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A schedule with sends and receives in it, for `run`."""

    orders: dict[int, list[_Action]]
    stage_to_rank: tuple[int, ...]
    num_ranks: int
    num_microbatches: int
    has_backward: bool


def lower(schedule: Schedule) -> Lowered:
    """Puts sends and receives into a schedule.

    Each receive is placed where its send is, in one order over all ranks. So any two ranks agree on
    the order of their messages, which NCCL needs, and a rank that waits for the message with the
    lowest number always finds its peer already there, which is why nothing deadlocks.
    """
    stage_to_rank = schedule.stage_to_rank
    compute = {
        rank: [_Action(a.stage, _OPS[a.op], a.microbatch) for a in schedule.actions(rank)]
        for rank in range(schedule.num_ranks)
        if schedule.actions(rank)
    }
    orders = _add_send_recv(compute, stage_to_rank.__getitem__, schedule.num_stages)
    return Lowered(
        orders,
        stage_to_rank,
        schedule.num_ranks,
        schedule.num_microbatches,
        schedule.has_backward,
    )


@dataclass(frozen=True, slots=True)
class Deed:
    """One entry of a lowered order, in words of our own.

    Attributes:
        kind: "compute", "send" or "receive".
        stage: The stage that does it.
        microbatch: Of which micro-batch.
        op: What is computed; for a message, `Op.FORWARD` for values and `Op.BACKWARD` for
            gradients.
    """

    kind: str
    stage: int
    microbatch: int
    op: Op

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{self.microbatch}"
        return text if self.kind == "compute" else f"{self.kind} of {text}"


_DEEDS = {
    **{computed: ("compute", op) for op, computed in _OPS.items()},
    _ComputationType.SEND_F: ("send", Op.FORWARD),
    _ComputationType.SEND_B: ("send", Op.BACKWARD),
    _ComputationType.RECV_F: ("receive", Op.FORWARD),
    _ComputationType.RECV_B: ("receive", Op.BACKWARD),
}


def deeds(lowered: Lowered) -> dict[int, list[Deed]]:
    """What each rank will do, in its order."""
    found: dict[int, list[Deed]] = {}
    for rank, order in lowered.orders.items():
        found[rank] = []
        for action in order:
            kind, op = _DEEDS[action.computation_type]
            microbatch = action.microbatch_index
            assert microbatch is not None, "what we lower has micro-batches"
            found[rank].append(Deed(kind, action.stage_index, microbatch, op))
    return found


def run(lowered: Lowered, position: int, chunks: Mapping[int, Chunk], device: torch.device) -> None:
    """Runs one rank's order; an exception of a chunk comes out as it was raised."""
    if not lowered.orders.get(position):
        return
    stages = [_Stage(chunks[index], index, lowered, position, device) for index in sorted(chunks)]
    runtime = _Runtime(stages, lowered.num_microbatches)
    runtime.stage_index_to_group_rank = dict(enumerate(lowered.stage_to_rank))
    runtime.pipeline_order_with_comms = lowered.orders
    with _quiet():
        runtime._step_microbatches(return_outputs=False)


def post(sends: bool, tensors: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> list[Any]:
    """Starts sends to, or receives from, a global rank and returns the works to wait for.

    Torch's own `_batch_p2p` decides how: it coalesces mixed batches only, because coalesced
    operations share one CUDA stream, where a receive that has to wait holds up the send behind it.
    """
    op = dist.isend if sends else dist.irecv
    return list(_batch_p2p([dist.P2POp(op, tensor, peer, group) for tensor in tensors]))


def default_store() -> Any:
    """The store through which the processes of this job found each other.

    Returned as a client of its own: one that waits does not keep the others from the store.
    """
    store: Any = _get_default_store()  # its type does not know `clone`
    return store.clone()


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime without its preparation: chunks know their shapes, so nothing is inferred."""

    def __init__(self, stages: list[Any], num_microbatches: int) -> None:
        # The loss carries the weight of its micro-batch: nothing is scaled afterwards.
        super().__init__(stages, num_microbatches, scale_grads=False)  # type: ignore[no-untyped-call]

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        return


class _Stage(PipelineStage):
    """Lets torch's runtime drive a `Chunk`.

    Does not call the base constructor, which wants a process group (P = 1 has none) and a module.
    The runtime is given no communication to wait for: chunks start and await their own, just in
    time.
    """

    def __init__(
        self, chunk: Chunk, index: int, lowered: Lowered, position: int, device: torch.device
    ) -> None:
        self.submod = nn.Module()  # the runtime asks only whether it is sharded
        self.stage_index = index
        self.num_stages = len(lowered.stage_to_rank)
        self.device = device
        self.group = None
        self.group_rank = position
        self.group_size = lowered.num_ranks
        self.stage_index_to_group_rank = dict(enumerate(lowered.stage_to_rank))
        self.has_backward = lowered.has_backward
        self._chunk = chunk

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._chunk.receive_forward(fwd_chunk_id)
        return []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._chunk.send_forward(fwd_chunk_id)
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._chunk.receive_backward(bwd_chunk_id)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._chunk.send_backward(bwd_chunk_id)
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self._chunk.hand_forward(mb_index, prev_stage_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return self._chunk.take_backward(mb_index)

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int
    ) -> None:
        self._chunk.hand_backward(mb_index, next_stage_bwd_outputs)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> tuple[Tensor, ...]:
        return self._chunk.forward(fwd_chunk_id)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._chunk.backward(bwd_chunk_id, full=full_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._chunk.weight(bwd_chunk_id)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the runtime from logging the whole schedule at an exception, which carries a note
    instead.
    """
    logger = logging.getLogger(_PipelineScheduleRuntime.__module__)
    was = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was


@contextmanager
def total_norm_replaced(replacement: Callable[..., Tensor]) -> Iterator[None]:
    """Lets `clip_grad_norm_` and `get_total_norm` take another norm.

    Args:
        replacement: Called with torch's function and the arguments of `get_total_norm`.
    """
    own = clip_grad._get_total_norm
    replaced = partial(replacement, own)
    places: list[tuple[Any, str]] = [
        (clip_grad, "_get_total_norm"),
        (torch.nn.utils, "get_total_norm"),
    ]
    for place, name in places:
        setattr(place, name, replaced)
    try:
        yield
    finally:
        for place, name in places:
            setattr(place, name, own)


class SharedScaler(ShardedGradScaler):
    """A loss scaler of which all processes of a group skip the same steps.

    torch's own asks the others only where it unscales. A fused optimizer unscales by itself, and
    would be told of the gradients of its process alone.
    """

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales parts beside ordinary gradients, which one kernel cannot; it writes to them."""

        def part(parameter: Tensor) -> Any:
            gradient = parameter.grad
            return SimpleNamespace(grad=part_of(gradient)) if is_parted(gradient) else parameter

        groups = [{"params": [part(p) for p in g["params"]]} for g in optimizer.param_groups]
        parts: Any = SimpleNamespace(param_groups=groups)
        return super()._unscale_grads_(parts, *args, **kwargs)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        found: dict[str, Any] = super()._check_inf_per_device(optimizer)
        for found_inf in found.values():  # a kernel compares with 1
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=self.process_group)
        return found


class Sharded:
    """Parameters sharded by `fully_shard`, in modules of its own: without hooks on the user's.

    Args:
        groups: Parameters that are gathered and reduced together.
        mesh: The processes that share them, along one dimension.
        reduce_dtype: What gradients are sent as, if not as they are.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[nn.Parameter]],
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        root = nn.Module()
        self._holders: list[Any] = []
        for number, parameters in enumerate(groups):
            holder = nn.Module()
            for place, parameter in enumerate(parameters):
                holder.register_parameter(str(place), parameter)
            root.add_module(str(number), holder)
            fully_shard(holder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            self._holders.append(holder)
        self._root: Any = fully_shard(root, mesh=mesh, mp_policy=policy)
        self._state: Any = self._root._get_fsdp_state()
        self._state._lazy_init()  # streams; torch does it in the first forward, which we have not
        self._pending: dict[int, Any] = {}

    def shards(self, number: int) -> list[nn.Parameter]:
        """The sharded parameters of a group, as `DTensor`s."""
        return list(self._holders[number]._parameters.values())

    def gather(self, number: int) -> None:
        """Starts to gather a group."""
        self._pending[number] = self._holders[number].unshard(async_op=True)

    def wait(self, number: int) -> list[Tensor]:
        """Waits until a group is there, and returns the values of its parameters."""
        self._pending.pop(number).wait()
        return [parameter.data for parameter in self._holders[number]._parameters.values()]

    def free(self, number: int) -> None:
        """Frees what was gathered; whoever holds the values has tensors without memory."""
        self._holders[number].reshard()

    def reduce(self, gradients: Sequence[Sequence[Tensor | None]]) -> None:
        """Adds the mean of gradients to those of the shards.

        Args:
            gradients: Of all groups; None counts as no gradient, and has to be so everywhere.
        """
        for holder, of_group in zip(self._holders, gradients, strict=True):
            for group in holder._get_fsdp_state()._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    name = parameter._module_info.param_name
                    gradient = of_group[int(name)]
                    if gradient is not None:
                        parameter.unsharded_param.grad = gradient
        self._root.set_is_last_backward(True)
        self._root.set_requires_gradient_sync(True)
        # what torch's own pipeline stages call, too: it reduces every group that has gradients
        self._state._root_post_backward_final_callback()
