"""Stand in front of an object that a step writes to, such as a logger: calls are noted, not made.

A step runs once per micro-batch, on every stage and while it is traced; on one device it runs once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

_PLAIN = (bool, int, float, complex, str, bytes, tuple, list, dict, set, frozenset, PathLike)
_READS = ("get", "is_", "has_")


@dataclass(frozen=True, slots=True)
class Item:
    """A subscript on the way to a method, as in ``run["loss"].append``."""

    key: Any


@dataclass(frozen=True, slots=True)
class NotedCall:
    """A call that was not made: the way to the method, and its arguments."""

    path: tuple[str | Item, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def make(self, target: Any) -> None:
        """Make the call on the object that the note taker stood for."""
        for step in self.path:
            target = target[step.key] if isinstance(step, Item) else getattr(target, step)
        target(*self.args, **self.kwargs)


class NoteTaker:
    """Looks like an object. What is called on it, or on what it holds, is noted and returns None.

    Plain data is read from the object itself, and methods that only read (``get_...``, ``is_...``)
    are called.

    Args:
        target: The object.
        note: Is given each call.
        path: The way from the first object to this one.
    """

    def __init__(
        self, target: Any, note: Callable[[NotedCall], None], path: tuple[str | Item, ...] = ()
    ) -> None:
        self.__dict__.update(_target=target, _note=note, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_target"], name)
        if callable(value) and not name.startswith(_READS):
            return partial(self._noted, name)
        return self._inner(value, name)

    def __getitem__(self, key: Any) -> Any:
        return self._inner(self._target[key], Item(key))

    def __setattr__(self, name: str, value: Any) -> None:
        self._noted("__setattr__", name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._noted("__setitem__", key, value)

    def _inner(self, value: Any, step: str | Item) -> Any:
        if value is None or isinstance(value, _PLAIN) or callable(value):
            return value
        return NoteTaker(value, self._note, (*self._path, step))

    def _noted(self, name: str, *args: Any, **kwargs: Any) -> None:
        self._note(NotedCall((*self._path, name), args, kwargs))
