"""Copies of the pipeline: how many there are, and what they have to do together.

Each copy trains on its own part of the data. Their gradients are averaged once in an optimizer
step, when a rank has accumulated its last batch: so later stages, which finish first, reduce theirs
while the others still run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime import share
from lightning_pipe.runtime._dtensor import forget_layouts
from lightning_pipe.runtime.axes import ORDER
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.reduce import gather_values, mean_gradients, reduce_value
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.parted import is_parted, part_of, parted_like

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are reduced over the copies.

    Attributes:
        bucket_cap_mb: MiB of a bucket.
        reduce_dtype: What is sent: "bf16", "fp16", "fp32", or None: the type of the gradients.
        is_sharded: Whether each copy holds a part of weights, gradients and optimizer state, and
            is given that part of the gradients only.
    """

    bucket_cap_mb: float = 25.0
    reduce_dtype: str | None = None
    is_sharded: bool = False

    def __post_init__(self) -> None:
        if self.reduce_dtype is not None and self.reduce_dtype not in _DTYPES:
            raise ConfigError(
                f"reduce_dtype={self.reduce_dtype!r}: give one of {', '.join(_DTYPES)}, or None: "
                "gradients are then sent as they are"
            )
        if not isinstance(self.is_sharded, bool):
            raise ConfigError(f"data_parallel_sharding={self.is_sharded!r}: give True or False")
        if isinstance(self.bucket_cap_mb, bool) or not self.bucket_cap_mb > 0:
            raise ConfigError(f"bucket_cap_mb={self.bucket_cap_mb!r}: give a number above 0")

    @property
    def dtype(self) -> torch.dtype | None:
        """What is sent."""
        return None if self.reduce_dtype is None else _DTYPES[self.reduce_dtype]

    @property
    def bucket_bytes(self) -> int:
        """Bytes of a bucket."""
        return max(1, int(self.bucket_cap_mb * 2**20))


def sizes_of(
    num_ranks: int | None, num_copies: int | None, world_size: int, tensor_size: int = 1
) -> tuple[int, int]:
    """Ranks of a pipeline, and copies of it.

    Args:
        num_ranks: `pipeline_parallel_size`; None for "auto".
        num_copies: `data_parallel_size`; None for "auto".
        world_size: Processes of the job.
        tensor_size: `tensor_parallel_size`.

    Raises:
        ConfigError: They are not the number of processes; with those that would be.
    """
    given = f" with tensor_parallel_size={tensor_size}" if tensor_size > 1 else ""
    times = f" x {tensor_size}" if tensor_size > 1 else ""
    if world_size % tensor_size:
        raise ConfigError(
            f"tensor_parallel_size={tensor_size} on {world_size} devices: each stage needs "
            f"{tensor_size} of them. Give a tensor_parallel_size of {_divisors(world_size)}, or a "
            f"multiple of {tensor_size} devices"
        )
    stages = world_size // tensor_size
    if num_ranks is None and num_copies is None:
        return stages, 1
    if num_ranks is None or num_copies is None:
        known = num_ranks or num_copies or 1
        name, free = ("pipeline", "data") if num_copies is None else ("data", "pipeline")
        if stages % known:
            raise ConfigError(
                f"{name}_parallel_size={known} on {world_size} devices{given}: {free}_parallel_"
                f"size='auto' cannot make their product {world_size}. Give a {name}_parallel_size "
                f"of {_divisors(stages)}, or a multiple of {known * tensor_size} devices"
            )
        rest = stages // known
        return (known, rest) if num_copies is None else (rest, known)
    if num_ranks * num_copies != stages:
        wanted = num_ranks * num_copies * tensor_size
        raise ConfigError(
            f"pipeline_parallel_size={num_ranks} on {world_size} devices with data_parallel_size="
            f"{num_copies}{given and ' and' + given[5:]}: {num_ranks} x {num_copies}{times} = "
            f"{wanted} processes are needed. Give devices={wanted} in all, or leave one of the two "
            "at 'auto'"
            + (f": data_parallel_size={stages // num_ranks}" if stages % num_ranks == 0 else "")
        )
    return num_ranks, num_copies


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def check_size(name: str, size: int | None) -> None:
    """Refuses what is no number of ranks.

    Raises:
        ConfigError: It is none.
    """
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigError(f"{name}={size!r}: give a whole number, 1 at least, or 'auto'")


def check_tensor_size(size: Any, reduction: Reduction | None) -> None:
    """Refuses what is no number of processes, and what cannot be together with several.

    Raises:
        ConfigError: With what would be legal.
    """
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ConfigError(f"tensor_parallel_size={size!r}: give a whole number, 1 at least")
    if size > 1 and reduction is not None and reduction.is_sharded:
        raise ConfigError(
            f"tensor_parallel_size={size} with data_parallel_sharding=True: what "
            "parallelize_module makes of weights is in parts already, and is not divided over the "
            "copies as well. Leave one of them out; more ranks of the pipeline "
            "(pipeline_parallel_size) save memory with either"
        )


def warn_of_one_copy(reduction: Reduction, ranks: Ranks) -> None:
    """Says that weights are not divided where there is nobody to divide them with."""
    if reduction.is_sharded and ranks.copies is None and ranks.is_first:
        warnings.warn(
            "data_parallel_sharding=True, and there is one copy of the pipeline: nothing is "
            "divided. Give data_parallel_size=2 or more, with as many times the devices, or leave "
            "data_parallel_sharding out",
            stacklevel=2,
        )


