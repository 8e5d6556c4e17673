"""Code between units that asks what a tensor is: a ghost says what the value is that it stands for.

Addresses of ghosts are made up: equal for tensors of one memory, and none that a kernel could use.
A ghost is a tensor of another class, so ``type(h) is torch.Tensor`` would be false on the stages
that have no data of ``h``, and the step would go another way there. For the length of a step, the
name ``type`` of the files that the modules around the units are from is one that knows ghosts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import is_fake, storage_key
from lightning_pipe.split.frozen import FRAMEWORKS
from lightning_pipe.split.units import modules_of

_ADDRESSES = frozenset(("data_ptr", "untyped_storage"))
_NO_ADDRESS = 1 << 60  # not one that a processor accepts
_MOST_STORAGES = 1 << 19


class _Asked(type):
    """Makes a call of `Type` say what a value is, as a call of ``type`` does."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Type:
            return super().__call__(*args, **kwargs)
        if len(args) != 1:
            return type(*args, **kwargs)
        if is_fake(args[0]):
            return nn.Parameter if isinstance(args[0], nn.Parameter) else torch.Tensor
        found = type(args[0])
        return Type if found is type else found

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type) if cls is Type else super().__instancecheck__(value)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is Type else super().__subclasscheck__(kind)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]


class Type(type, metaclass=_Asked):
    """Stands for ``type``."""


class _Storage:
    """The storage of a ghost, with an address."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._storage = tensor.untyped_storage()

    def data_ptr(self) -> int:
        """Return the made-up address."""
        return _address(self._tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


_NUMBERS: dict[int, int] = {}


def _address(tensor: Tensor) -> int:
    number = _NUMBERS.setdefault(storage_key(tensor), len(_NUMBERS) % _MOST_STORAGES)
    return _NO_ADDRESS + (number << 40)


def address_of(func: Any, args: tuple[Any, ...]) -> Any:
    """Answer a question for the address of a ghost; None if ``func`` asks something else."""
    name = getattr(func, "__name__", "")
    if name not in _ADDRESSES or not args or not is_fake(args[0]):
        return None
    ghost: Tensor = args[0]
    if name == "untyped_storage":
        return _Storage(ghost)
    return _address(ghost) + ghost.storage_offset() * ghost.element_size()


def asking_files(
    root: nn.Module, units: Collection[nn.Module]
) -> list[tuple[ModuleType, str, type]]:
    """List the replacements of the name ``type`` for the code around ``units``."""
    inside = {id(module) for unit in units for module in modules_of(unit)}
    files: dict[str, ModuleType] = {}
    for module in modules_of(root):
        if id(module) in inside:
            continue
        for kind in type(module).__mro__:
            name = kind.__module__
            package = name.partition(".")[0]  # theirs knows fakes
            if package not in FRAMEWORKS | {"builtins"} and name in sys.modules:
                files[name] = sys.modules[name]
    return [(file, "type", Type) for file in files.values() if "type" not in vars(file)]
