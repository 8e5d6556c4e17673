"""Which random generators a step may draw from, beside the global ones."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.split.frozen import FRAMEWORKS, fields_of, is_open
from lightning_pipe.split.rng import KINDS, Generator

_DEPTH = 4  # how deep objects and containers are looked into
_LONG = 64  # items of a list that are looked at
#: what every module has: parameters, hooks, and so on
_OF_TORCH = frozenset(vars(nn.Module()))


def generators_of(root: nn.Module) -> tuple[Generator, ...]:
    """Find the generators of the modules below ``root``: in their attributes, in containers and
    objects of the user's classes there, and among the globals of the files of their classes."""
    found: dict[int, Generator] = {}
    seen: set[int] = set()
    files: dict[str, None] = {}
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in _OF_TORCH:
                _collect(value, found, seen, _DEPTH)
        files.update((part.__module__, None) for part in type(module).__mro__)
    for name in files:
        if name.partition(".")[0] not in FRAMEWORKS and name in sys.modules:
            space = list(vars(sys.modules[name]).values())
            found.update((id(value), value) for value in space if isinstance(value, KINDS))
    for common in _common():
        found.pop(id(common), None)
    return tuple(found.values())


def _common() -> tuple[Any, ...]:
    """The global generators, which are seeded anyway."""
    bound: Any = random.random
    of_numpy: Any = np.random.rand
    return torch.default_generator, bound.__self__, of_numpy.__self__


def _collect(value: Any, found: dict[int, Generator], seen: set[int], depth: int) -> None:
    """Look into a value for generators."""
    if isinstance(value, KINDS):
        found[id(value)] = value
    elif depth and isinstance(value, (dict, list, tuple)):
        if value and id(value) not in seen:
            seen.add(id(value))
            for item in list(value.values()) if isinstance(value, dict) else value[:_LONG]:
                _collect(item, found, seen, depth - 1)
    elif depth and id(value) not in seen and is_open(value):
        seen.add(id(value))
        for item in fields_of(value).values():
            _collect(item, found, seen, depth - 1)