class Copies:
    """What one position does together with the same position of the other copies.

    Args:
        ranks: This rank.
        reduction: How gradients are reduced.
    """

    def __init__(self, ranks: Ranks, reduction: Reduction) -> None:
        self._ranks = ranks
        self._reduction = reduction

    def told(self, place: str, value: Any) -> list[Any]:
        """What all copies say at a place."""
        copies = self._ranks.copies
        if copies is None:
            return [value]
        with at(copies, place):
            return share.gather_objects(copies, value) or []

    def average(
        self, parameters: Mapping[str, nn.Parameter], owners: Mapping[str, tuple[int, ...]]
    ) -> None:
        """Puts the means over all copies into `.grad`; they are summed over stages already.

        Args:
            parameters: Those of this position.
            owners: The positions that hold a parameter, for those that several do. The first one
                averages and gives the mean to the others, so that all have the same bits.
        """
        copies = self._ranks.copies
        if copies is None:
            return
        mine = {
            name: part_of(parameter.grad)
            for name, parameter in parameters.items()
            if name not in owners or owners[name][0] == self._ranks.position
        }
        means = mean_gradients(
            copies,
            mine,
            {name: part_of(parameter) for name, parameter in parameters.items()},
            bucket_bytes=self._reduction.bucket_bytes,
            dtype=self._reduction.dtype,
        )
        shared = {name: means.get(name) for name in owners if name in parameters}
        if owners:
            means |= {
                name: mean
                for name, mean in share.sum_replicated(self._ranks, shared, owners).items()
                if mean is not None
            }
        for name, mean in means.items():
            like = parameters[name]
            like.grad = parted_like(like, mean) if is_parted(like) else mean


def make_mesh(ranks: Ranks, device: torch.device) -> DeviceMesh | None:
    """The ranks as a mesh with the axes "data_parallel", "pipeline" and "tensor_parallel".

    Along "pipeline" they are in the order of global ranks: the first one holds the last stage. Made
    of the groups that there are; every process of the job has to call this.
    """
    if ranks.world_size == 1:
        return None
    forget_layouts()
    alone = dist.new_group([ranks.global_rank], use_local_synchronization=True)
    lines = {line.axis: line.pipeline_group for line in (ranks, *ranks.others)}
    groups = [lines.get(axis) or alone for axis in ORDER]
    axes = ranks.axes
    numbers = torch.arange(ranks.world_size).view([axes.size(axis) for axis in axes.order])
    numbers = numbers.permute([axes.order.index(axis) for axis in ORDER])
    mesh: DeviceMesh = DeviceMesh.from_group(groups, device.type, numbers, mesh_dim_names=ORDER)
    return mesh


def gather_from_copies(value: Tensor, copies: Ranks, sync_grads: bool = False) -> Tensor:
    """The values of all copies, stacked; within a trace, their shape.

    Args:
        value: That of this copy.
        copies: This position in all copies.
        sync_grads: Whether gradients flow back to the copies.
    """

    def all_gather(value: Tensor) -> Tensor:
        given = value if sync_grads else value.detach()
        gathered: Tensor = _Gather.apply(given, copies)  # type: ignore[no-untyped-call]
        return gathered

    return _seen(all_gather, value)


def reduce_over_copies(value: Tensor, copies: Ranks, op: str = "mean") -> Tensor:
    """A value of all copies as one; within a trace, its shape.

    Args:
        value: That of this copy.
        copies: This position in all copies.
        op: As for :func:`~lightning_pipe.runtime.reduce.reduce_value`.
    """

    def reduce(value: Tensor) -> Tensor:
        return value.detach() if is_fake(value) else reduce_value(copies, value, op)

    return _seen(reduce, value)


def check_group(group: Any, copies: Ranks) -> None:
    """Refuses to reduce or gather over some ranks of a user's choice.

    Raises:
        ConfigError: The group is neither that of all processes nor that of the copies.
    """
    if group is None or group is dist.group.WORLD:
        return
    wanted = [copies.global_rank_of(copy) for copy in range(copies.num_positions)]
    if dist.get_process_group_ranks(group) != wanted:
        raise ConfigError(
            f"a group of the global ranks {dist.get_process_group_ranks(group)}: ranks of a "
            f"pipeline have the same values, so its copies ({wanted} here) are reduced and "
            "gathered. Leave `group` out, or use torch.distributed itself"
        )


def _seen(function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
    """Calls a function as one of torch's: the calls of a step are numbered, in its trace too."""
    if has_torch_function_unary(value):
        found: Tensor = handle_torch_function(function, (value,), value)
        return found
    return function(value)


def metric_sync(ranks: Ranks) -> Callable[[Tensor, Any], list[Tensor]] | None:
    """How a metric object gathers its states: from the copies; None if there is one."""
    copies = ranks.copies
    if copies is None:
        return None

    def gather(value: Tensor, group: Any = None) -> list[Tensor]:
        if is_fake(value):
            return [value] * copies.num_positions
        return gather_values(copies, value)

    return gather


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, copies: Ranks) -> Tensor:
        ctx.copies = copies
        if is_fake(value):
            return value.new_empty((copies.num_positions, *value.shape))
        return torch.stack(gather_values(copies, value))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = grads
        if not is_fake(gradient):
            gradient = reduce_value(ctx.copies, gradient, "sum")
        return gradient[ctx.copies.position], None


__all__ = [
    "Copies",
    "Reduction",
    "check_group",
    "check_size",
    "check_tensor_size",
    "gather_from_copies",
    "make_mesh",
    "metric_sync",
    "reduce_over_copies",
    "sizes_of",
]
