"""Weights of which each copy of the pipeline holds a part, within hooks: whole, as on one device.

What is done to parts alone, element by element (`p.mul_(0.9)`, an average beside its source), is
done to the parts. Anything else is given the whole value, which the other copies are asked for;
what is written to it goes back to the parts when the hook is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_pipe.runtime.meeting import ask
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.shards import joined, own_part, whole_tensor
from lightning_pipe.split._fake import is_fake, storage_key
from lightning_pipe.split.parted import is_parted, part_of, parted_like
from lightning_pipe.split.tree import map_tensors, tensors

_ALIASES = frozenset(("detach", "alias"))
_ELEMENTWISE = frozenset(("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"))
Key = tuple[str, str]


@dataclass(slots=True)
class _Known:
    """A tensor that is in parts.

    Attributes:
        key: "weight" or "gradient", and the name of the parameter.
        part: What this copy holds.
        whole: The value, once it was asked for.
    """

    key: Key
    part: DTensor
    whole: Tensor | None = None


class HookParts:
    """The parted weights and gradients of this rank; it answers others from here on.

    Args:
        module: The user's module.
        copies: The processes that hold the parts.
    """

    def __init__(self, module: nn.Module, copies: Ranks) -> None:
        self._module = module
        self._copies = copies
        self._known: dict[tuple[int, ...], _Known] = {}
        copies.talk.answer = self._answer

    def release(self) -> None:
        """Answers no more."""
        self._copies.talk.answer = None

    def forget(self) -> None:
        """A hook begins or ends: what was written goes to the parts."""
        for known in self._known.values():
            if known.whole is not None:  # a write under a dispatch mode leaves no version
                part_of(known.part).copy_(self._part_of(known.whole, known.part))
        self._known = {}

    def wholes(self, given: Iterable[Tensor]) -> dict[int, Tensor]:
        """The values of parted tensors, by their ids."""
        found = {id(t): known for t in given if (known := self._find(t)) is not None}
        missing = list({known.key: known for known in found.values() if known.whole is None})
        if missing:
            items = [(copy, key) for key in missing for copy in range(self._copies.num_positions)]
            answers = ask(self._copies, items)
            for key in missing:
                parts = [answers[(copy, key)] for copy in range(self._copies.num_positions)]
                known = next(k for k in found.values() if k.key == key)
                known.whole = joined([part.to(known.part.device) for part in parts], known.part)
        return {number: known.whole for number, known in found.items() if known.whole is not None}

    def whole(self, tensor: Tensor) -> Tensor:
        """The value of a parted tensor; itself if it is none."""
        return self.wholes([tensor]).get(id(tensor), tensor)

    def find_whole(self, tensor: Tensor) -> tuple[Key, Tensor] | None:
        """What a tensor is a value of, or a view of such a value; and that value."""
        storage = storage_key(tensor)
        for known in self._known.values():
            if known.whole is not None and storage_key(known.whole) == storage:
                return known.key, known.whole
        return None

    def set_data(self, parameter: Tensor, value: Tensor) -> bool:
        """`parameter.data = value`; False if the parameter is in no parts."""
        known = self._find(parameter)
        if known is None:
            return False
        value = self.own_whole(self.whole(value))
        part_of(known.part).copy_(self._part_of(value, known.part))
        known.whole = None
        return True

    def part_like(self, parameter: Tensor, value: Tensor) -> Tensor:
        """This copy's part of a value, to be the gradient of a parameter that is in parts."""
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
            return value
        return parted_like(parameter, self._part_of(value, parameter).clone())

    def operation(
        self, func: Any, args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> tuple[bool, Any, Any]:
        """What an operation is to be done on.

        Returns:
            Whether that is done (it needs nothing else), and its result, or else arguments with
            values in the places of parts.
        """
        given = tensors((args, kwargs))
        parted = [t for t in given if isinstance(t, DTensor) and self._find(t) is not None]
        if not parted:
            return False, args, kwargs
        if func.overloadpacket.__name__ in _ALIASES:
            return True, func(*args, **kwargs), None
        if written and self._is_local(func, given):
            func(*map_tensors(part_of, args), **map_tensors(part_of, kwargs))
            return True, written[0] if len(written) == 1 else None, None
        values = self.wholes(parted)

        def value(tensor: Tensor) -> Tensor:
            return values.get(id(tensor), tensor)

        return False, map_tensors(value, args), map_tensors(value, kwargs)

    def are_mixed(self, args: Any, kwargs: Any) -> bool:
        """Whether some arguments are in parts and some are not, which torch takes none of."""
        given = [t for t in tensors((args, kwargs)) if t.ndim]
        return len(set(map(is_parted, given))) == 2

    def alike(self, args: Any, kwargs: Any, written: Sequence[Tensor]) -> Any:
        """Mixed arguments, all in parts or all whole; values of this model are whole already.

        What else is in parts is the user's own, such as a copy that was made before the model was
        cut. What is written to stays as it is. All processes that hold parts have to call this.
        """
        like = next((t for t in written if is_parted(t)), None)
        if like is None:
            return map_tensors(self.own_whole, (args, kwargs))
        assert isinstance(like, DTensor)
        mesh, everywhere = like.device_mesh, [Replicate()] * like.device_mesh.ndim
        kept = {id(tensor) for tensor in written}

        def parted(tensor: Tensor) -> Tensor:
            if is_parted(tensor) or not tensor.ndim or id(tensor) in kept:
                return tensor
            if tensor.shape == like.shape:
                return own_part(like, tensor)
            return DTensor.from_local(tensor.detach(), mesh, everywhere, run_check=False)

        return map_tensors(parted, (args, kwargs))

    def own_whole(self, tensor: Tensor) -> Tensor:
        """The value of a tensor in parts that is not of this model; anything else as it is."""
        return tensor if is_fake(tensor) else whole_tensor(tensor, self._copies)

    def _is_local(self, func: Any, given: Sequence[Tensor]) -> bool:
        """Whether each element depends on those in its place only, and all are parts."""
        elementwise = (
            torch.Tag.pointwise in func.tags or func.overloadpacket.__name__ in _ELEMENTWISE
        )
        if not elementwise or torch.Tag.nondeterministic_seeded in func.tags:
            return False
        known = [self._find(tensor) for tensor in given if tensor.ndim]
        first = next(k for k in known if k is not None)
        return all(
            k is not None
            and k.whole is None
            and k.part.placements == first.part.placements
            and (k.part.shape == first.part.shape or func.__name__.startswith("_foreach"))
            for k in known
        )

    def _find(self, tensor: Tensor) -> _Known | None:
        if not isinstance(tensor, DTensor) or is_fake(tensor):
            return None
        key = _place(tensor)
        if key not in self._known:
            self._index()
        return self._known.get(key)

    def _index(self) -> None:
        for name, parameter in self._module.named_parameters():
            for kind, part in (("weight", parameter), ("gradient", parameter.grad)):
                if isinstance(part, DTensor) and not is_fake(part):
                    key = _place(part)
                    if key not in self._known:
                        self._known[key] = _Known((kind, name), part)

    def _answer(self, key: Any) -> Tensor:
        kind, name = key
        parameter = self._module.get_parameter(name)
        value = parameter.grad if kind == "gradient" else parameter
        assert value is not None, f"a copy has no gradient of {name}"
        local: Tensor = part_of(value)
        return local.detach()

    def _part_of(self, whole: Tensor, part: Tensor) -> Tensor:
        mine = part_of(own_part(part, whole.detach().to(part.dtype)))
        assert isinstance(mine, Tensor)
        return mine


def _place(part: DTensor) -> tuple[int, ...]:
    """What its aliases have in common, and no other: gradients may share a storage."""
    local = part_of(part)
    return storage_key(local), int(local.storage_offset()), *part.shape


__all__ = ["HookParts"]
