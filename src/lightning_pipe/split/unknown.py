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
        unit: The unit.
        attribute: Where it keeps the number.
    """

    def __init__(self, unit: str, attribute: str) -> None:
        self._where = (unit, attribute)

    def refuse(self, *_: Any) -> NoReturn:
        """Say what was read and what to do."""
        unit, attribute = self._where
        raise CutError(
            f"the step reads '{attribute}' of '{unit}', a number that the unit sets in its "
            "forward, and it ran on another stage. Only tensors travel between stages: keep it as "
            "a tensor (`.detach()` where you have `.item()`), or return it from forward."
        )


for _name in _USES:
    setattr(Unknown, f"__{_name}__", Unknown.refuse)


def forget(module: nn.Module, unit: str, attributes: Iterable[tuple[str, str]]) -> None:
    """Replace the numbers in these (module name, attribute) pairs of ``module`` by unknown ones."""
    for name, attribute in attributes:
        space = vars(module.get_submodule(name))
        if isinstance(space.get(attribute), (int, float, complex, type(None))):
            space[attribute] = Unknown(unit, attribute)
