"""SEAM: what parameters become whose values are somewhere else: whoever kept one uses another.

A module holds the stand-in itself; this is for lists, closures and optimizers of the user's.
"""

from __future__ import annotations

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
