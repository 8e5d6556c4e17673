"""A value as it was before a step: containers with their contents, objects of the user's classes
with their fields, tensors and arrays with their data. It is put back into the very same objects.

An object is looked into if its class is the user's own Python: a meter, a dataclass, a namespace.
What belongs to torch, Lightning or the standard library, or wraps something outside of Python (a
file, a lock, a logger), has a life of its own and is left alone.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import is_fake, storage_key

_DEPTH = 8
_LONG = 1024  # longer lists are taken to grow at their end only
_LARGE = 1 << 20  # elements; larger tensors are copied only if a trace saw them change
_MANY = 4096  # values of one attribute
FRAMEWORKS = frozenset(
    ("torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fabric")
) | {"lightning_pipe"}
"""Packages whose classes are not the user's own."""
_PLAIN_BASES = frozenset(("abc", "typing", "typing_extensions", "collections.abc", "_abc"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


_KNOWN: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def _is_users(cls: type) -> bool:
    if issubclass(cls, (nn.Module, type, Enum, BaseException)):
        return False
    for part in cls.__mro__:
        if part in (object, SimpleNamespace, Namespace, dict, list, set, deque, OrderedDict):
            continue
        package = part.__module__.partition(".")[0]
        known = package in FRAMEWORKS or package in sys.stdlib_module_names
        if (known and part.__module__ not in _PLAIN_BASES) or not part.__flags__ & _HEAP_TYPE:
            return False
    return cls not in (object, dict, list, set, deque, OrderedDict)


def is_open(value: Any) -> bool:
    """Tell whether ``value`` is an object whose fields are looked into."""
    cls = type(value)
    if cls not in _KNOWN:
        _KNOWN[cls] = _is_users(cls)
    return _KNOWN[cls]


def fields_of(value: Any) -> dict[str, Any]:
    """Return the fields of an object: its ``__dict__`` and its slots."""
    fields = dict(getattr(value, "__dict__", ()))
    for part in type(value).__mro__:
        slots = part.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                fields[name] = getattr(value, name)
    return fields


def set_field(value: Any, name: str, field: Any) -> None:
    """Set a field as it is, past properties and frozen dataclasses."""
    space = getattr(value, "__dict__", None)
    if space is not None and (name in space or not hasattr(type(value), name)):
        space[name] = field
    else:
        object.__setattr__(value, name, field)


def drop_field(value: Any, name: str) -> None:
    """Remove a field."""
    object.__delattr__(value, name)


def is_data(value: Any) -> bool:
    """Tell whether a value can be changed and is data: what a step may leave behind."""
    if isinstance(value, Tensor):
        return not isinstance(value, nn.Parameter) and not is_fake(value)
    return isinstance(value, (dict, list, deque, set, tuple, bytearray, np.ndarray)) or is_open(
        value
    )


def version_of(tensor: Tensor) -> int:
    """Count the writes to a tensor; those to an inference tensor are not counted."""
    return 0 if tensor.is_inference() else tensor._version


class Frozen:
    """A value as it was.

    A graph may still need what a tensor held when it was read, so a tensor that was written is not
    written again: a copy takes its place until :meth:`reset`, which puts the very tensor back.

    Args:
        value: The value.
        all_data: Copy large tensors and look into long containers too: the value is known to
            change.
        memo: What is frozen already, by id of the value.

    Attributes:
        value: The object that is in its place now.
        content: A copy of what a container, tensor or array held, one level deep; None where it
            was too large.
        fields: What the fields of an object were.
        children: The contents that can change themselves, by key, index or position.
        inner: The same of fields.
    """

    __slots__ = (
        "all_data",
        "children",
        "content",
        "fields",
        "inner",
        "original",
        "value",
        "version",
    )

    def __init__(
        self,
        value: Any,
        *,
        all_data: bool = False,
        memo: dict[int, Any] | None = None,
        depth: int = _DEPTH,
    ) -> None:
        memo = {} if memo is None else memo
        memo[id(value)] = self
        self.value = self.original = value
        self.all_data = all_data
        self.content: Any = None
        self.version = 0
        self.fields: dict[str, Any] = {}
        self.children: dict[Any, Frozen | Name] = {}
        self.inner: dict[str, Frozen | Name] = {}
        if isinstance(value, Tensor):
            self.version = version_of(value)
            if all_data or value.numel() <= _LARGE:
                self.content = value.detach().clone()
        elif isinstance(value, (np.ndarray, bytearray)):
            size = len(value) if isinstance(value, bytearray) else value.nbytes
            if all_data or size <= _LARGE:
                self.content = value.copy()
        else:
            self._freeze_parts(value, memo, depth)

    def _freeze_parts(self, value: Any, memo: dict[int, Any], depth: int) -> None:
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            self.content = dict(value)
            items = self.content.items()
        elif isinstance(value, (list, deque, tuple)):
            self.version = len(value)
            if self.all_data or len(value) <= _LONG:
                self.content = list(value)
                items = enumerate(self.content)
        elif isinstance(value, set):
            self.content = set(value)
        self.children = self._freeze_all(items, memo, depth)
        if is_open(value):
            self.fields = fields_of(value)
            self.inner = self._freeze_all(self.fields.items(), memo, depth)

    def _freeze_all(
        self, items: Iterable[tuple[Any, Any]], memo: dict[int, Any], depth: int
    ) -> dict[Any, Frozen | Name]:
        if depth == 0:
            return {}
        return {
            key: frozen(item, all_data=self.all_data, memo=memo, depth=depth - 1)
            for key, item in items
            if is_data(item) and (self.all_data or id(item) in memo or len(memo) < _MANY)
        }

    # ------------------------------------------------------------------ back

    def thaw(self) -> Any:
        """Put everything back as it was, and return what is in the place of the value now."""
        return self._back(lambda part: part.thaw(), self._fresh)

    def reset(self) -> Any:
        """As :meth:`thaw`, into the very tensors; for the end, when no graph needs them."""
        return self._back(lambda part: part.reset(), self._restored)

    def _back(self, part: Callable[[Any], Any], tensor: Callable[[], Tensor]) -> Any:
        value = self.value
        if isinstance(value, Tensor):
            self.value = tensor()
            self.version = version_of(self.value)
        elif isinstance(value, (np.ndarray, bytearray)):
            if self.content is not None and self.data_differs():
                everything: Any = ... if isinstance(value, np.ndarray) else slice(None)
                value[everything] = self.content
        else:
            is_tuple = isinstance(value, tuple)
            for key, child in self.children.items():
                now = child.reset() if is_tuple else part(child)
                if now is not self.content[key]:
                    self.content[key] = now
            for name, child in self.inner.items():
                self.fields[name] = part(child)
            if not is_tuple and self.is_other(value):
                self._refill(value)
            self._put_fields(value)
        return self.value

    def was_written(self) -> bool:
        """Tell whether a tensor may have been written; by `.data` too if it is known to change."""
        value = self.value
        if version_of(value) != self.version:
            return True
        # a look at the data would cost a synchronisation on a device
        return self.all_data and (value.device.type != "cpu" or self.data_differs())

    def _fresh(self) -> Tensor:
        value: Tensor = self.value
        if self.content is None or not self.was_written():
            return value
        fresh: Tensor = self.content.clone()
        return fresh.requires_grad_(value.requires_grad and value.is_leaf)

    def _restored(self) -> Tensor:
        original: Tensor = self.original
        touched = self.value is not original or self.was_written()
        if self.content is not None and touched:
            with torch.no_grad():
                if original.shape != self.content.shape:
                    original.data = self.content.clone()
                else:
                    original.detach().copy_(self.content)
        return original

    def _refill(self, value: Any) -> None:
        """Past the methods of subclasses: `Counter.update` adds."""
        if isinstance(value, dict):
            plain: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            plain.clear(value)
            plain.update(value, self.content)
        elif isinstance(value, set):
            set.clear(value)
            set.update(value, self.content)
        elif self.content is None:
            while len(value) > self.version:
                value.pop()
        elif isinstance(value, list):
            list.__setitem__(value, slice(None), self.content)
        else:
            deque.clear(value)
            deque.extend(value, self.content)

    def _put_fields(self, value: Any) -> None:
        if not is_open(value):
            return
        now = fields_of(value)
        for name in now.keys() - self.fields.keys():
            drop_field(value, name)
        for name, field in self.fields.items():
            if name not in now or now[name] is not field:
                set_field(value, name, field)

    # ------------------------------------------------------------------ comparing

    def differs(self, written: frozenset[int] = frozenset()) -> bool:
        """Tell whether the object is not what it was, at any depth.

        Args:
            written: Storages that were written; a fake that is written into a tensor leaves no
                other mark.
        """
        value = self.value
        if isinstance(value, Tensor) and storage_key(value) in written:
            return True
        if isinstance(value, (Tensor, np.ndarray, bytearray)):
            return self.data_differs()
        if self.is_other(value) or self._fields_differ(value):
            return True
        parts = (*self.children.values(), *self.inner.values())
        return any(part.differs(written) for part in parts)

    def data_differs(self) -> bool:
        """Tell whether a tensor or an array was written."""
        value = self.value
        if isinstance(value, Tensor):
            if version_of(value) != self.version:
                return True
            known = self.all_data and self.content is not None
            return known and not (
                value.shape == self.content.shape and torch.equal(value, self.content)
            )
        if self.content is None:
            return False
        if isinstance(value, bytearray):
            return bool(value != self.content)
        return bool(value.tobytes() != self.content.tobytes())

    def is_other(self, now: Any) -> bool:
        """Tell whether a container holds other things than it did; they are compared by
        identity."""
        if isinstance(now, dict):
            return list(now) != list(self.content) or any(
                now[key] is not item for key, item in self.content.items()
            )
        if isinstance(now, set):
            return bool(now != self.content)
        if isinstance(now, (list, deque, tuple)):
            return len(now) != self.version or (
                self.content is not None
                and any(a is not b for a, b in zip(now, self.content, strict=True))
            )
        return False

    def _fields_differ(self, value: Any) -> bool:
        if not is_open(value):
            return False
        now = fields_of(value)
        return now.keys() != self.fields.keys() or any(
            now[name] is not field and not same_plain(now[name], field)
            for name, field in self.fields.items()
        )


class Name:
    """A second name of something that is frozen: what happens inside of it is noted there.

    Args:
        target: The frozen value.
    """

    __slots__ = ("target",)

    def __init__(self, target: Frozen) -> None:
        self.target = target

    @property
    def value(self) -> Any:
        """The object that is in its place now."""
        return self.target.value

    def thaw(self) -> Any:
        """Return what is in the place of the value now."""
        return self.target.value

    def reset(self) -> Any:
        """Return the value."""
        return self.target.original

    def differs(self, written: frozenset[int] = frozenset()) -> bool:
        """Tell that nothing is to be told here."""
        return False


def frozen(
    value: Any, *, memo: dict[int, Any], all_data: bool = False, depth: int = _DEPTH
) -> Frozen | Name:
    """Freeze a value, or name it again if that has been done."""
    known = memo.get(id(value))
    if known is not None and is_data(value):
        return Name(known)
    return Frozen(value, all_data=all_data, memo=memo, depth=depth)


def same_plain(value: Any, before: Any) -> bool:
    """Tell whether two different objects are one plain value."""
    plain = isinstance(value, (int, float, str, bytes, bool, type(None)))
    return plain and type(value) is type(before) and bool(value == before)


def holds_fake(value: Any) -> bool:
    """Tell whether ``value`` is a fake tensor or holds one, at any depth."""
    return any(map(is_fake, contents(value)))


def contents(value: Any, seen: frozenset[int] = frozenset()) -> list[Any]:
    """List all tensors that ``value`` holds, at any depth."""
    if isinstance(value, Tensor):
        return [value]
    if id(value) in seen or len(seen) > _DEPTH:
        return []
    seen = seen | {id(value)}
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        parts += value
    if is_open(value):
        parts += fields_of(value).values()
    return [tensor for part in parts for tensor in contents(part, seen)]


def fingerprint(value: Any) -> bytes | None:
    """Tell apart the states of an object of another library that is not looked into.

    None for what is data, has no state to speak of, or cannot be pickled: a logger, a file.
    """
    cls = type(value)
    package = cls.__module__.partition(".")[0]
    # the generators of NumPy are put back with all others
    known = package in FRAMEWORKS | {"numpy"} or package in sys.stdlib_module_names
    if known or is_data(value) or isinstance(value, (nn.Module, Tensor)) or callable(value):
        return None
    try:
        return hashlib.sha256(pickle.dumps(value)).digest()
    except Exception:
        return None
