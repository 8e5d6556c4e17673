"""Which weights of a stage are gathered together, where each copy of the pipeline holds a part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipe.errors import ConfigError
from lightning_pipe.home import Home
from lightning_pipe.replicas import Reduction
from lightning_pipe.runtime import share
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.shards import ShardedWeights
from lightning_pipe.split.ownership import parameter_names
from lightning_pipe.split.parted import part_of


def shard_weights(
    module: nn.Module,
    home: Home,
    read: Collection[str],
    ranks: Ranks,
    device: torch.device,
    reduction: Reduction,
) -> ShardedWeights | None:
    """Shards the weights of this rank over the copies of its pipeline; None if there is one copy.

    Args:
        module: The user's module, cut.
        home: Where its weights are.
        read: First names of the weights that the training step reads.
        ranks: This rank.
        device: Where its stages live.
        reduction: How gradients are reduced.
    """
    copies = ranks.copies
    if copies is None:
        return None
    assert copies.pipeline_group is not None
    # torch takes meshes of equal names for one, also where the groups of the other are gone
    name = f"data_parallel_{copies.pipeline_group.group_name}"
    mesh = DeviceMesh.from_group(copies.pipeline_group, device.type, mesh_dim_names=(name,))
    return ShardedWeights(
        module, groups_of(module, home, read), copies, mesh, reduction.dtype, device
    )


def groups_of(module: nn.Module, home: Home, read: Collection[str]) -> list[list[str]]:
    """The parameters of this rank, a list for each unit, in the order in which a step needs them.

    What no unit has for itself, the code between them reads, and comes first; what the training
    step does not read (an average of the weights) comes last.
    """
    left = [name for name in parameter_names(module) if name in home.ownership.keep]
    units = list(dict.fromkeys([*home.cut.trace.unit_names, *home.stages_of_unit]))
    groups: list[list[str]] = []
    for unit in units:
        inside = f"{unit}." if unit else ""
        groups.append([name for name in left if name.startswith(inside)])
        left = [name for name in left if not name.startswith(inside)]
    groups.insert(0, left)
    trained = [[name for name in group if name in read] for group in groups]
    others = [[name for name in group if name not in read] for group in groups]
    return [group for group in (*trained, *others) if group]


def share_parts(
    weights: ShardedWeights, replicated: Mapping[str, tuple[int, ...]], ranks: Ranks
) -> None:
    """Gives ranks that hold a part of the same weight the same bits of its gradient.

    Args:
        weights: Of this rank.
        replicated: The positions that hold a weight, for those that several do.
        ranks: This rank.
    """
    owners = {name: held for name, held in replicated.items() if name in weights.everywhere}
    if not owners:
        return
    shards = {name: shard for name, shard in weights.shards.items() if name in owners}
    told: dict[str, Tensor | None] = dict.fromkeys(shards)
    for name, shard in shards.items():
        if owners[name][0] == ranks.position and shard.grad is not None:
            told[name] = part_of(shard.grad)
    for name, gradient in share.sum_replicated(ranks, told, owners).items():
        kept = shards[name].grad
        if gradient is not None and kept is not None:
            part_of(kept).copy_(gradient)


@contextmanager
def stepping_on_parts(optimizer: Optimizer, ranks: Ranks) -> Iterator[None]:
    """Says what to do where an optimizer cannot step on parts of weights.

    Args:
        optimizer: It steps within the body.
        ranks: This rank.

    Raises:
        ConfigError: It uses what torch's `DTensor` has no rule for.
    """
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        if "DTensor" not in str(error) and "placement" not in str(error):
            raise
        holder = "copy of the pipeline" if ranks.tensor is None else "process of a stage"
        instead = (
            "data_parallel_sharding=False"
            if ranks.tensor is None
            else "foreach=False and fused=False where shared and ordinary weights are mixed"
        )
        raise ConfigError(
            f"{type(optimizer).__name__} cannot step where each {holder} holds a part of the "
            f"weights: {str(error).splitlines()[0]} Use one that treats numbers one by one (SGD, "
            f"Adam, AdamW), or {instead}"
        ) from error
