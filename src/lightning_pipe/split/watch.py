"""Check what a stage does against a trace that was derived and may be wrong.

What a stage sends is checked anyway. Here is the rest: what its own units make, since other stages
go by the shape of it even where they are not sent it, and which torch calls the glue makes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pipe.errors import CutError, StageMismatchError
from lightning_pipe.split._fake import storage_key
from lightning_pipe.split.parted import part_of
from lightning_pipe.split.provenance import function_name
from lightning_pipe.split.trace import Alias, Constant, Leaf, Trace, UnitCall, ValueKey
from lightning_pipe.split.tree import flatten


def check_made(trace: Trace, call: UnitCall, out: Any, stage: int) -> None:
    """Refuse outputs of a unit other than the trace says.

    Raises:
        StageMismatchError: With the name of the unit and what it made.
    """
    values = flatten(out)[0]
    expected = call.leaves[: call.num_outputs]
    made = len(values) == len(expected) and all(
        _is_as_traced(trace, value, leaf, (call.index, number), may_lack_gradient=call.draws)
        for number, (value, leaf) in enumerate(zip(values, expected, strict=True))
    )
    if not made:
        shown = ", ".join(str(tuple(v.shape)) for v in values if isinstance(v, Tensor))
        raise StageMismatchError(
            f"stage {stage}: unit '{call.unit}' made ({shown}), not what was derived from batches "
            "of other sizes."
        )


def check_aliases(call: UnitCall, out: Any, arguments: list[Any], stage: int) -> None:
    """Refuse a new tensor where the trace says that a unit returns its argument: the other stages
    would go by the argument.

    Raises:
        StageMismatchError: With the name of the unit.
    """
    values = flatten(out)[0]
    for number, leaf in enumerate(call.leaves[: call.num_outputs]):
        if not isinstance(leaf, Alias):
            continue
        value, argument = values[number], arguments[leaf.argument]
        if value is not argument and storage_key(value) != storage_key(argument):
            raise StageMismatchError(
                f"stage {stage}: unit '{call.unit}' returned a new tensor where it returned what "
                "it was given when the step was traced. Which of them it does must not depend on "
                "the values of a batch."
            )


def _is_as_traced(
    trace: Trace, value: Any, leaf: Leaf, key: ValueKey, *, may_lack_gradient: bool
) -> bool:
    if isinstance(leaf, Constant):
        plain = leaf.known and isinstance(leaf.value, (bool, int, float, str, type(None)))
        return not isinstance(value, Tensor) and (not plain or bool(value == leaf.value))
    if not isinstance(value, Tensor):
        return False
    if isinstance(leaf, Alias):
        return True
    meta = trace.meta(key)
    if (tuple(part_of(value).shape), value.dtype) != (meta.shape, meta.dtype):
        return False
    return value.requires_grad == meta.requires_grad or (
        may_lack_gradient and not value.requires_grad
    )


def check_script(trace: Trace, segment: int, count: int, func: Any, stage: int) -> None:
    """Refuse another torch call in the glue than the trace has; None stands for a unit's.

    What follows the last unit is the tail, which nobody else goes by.

    Raises:
        CutError: With the names of both.
    """
    if segment == len(trace.calls):
        return
    script = trace.script[segment]
    expected = script[count] if count < len(script) else None
    found = None if func is None else function_name(func)
    if found != expected:
        raise CutError(
            f"stage {stage}: the step went another way than derived from batches of other sizes: "
            f"{found or 'a unit'} where {expected or 'a unit'} was expected."
        )
