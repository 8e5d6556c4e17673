"""What autograd keeps for the backward of a step: traced by unit and glue, or counted by stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_pipe.split._fake import as_fake, is_fake, storage_key
from lightning_pipe.split.parted import part_of


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


class KeptBytes:
    """Counts what the graphs of a real step keep, without keeping it alive itself.

    Args:
        ignored: Tensors that are there anyway: weights and buffers.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        self._ignored = {storage_key(tensor) for tensor in ignored}
        #: (stage, micro-batch) to bytes
        self.found: dict[tuple[int, int], int] = {}

    def counting(self, stage: int, microbatch: int) -> saved_tensors_hooks:
        """Return the context in which the forward of a micro-batch is counted."""
        seen: set[int] = set()
        key = stage, microbatch
        self.found[key] = 0

        def pack(tensor: Tensor) -> Tensor:
            storage = storage_key(tensor)
            known = storage in seen or storage in self._ignored
            if not known and not is_fake(tensor):  # what a stage does to ghosts is not there
                seen.add(storage)
                self.found[key] += _storage_bytes(tensor)
            return tensor

        return saved_tensors_hooks(pack, lambda packed: packed)


def _storage_bytes(tensor: Tensor) -> int:
    """A view keeps all of its storage alive."""
    tensor = part_of(tensor)
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return tensor.numel() * tensor.element_size()
