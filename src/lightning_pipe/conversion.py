"""Another device or precision for a module whose tensors processes share.

torch exchanges such a tensor (`DTensor`) when it moves or converts a module, even where nothing
changes, and refuses that while anything else holds it: the optimizer or the trainer of an earlier
run. What would not change is therefore left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.split.parted import is_parted
from lightning_pipe.split.stand_ins import put_parameter


def converted(module: nn.Module, convert: Callable[[nn.Module], Any]) -> Any:
    """Converts a module; shared tensors that are what they would become are not touched.

    Args:
        module: The user's module.
        convert: What converts a module, in place.

    Returns:
        What `convert` returns.

    Raises:
        ConfigError: A shared tensor would change and is still in use.
    """
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False)
        if is_parted(parameter)
    ]
    stays = {kind: _stays(kind, convert) for kind in {_kind(p) for *_, p in places}}
    left_out = [place for place in places if stays[_kind(place[-1])]]
    for owner, name, _ in left_out:
        owner.register_parameter(name, None)
    try:
        return convert(module)
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise ConfigError(
            f"weights of {type(module).__name__} that processes share (parallelize_module) are to "
            "have another precision or device than in an earlier run, which still holds them: "
            f"{error.__cause__}. Build the module anew for this run"
        ) from error
    finally:
        for owner, name, parameter in left_out:
            put_parameter(owner, name, parameter)


Kind = tuple[torch.dtype, torch.device]


def _kind(parameter: nn.Parameter) -> Kind:
    return parameter.dtype, parameter.device


def _stays(kind: Kind, convert: Callable[[nn.Module], Any]) -> bool:
    """Whether tensors of this type and device stay as they are, tried on an empty one."""
    dtype, device = kind
    probe = nn.Module()
    probe.register_parameter(
        "weight", nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    )
    convert(probe)
    return _kind(probe.get_parameter("weight")) == kind


__all__ = ["converted"]
