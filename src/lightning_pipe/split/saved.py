"""What autograd keeps for the backward of a step, by the unit or the glue that needs it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipe.split._fake import as_fake, storage_key


class SavedTensors:
    """Counts what autograd keeps for the backward: each storage once, parameters left out.

    Args:
        root: The module whose parameters are not counted.
    """

    def __init__(self, root: nn.Module) -> None:
        # kept alive: the key of a storage that is gone may be given to another one
        self._kept: list[Tensor] = []
        self._ignored: set[int] = set()
        self.ignore(root.parameters())
        self._numbers: dict[int, int] = {}
        #: unit call that runs, or comes next; the number of calls in the tail
        self.position = 0
        self.in_unit = False
        self._found: dict[tuple[bool, int], dict[int, int]] = {}

    def ignore(self, held: Iterable[Tensor]) -> None:
        """Leave out tensors that are there anyway: weights, the batch."""
        plain = [t for t in held if t.layout is torch.strided and not t.is_nested]
        kept = [t for tensor in plain for t in (tensor, as_fake(tensor))]
        self._kept += kept
        self._ignored |= {storage_key(t) for t in kept}

    def pack(self, tensor: Tensor) -> Tensor:
        """Count one saved tensor."""
        key = storage_key(tensor)
        if key not in self._ignored:
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                self._kept.append(tensor)
            found = self._found.setdefault((self.in_unit, self.position), {})
            found[number] = _storage_bytes(tensor)
        return tensor

    def at(self, position: int, *, in_unit: bool) -> tuple[tuple[int, int], ...]:
        """What a unit call saved, or the glue before it: (number of the storage, bytes)."""
        return tuple(sorted(self._found.get((in_unit, position), {}).items()))

    def hooks(self) -> saved_tensors_hooks:
        """Return the context that counts."""
        return saved_tensors_hooks(self.pack, lambda packed: packed)


def _storage_bytes(tensor: Tensor) -> int:
    """A view keeps all of its storage alive."""
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return tensor.numel() * tensor.element_size()
