"""Weights that a module has made on the meta device: made for real, and initialised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.split._fake import num_users, storage_key
from lightning_pipe.split.tree import tensors

_RESETS = ("reset_parameters", "_reset_parameters")


class Absent:
    """What of a module was on the meta device, and what of that has no value yet.

    Args:
        device: Where it is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: by its storage: a name, and the storage
        self._unwritten: dict[int, tuple[str, Any]] = {}

    def make(self, module: nn.Module) -> None:
        """Makes what is on the meta device, and initialises it module by module."""
        made: dict[int, Tensor] = {}
        resets = []
        for name, child in _inside_out(module).items():
            spaces: Sequence[dict[str, Any]] = (child._parameters, child._buffers)
            absent = [
                (space, key)
                for space in spaces
                for key, value in space.items()
                if value is not None and value.is_meta
            ]
            for space, key in absent:
                value = space[key]
                if id(value) not in made:
                    made[id(value)] = real = self._real(value)
                    label = f"{name}.{key} ({type(child).__name__})".lstrip(".")
                    self._unwritten[storage_key(real)] = label, real.untyped_storage()
                space[key] = made[id(value)]
            if absent:
                resets.append(next((getattr(child, n) for n in _RESETS if hasattr(child, n)), None))
        with self._device:
            for reset in filter(callable, resets):
                reset()

    def _real(self, value: Tensor) -> Tensor:
        made = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device=self._device
        )
        if isinstance(value, nn.Parameter):
            parameter = nn.Parameter(made, value.requires_grad)
            vars(parameter).update(vars(value))
            return parameter
        return made

    def check(self) -> None:
        """Refuses weights that were made on the meta device and never given a value.

        Raises:
            ConfigError: With their names.
        """
        names = [name for name, handle in self._unwritten.values() if num_users(handle) > 1]
        if not names:
            return
        raise ConfigError(
            f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}: made on the meta device, "
            "and nothing says what is in it: its module has no reset_parameters() that writes it, "
            "and no checkpoint was loaded. Write such a method, or build the module in "
            "configure_model without torch.device('meta') and empty_init: the pipeline keeps only "
            "this rank's share of it anyway"
        )

    @contextmanager
    def following(self, given: Sequence[Tensor], written: Sequence[Tensor]) -> Iterator[list[Any]]:
        """Follows what becomes of the absent in an operation; it adds its result to the list."""
        known = [self._unwritten.get(storage_key(tensor)) for tensor in given]
        names = [label for label, _ in filter(None, known)]
        for tensor in written:
            self._unwritten.pop(storage_key(tensor), None)
        results: list[Any] = []
        yield results
        if names and not written:  # such as a conversion
            for tensor in tensors(results):
                self._unwritten[storage_key(tensor)] = names[0], tensor.untyped_storage()


def _inside_out(root: nn.Module) -> dict[str, nn.Module]:
    """All modules by name, in the order in which their constructors have ended."""
    found: dict[int, tuple[str, nn.Module]] = {}

    def visit(name: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            visit(f"{name}.{key}".lstrip("."), child)
        found.setdefault(id(module), (name, module))

    visit("", root)
    return dict(found.values())


__all__ = ["Absent"]
