"""A number that a unit of another stage left in an attribute of itself: nobody here knows it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import nn

from lightning_pipe.errors import CutError

_USES = (
    *("bool", "float", "int", "index", "complex", "str", "format", "hash", "len", "iter"),
    *("neg", "abs", "round", "eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow", "rmatmul"),
)


class Unknown:
    """Stands for the number during a step; any use of it is an error.

    Args:
        what: What it is, for a sentence.
        instead: What to write.
    """

    def __init__(self, what: str, instead: str) -> None:
        self._what, self._instead = what, instead

    def refuse(self, *_: Any) -> NoReturn:
        """Say what was read and what to do."""
        raise CutError(
            f"the step reads {self._what}, and it ran on another stage. Only tensors travel "
            f"between stages: {self._instead}."
        )


for _name in _USES:
    setattr(Unknown, f"__{_name}__", Unknown.refuse)


def forget(module: nn.Module, unit: str, attributes: Iterable[tuple[str, str]]) -> None:
    """Replace the numbers in these (module name, attribute) pairs of ``module`` by unknown ones."""
    for name, attribute in attributes:
        space = vars(module.get_submodule(name))
        if isinstance(space.get(attribute), (int, float, complex, type(None))):
            space[attribute] = Unknown(
                f"'{attribute}' of '{unit}', a number that the unit sets in its forward",
                "keep it as a tensor (`.detach()` where you have `.item()`), or return it from "
                "forward",
            )


def unknown_output(unit: str) -> Unknown:
    """Stand for a number that a unit returned and that depends on data or on random draws."""
    return Unknown(
        f"what '{unit}' returns beside tensors, a number that it makes of values or random draws",
        "return it as a tensor (`.detach()` where you have `.item()`)",
    )
