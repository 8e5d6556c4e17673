"""Tensors of a stage that several processes share, as `parallelize_module` has made them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.shards import own_part


def check_shared_tensors(module: nn.Module, ranks: Ranks) -> None:
    """Refuses tensors that other processes share than those of a stage.

    Args:
        module: The user's module, built.
        ranks: This rank.

    Raises:
        ConfigError: With the name of one, and with what to write.
    """
    shared = {name: value for name, value in _tensors_of(module) if isinstance(value, DTensor)}
    sharers = [ranks.global_rank]
    if ranks.tensor is not None:
        sharers = [ranks.tensor.global_rank_of(p) for p in range(ranks.tensor.num_positions)]
    for name, value in shared.items():
        mesh = value.device_mesh
        if mesh.ndim != 1 or mesh.mesh.flatten().tolist() != sharers:
            raise ConfigError(
                f"{name} is shared by the processes {mesh.mesh.tolist()}, and those of this stage "
                f"are {sharers} (tensor_parallel_size={len(sharers)}). In configure_model, give "
                'parallelize_module self.device_mesh["tensor_parallel"]; the pipeline and its '
                "copies are made by the strategy"
            )
        if any(placement.is_partial() for placement in value.placements):
            raise ConfigError(
                f"{name} is laid out as {value.placements}: a weight is Shard(dim) or Replicate()"
            )
    if len(sharers) > 1 and not shared and ranks.reads and not ranks.data_parallel_rank:
        warnings.warn(
            f"tensor_parallel_size={len(sharers)}, and no weight is shared: each of the "
            f"{len(sharers)} processes of a stage computes all of it. Call parallelize_module on "
            'self.device_mesh["tensor_parallel"] in configure_model, or leave '
            "tensor_parallel_size out",
            stacklevel=2,
        )


def laid_out_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A whole state with this process's part in the places of shared tensors."""
    shared = {name: value for name, value in _tensors_of(module) if isinstance(value, DTensor)}
    return {
        name: own_part(shared[name], value)
        if name in shared and isinstance(value, Tensor) and not isinstance(value, DTensor)
        else value
        for name, value in state.items()
    }


def _tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


__all__ = ["check_shared_tensors", "laid_out_state"]
