"""Plain values from a file: every field there, known, and of its type, or an error that names it.

A file that a person edited, or half of one, must never become a plan that fails somewhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any

from lightning_pipe.errors import PlanError

__all__ = ["check_fields"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and value >= 0 and math.isfinite(value)


def _list_of(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and all(map(test, value))


def _is_signed(value: Any) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and math.isfinite(value)


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


#: by annotation: the test of a value, and what to say of one that fails it
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_count, "a whole number, 0 at least"),
    "float": (_is_number, "a finite number, 0 at least"),
    "float | None": (_or_none(_is_number), "a finite number >= 0, or nothing"),
    "int | None": (_or_none(_is_count), "a whole number >= 0, or nothing"),
    "str": (_is_text, "a text"),
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    "tuple[str, ...]": (_list_of(_is_text), "a list of texts"),
    "tuple[float, ...]": (_list_of(_is_signed), "a list of finite numbers"),
    "tuple[int, ...]": (_list_of(_is_count), "a list of whole numbers, 0 at least"),
}


def check_fields(
    kind: Any,
    values: Any,
    optional: Collection[str] = (),
    *,
    what: str = "the plan",
    signed: bool = False,
) -> None:
    """Refuses values that do not make a dataclass.

    Args:
        kind: The dataclass; fields whose annotation is none of those above are not looked at.
        values: What the file has for it.
        optional: Names of fields that may be missing.
        what: What is read, for the message.
        signed: Whether its numbers may be negative.

    Raises:
        PlanError: A field is missing, unknown or of another type; it is named.
    """
    start = f"{what} cannot be read: "
    if not isinstance(values, Mapping):
        raise PlanError(f"{start}{kind.__name__} is {_short(values)}; it must be names with values")
    known = {field.name: str(field.type) for field in fields(kind)}
    missing = sorted(known.keys() - set(values) - set(optional))
    unknown = sorted(str(name) for name in values if name not in known)
    if missing or unknown:
        raise PlanError(
            f"{start}{kind.__name__} lacks {missing or 'nothing'} and has {unknown or 'nothing'} "
            "that is unknown"
        )
    for name, value in values.items():
        test, legal = _KINDS.get(known[name], (None, ""))
        if signed and test is _is_number:
            test, legal = _is_signed, "a finite number"
        if test is not None and not test(value):
            raise PlanError(
                f"{start}{name} of {kind.__name__} is {_short(value)}; it must be {legal}"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
