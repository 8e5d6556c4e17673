"""Modules among the saved hyperparameters: those of the user's module have no weights here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_pipe.errors import CheckpointError
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.nest import leaves

_KEYS = ("hyper_parameters", "datamodule_hyper_parameters")


def with_weights(checkpoint: dict[str, Any], root: nn.Module) -> dict[str, Any]:
    """Gives modules in the hyperparameters of a checkpoint the weights of its state.

    ``save_hyperparameters()`` keeps what ``__init__`` was given, such as the network itself, of
    which a rank has its own stages only.

    Args:
        checkpoint: With the state of all stages.
        root: The user's module.

    Raises:
        CheckpointError: A module there has weights of other ranks that the state has not.
    """
    changed = {}
    for key in _KEYS:
        given = checkpoint.get(key)
        if isinstance(given, dict):
            held = {n: m for n, value in given.items() if (m := _modules(value))}
            lacking = {n for n, modules in held.items() if any(map(_lacks, modules))}
            if lacking:
                memo = _weights(root, checkpoint.get("state_dict", {}))
                copies = {n: _copied(n, given[n], memo) for n in given if n in lacking}
                changed[key] = {**given, **copies}
    return {**checkpoint, **changed}


def _modules(value: Any) -> list[nn.Module]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, nn.Module)]


def _lacks(module: nn.Module) -> bool:
    return any(is_fake(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _weights(root: nn.Module, state: Mapping[str, Any]) -> dict[int, Any]:
    """What a deep copy puts in the place of tensors that are on other ranks."""
    named = [
        *root.named_parameters(remove_duplicate=False),
        *root.named_buffers(remove_duplicate=False),
    ]
    found: dict[int, Any] = {}
    for name, tensor in named:
        value = state.get(name)
        if is_fake(tensor) and isinstance(value, Tensor) and id(tensor) not in found:
            value = value.detach()
            if isinstance(tensor, nn.Parameter):
                value = nn.Parameter(value, requires_grad=tensor.requires_grad)
            found[id(tensor)] = value
    return found


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    made = copy.deepcopy(value, dict(memo))
    if any(map(_lacks, _modules(made))):
        raise CheckpointError(
            f"the hyperparameter '{name}' holds a module with weights of other ranks, which are "
            "not in the checkpoint's state: take it out with "
            f"save_hyperparameters(ignore=['{name}'])"
        )
    return made
