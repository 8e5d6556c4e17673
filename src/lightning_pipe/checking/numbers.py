"""What a training step leaves behind, and how far two of them are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: by the size of a number in bytes: what rounding may do, relative to the largest gradient
TOLERANCE = {2: 1e-2, 4: 1e-5, 8: 1e-9}
#: a gradient this much smaller than the largest is compared with that share of it
_FLOOR = 1e-2


@dataclass(slots=True)
class Numbers:
    """What one step left behind.

    Attributes:
        loss: What it returned.
        gradients: Of all parameters that have one, by name, on the host.
        buffers: After the step.
        logged: Values that it logged.
        drawing: Modules that draw random numbers, to whether from Python or NumPy too; the step
            itself is "". Empty where nobody looked.
        draws: Whether anything drew.
        weight: What the step says that its loss divides by, or "sum".
    """

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    drawing: dict[str, bool] = field(default_factory=dict)
    draws: bool = False
    weight: Any = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far one step is from another.

    Attributes:
        values: Numbers that were compared.
        loss_error: Relative.
        gradient_error: The largest, relative to the largest gradient.
        parameter: Where that is.
        buffer_error: The largest, relative to the largest value of that buffer.
        buffer: Where that is; empty if there are none.
        logged_error: The largest, relative.
        logged: Where that is; empty if nothing is logged.
        missing: Parameters that have a gradient in one of them only.
        is_close: Whether nothing is further apart than rounding.
    """

    values: int
    loss_error: float
    gradient_error: float
    parameter: str
    buffer_error: float
    buffer: str
    logged_error: float
    logged: str
    missing: tuple[str, ...]
    is_close: bool

    def worst(self) -> str:
        """What is furthest apart, as a text."""
        if self.missing:
            return f"only one of both has a gradient of {', '.join(self.missing[:4])}"
        found = {
            "the loss": self.loss_error,
            f"the gradient of {self.parameter}": self.gradient_error,
            f"the buffer {self.buffer}": self.buffer_error,
            f"the logged value {self.logged}": self.logged_error,
        }
        name = max(found, key=lambda key: found[key] if found[key] == found[key] else math.inf)
        return f"{name} differs by {found[name]:.1e}"


def compare(one: Numbers, other: Numbers, *, logged: bool = True) -> Comparison:
    """Compares a step with the one that is right.

    Args:
        one: What is right.
        other: What is not known to be.
        logged: Whether logged values are to be the same, too.
    """
    scale = max((_size(g) for g in one.gradients.values()), default=0.0)
    tolerance = max((TOLERANCE[_bytes(g)] for g in one.gradients.values()), default=1e-5)
    close, missing, gradient_error, parameter = True, [], 0.0, ""
    for name in sorted(one.gradients.keys() | other.gradients.keys()):
        first, second = one.gradients.get(name), other.gradients.get(name)
        if first is None or second is None:
            only = second if first is None else first
            if only is not None and _size(only) > tolerance * scale:
                missing.append(name)
            continue
        apart = _apart(first, second)
        close &= apart <= tolerance * max(_size(first), _FLOOR * scale, 1e-30)
        error = apart / max(scale, 1e-30)
        if not error <= gradient_error:
            gradient_error, parameter = error, name
    buffer_error, buffer = _worst(one.buffers, other.buffers)
    numbers, others = _as_tensors(one.logged), _as_tensors(other.logged)
    logged_error, logged_name = _worst(numbers, others) if logged else (0.0, "")
    loss_error = abs(one.loss - other.loss) / max(abs(one.loss), 1e-30)
    close &= max(loss_error, buffer_error, logged_error) <= tolerance and not missing
    close &= loss_error == loss_error and buffer_error == buffer_error
    return Comparison(
        1 + sum(g.numel() for g in one.gradients.values())
        + sum(b.numel() for b in one.buffers.values()) + len(numbers) * logged,
        loss_error, gradient_error, parameter, buffer_error, buffer, logged_error, logged_name,
        tuple(missing), close,
    )  # fmt: skip


def _as_tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def _worst(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest relative error, and where; infinite for what only one of both has."""
    error, where = 0.0, min(one, default="")
    for name in sorted(one.keys() | other.keys()):
        found = math.inf
        if name in one and name in other and one[name].shape == other[name].shape:
            found = _apart(one[name], other[name]) / max(_size(one[name]), 1.0)
        if not found <= error:
            error, where = found, name
    return error, where


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().double().abs().max()) if tensor.numel() else 0.0


def _apart(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    if not one.numel() or torch.equal(one, other):
        return 0.0
    found = float((one.double() - other.double()).abs().max())
    return math.inf if math.isnan(found) else found


def _bytes(tensor: Tensor) -> int:
    return min(max(torch.finfo(tensor.dtype).bits // 8, 2), 8)
