"""Copies of modules that the step never calls, such as an average of weights: they live with what
they copy.

An average is updated from its source weight by weight, between steps. On the stage of its source
this costs nothing; elsewhere each update would send the whole source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import TypeVar

from torch import nn

T = TypeVar("T")


def find_copies(root: nn.Module, read: Set[str]) -> dict[str, str]:
    """Map each module whose parameters are never read to one of the same class and shapes.

    Args:
        root: The user's module.
        read: First names of the parameters that the step reads.

    Returns:
        Name of the copy to name of its source; of nested copies the outermost.
    """
    first = {id(p): n for n, p in root.named_parameters()}
    sources: dict[object, str] = {}
    unread: dict[str, nn.Module] = {}
    for name, module in root.named_modules():
        names = {first[id(p)] for p in module.parameters()}
        if names and names <= read:
            sources.setdefault(_kind(module), name)
        elif names and not names & read:
            unread[name] = module
    copies: dict[str, str] = {}
    for name, module in unread.items():
        source = sources.get(_kind(module))
        if source is not None and not any(name.startswith(f"{c}.") for c in copies):
            copies[name] = source
    return copies


def _kind(module: nn.Module) -> object:
    return type(module), tuple((n, p.shape, p.dtype) for n, p in module.named_parameters())


def copied_names(names: Iterable[str], copies: Mapping[str, str]) -> dict[str, str]:
    """Map names within copies to the given names, which are within their sources.

    >>> copied_names(["net.0", "head"], {"ema.module": "net"})
    {'ema.module.0': 'net.0'}
    """
    return {
        copy + name[len(source) :]: name
        for name in names
        for copy, source in copies.items()
        if name == source or name.startswith(f"{source}.")
    }


def other_names(root: nn.Module, units: Mapping[str, T]) -> dict[str, T]:
    """Give what is known of units to the other names of the same modules, and of parts of them.

    A module that is reachable twice, such as a compiled one beside the plain one, may be called by
    another name in another step.
    """
    named = list(root.named_modules(remove_duplicate=False))
    known: dict[int, T] = {}
    for name, module in named:
        unit = _around(name, units)
        if unit is not None:
            known.setdefault(id(module), units[unit])
    return {
        name: known[id(module)]
        for name, module in named
        if id(module) in known and _around(name, units) is None
    }


def _around(name: str, units: Mapping[str, T]) -> str | None:
    """The unit that is or holds the module ``name``."""
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name if name in units else None


__all__ = ["copied_names", "find_copies", "other_names"]
