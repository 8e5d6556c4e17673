"""Any Python object as one small pickle and the memory of its tensors.

Tensors are found inside of anything that pickle can walk: dicts, dataclasses, `BatchEncoding`, a
user's own class. So a batch needs no registration as a pytree, and its tensors are not pickled.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What has to be known of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """An object taken apart.

    Attributes:
        structure: A pickle of the object, with a number in the place of each tensor.
        specs: What the tensors look like, by number.
        tensors: The tensors, on the CPU and contiguous; empty until received on the other side.
    """

    structure: bytes
    specs: tuple[TensorSpec, ...]
    tensors: tuple[Tensor, ...]


def pack(value: Any) -> Packed:
    """Takes an object apart; an object that appears twice stays one."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    specs = tuple(
        TensorSpec(tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for t in pickler.tensors
    )
    return Packed(buffer.getvalue(), specs, tuple(_to_memory(t) for t in pickler.tensors))


def unpack(packed: Packed) -> Any:
    """Puts an object together again; tensors of a device go to this process's own such device."""
    tensors = [_restore(*pair) for pair in zip(packed.specs, packed.tensors, strict=True)]
    return _Unpickler(packed.structure, tensors).load()


def empty_tensors(specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Memory to receive tensors into."""
    return tuple(torch.empty(spec.shape, dtype=spec.dtype) for spec in specs)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, not a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def unpicklable(value: Any, path: str = "", depth: int = 5) -> str:
    """Names the innermost part of an object that cannot be pickled, and what it is."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        parts = [(f"{path}[{number}]", part) for number, part in enumerate(value)]
    elif is_dataclass(value):
        parts = [(f"{path}.{f.name}".lstrip("."), getattr(value, f.name)) for f in fields(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = [(f"{path}.{name}".lstrip("."), part) for name, part in vars(value).items()]
    for name, part in parts if depth else ():
        try:
            pack(part)
        except Exception:
            return unpicklable(part, name, depth - 1)
    kind = getattr(type(value), "__qualname__", type(value))
    return f"{path or 'it'}, a {kind},"


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        # Subclasses and tensors without plain memory know best how to pickle themselves.
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_quantized:
            return None
        if obj.device.type == "meta" or not (obj.is_leaf or obj.requires_grad):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, structure: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(structure))
        self._tensors = tensors

    def persistent_load(self, pid: Any) -> Tensor:
        return self._tensors[int(pid)]


def _to_memory(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _restore(spec: TensorSpec, tensor: Tensor) -> Tensor:
    moved = tensor if spec.device_type == "cpu" else tensor.to(spec.device_type)
    return moved.requires_grad_(spec.requires_grad)
