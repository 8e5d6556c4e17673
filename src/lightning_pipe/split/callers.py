"""Who calls a unit, by the frames below it: some callers cannot do with a part of their work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import FunctionCtx

from lightning_pipe.errors import CutError
from lightning_pipe.split._fake import inside_transform
from lightning_pipe.split.patching import Replacement
from lightning_pipe.split.tree import tensors


class KeepWhole(Exception):
    """A unit must not be cut out of the module ``name``."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name or 'the module'} stays whole: {reason}")
        self.name = name


def check_callers(name: str, module: nn.Module, names: Mapping[int, str]) -> bool:
    """Look at who calls the unit ``name``; return whether it is itself the region of a checkpoint.

    Args:
        name: The unit.
        module: Its module.
        names: id of every module to its name.

    Raises:
        KeepWhole: A custom autograd function, or a checkpoint region wider than the unit, calls
            it, or a transform such as ``vmap``.
        CutError: The transform is in the outermost module.
    """
    if inside_transform():
        raise _transformed(name, names)
    hidden = not torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    innermost: str | None = None
    in_function = False
    for frame in _frames():
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            if innermost not in (None, name):
                raise KeepWhole(str(innermost), "it is recomputed as one region")
            return True
        if hidden and any(isinstance(v, FunctionCtx) for v in frame.f_locals.values()):
            in_function = True
        owner = frame.f_locals.get("self")
        owner_name = names.get(id(owner)) if isinstance(owner, nn.Module) else None
        if not owner_name:
            continue
        innermost = owner_name
        if in_function and name.startswith(owner_name + "."):
            raise KeepWhole(owner_name, "a custom autograd function calls its children")
    return False


def whole_for_hooks(root: nn.Module, units: Collection[str]) -> Iterator[Replacement]:
    """List the replacements that keep a module whole that was opened and has backward hooks: they
    are given the gradients of its outputs and inputs, which must be on one stage."""
    inside = tuple(f"{unit}." for unit in units)
    for name, module in root.named_modules():
        if module._backward_hooks and not f"{name}.".startswith(inside):
            yield module, "_call_impl", _checked(name, module._call_impl)


def _checked(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(tensor.requires_grad for tensor in tensors((args, kwargs))):
            raise KeepWhole(
                name, "its backward hook is given the gradients of its inputs and outputs at once"
            )
        return original(*args, **kwargs)

    return call


def _transformed(name: str, names: Mapping[int, str]) -> Exception:
    """What to raise for a unit that is called inside of a transform."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        owner_name = names.get(id(owner)) if isinstance(owner, nn.Module) else None
        if owner_name and name.startswith(owner_name + "."):
            return KeepWhole(owner_name, "torch.func transforms a function that calls its parts")
    return CutError(
        f"unit '{name}' is called inside of a function that torch.func (vmap, grad, jvp) or "
        "forward-mode differentiation transforms: what crosses between stages is plain "
        "tensors. Move the transformed function into the forward of a submodule, which then "
        "stays whole, or call the unit on the batch."
    )


def _frames() -> Iterator[Any]:
    frame = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]
