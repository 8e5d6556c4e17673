"""Memory without a model: amounts as people write them, and what 12 to 16 bytes a parameter say."""

from __future__ import annotations

import math

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.plan import format_count

__all__ = ["does_it_fit", "parse_bytes", "rule_of_thumb"]

# bytes per parameter: weights, gradients and Adam, half or full precision
_RULE_OF_THUMB = (12, 16)
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def does_it_fit(
    parameters: float, cap_bytes: float, bytes_per_parameter: float = _RULE_OF_THUMB[0]
) -> str:
    """The first estimate, without a model: weights, gradients and optimizer state alone.

    >>> does_it_fit(10e9, 80e9)
    '10.0 B parameters at 12 bytes are 120 GB and do not fit in 80 GB; 2 stages make it fit'
    >>> does_it_fit(1e9, 80e9)
    '1.0 B parameters at 12 bytes are 12 GB and fit in 80 GB'
    """
    total_bytes = parameters * bytes_per_parameter
    text = (
        f"{_billions(parameters)} parameters at {bytes_per_parameter:.3g} bytes are "
        f"{_gigabytes(total_bytes)}"
    )
    if total_bytes <= cap_bytes:
        return f"{text} and fit in {_gigabytes(cap_bytes)}"
    num_stages = math.ceil(total_bytes / cap_bytes)
    return f"{text} and do not fit in {_gigabytes(cap_bytes)}; {num_stages} stages make it fit"


def rule_of_thumb(parameters: int) -> str:
    """What people expect: 12 to 16 bytes per parameter with Adam."""
    low, high = (_gigabytes(parameters * each) for each in _RULE_OF_THUMB)
    return f"rule of thumb: {_RULE_OF_THUMB[0]}-{_RULE_OF_THUMB[1]} bytes per parameter with " + (
        f"Adam, {low} to {high} for {format_count(parameters)} parameters"
    )


def parse_bytes(text: str | int | float) -> int:
    """Reads an amount of memory.

    Raises:
        PlanError: The text is not one.

    >>> parse_bytes("80GiB"), parse_bytes("80 GB"), parse_bytes("1000")
    (85899345920, 80000000000, 1000)
    """
    number = str(text).strip().upper()
    for unit in sorted(_UNITS, key=len, reverse=True):
        if unit and number.endswith(unit):
            break
    else:
        unit = ""
    try:
        amount = float(number.removesuffix(unit)) * _UNITS[unit]
    except ValueError:
        amount = math.nan
    if not (math.isfinite(amount) and amount > 0):
        raise PlanError(f"memory {text!r}: give a number with a unit, such as 80GiB or 24GB")
    return int(amount)


def _billions(count: float) -> str:
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def _gigabytes(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size or unit == "MB":
            return f"{num_bytes / size:.4g} {unit}"
    return ""
