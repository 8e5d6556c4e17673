"""What the schema of an operator tells: what it writes, and whether it reads values at all."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def mutated_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes in place, by its schema."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written: list[Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            written += [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return written


def reads_nothing(func: Any) -> bool:
    """Whether an operation is about shapes, or makes a view."""
    returns = func._schema.returns
    if all("Tensor" not in str(r.type) for r in returns):
        return True
    return all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
