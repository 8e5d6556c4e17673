"""SEAM: what parameters become whose values are somewhere else: whoever kept one uses another.

A module holds the stand-in itself; this is for lists, closures and optimizers of the user's.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split.tree import map_tensors


class ForeignParameter(nn.Parameter):
    """What an emptied parameter becomes: who kept it elsewhere uses its fake, not nothing."""

    stand_in: Tensor

    @classmethod
    def __torch_function__(  # type: ignore[no-untyped-def]
        cls, func, types, args=(), kwargs=None
    ):
        args, kwargs = with_stand_ins(args, kwargs or {})
        return func(*args, **kwargs)

    def __repr__(self) -> str:  # type: ignore[override]
        return "a parameter that lives on another rank of the pipeline"


class RestingParameter(ForeignParameter):
    """A parameter that is whole within steps only; its stand-in is what is there in between.

    Its gradient is its own: it is gathered up over several steps.
    """

    @classmethod
    def __torch_function__(  # type: ignore[no-untyped-def]
        cls, func, types, args=(), kwargs=None
    ):
        if func in _GRADIENT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = with_stand_ins(args, kwargs or {})
        return func(*args, **kwargs)


_GRAD: Any = Tensor.grad
_GRADIENT = (_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__)


def with_stand_ins(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments with fakes in the places of emptied parameters."""
    found: tuple[Any, Any] = map_tensors(
        lambda leaf: leaf.stand_in if isinstance(leaf, ForeignParameter) else leaf, (args, kwargs)
    )
    return found


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts a parameter, or what stands for it, into its place in a module.

    A recurrent module notes its weights beside, looks in each forward whether they are still the
    same, and makes a new list if not. That would be a change of the step on this rank alone.
    """
    module._parameters[name] = parameter
    if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
        place = module._flat_weights_names.index(name)
        module._flat_weights[place] = parameter
        module._flat_weight_refs[place] = weakref.ref(parameter)
