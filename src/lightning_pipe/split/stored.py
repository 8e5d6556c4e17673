"""A tensor that is somewhere else until it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.split._fake import without_data
from lightning_pipe.split.tree import map_tensors


class StoredTensor(Tensor):
    """A tensor on the disk. Whatever is done with it is done with what is read.

    Args:
        shape: Its sizes.
        dtype: Its type.
        read: Reads it.
    """

    _read: Callable[[], Tensor]
    _value: Tensor | None

    @staticmethod
    def __new__(
        cls: type[StoredTensor],
        shape: torch.Size,
        dtype: torch.dtype,
        read: Callable[[], Tensor],
    ) -> StoredTensor:
        made: StoredTensor = without_data(cls, shape, dtype)
        made._read = read
        made._value = None
        return made

    def read(self) -> Tensor:
        """What is stored, or what was written over it."""
        return self._read() if self._value is None else self._value

    @classmethod
    def __torch_dispatch__(  # type: ignore[no-untyped-def, override]
        cls, func, types, args=(), kwargs=None
    ):
        mutable = func._schema.is_mutable

        def there(leaf: Any) -> Any:
            if not isinstance(leaf, StoredTensor):
                return leaf
            value = leaf.read()
            if mutable:  # it may be what is written
                leaf._value = value
            return value

        return func(*map_tensors(there, args), **map_tensors(there, kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.read().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({tuple(self.shape)}, {self.dtype})"
