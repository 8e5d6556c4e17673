"""Which tensors are parts of the spread model: weights, their gradients, buffers of units.

Code between steps (hooks, callbacks) sees the user's module with fakes for the weights of other
ranks. Here a tensor, real or fake, whole or a view, is told to be such a part by its storage, and
the value of a part is brought from the rank that has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.home import Home
from lightning_pipe.hookparts import HookParts
from lightning_pipe.runtime.meeting import ask
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split._fake import empty_fake, is_fake, storage_key


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """One tensor of the spread model.

    Attributes:
        kind: "weight", "gradient" or "buffer".
        name: The first name of the parameter, or that of the buffer.
        owners: Positions that have its value, in the order of their stages.
    """

    kind: str
    name: str
    owners: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str]:
        """What its owner is asked."""
        return (self.kind, self.name)


@dataclass(frozen=True, slots=True)
class Found:
    """What a tensor is: a part, or a view of one.

    Attributes:
        part: The part.
        base: The tensor of this rank that is the whole part, real or a fake.
    """

    part: Part
    base: Tensor

    def view(self, value: Tensor, tensor: Tensor) -> Tensor:
        """The view of a value of the part that `tensor` is of its base."""
        whole = laid_out_like(value.to(tensor.device), self.base)
        offset = int(tensor.storage_offset()) - int(self.base.storage_offset())
        return whole.as_strided(tensor.size(), tensor.stride(), offset)

    def is_beside(self, target: Found | None) -> bool:
        """Whether each rank that has the target has this too."""
        return target is not None and set(target.part.owners) <= set(self.part.owners)


_PRESENT = ("which gradients are there", "")


class Parts:
    """The parts of a module that is cut, on this rank.

    Args:
        module: The user's module.
        home: Where its weights are.
        ranks: This rank; it answers others from here on.
        parted: What each copy of the pipeline holds a part of.
    """

    def __init__(
        self, module: nn.Module, home: Home, ranks: Ranks, parted: HookParts | None = None
    ) -> None:
        self.parted = parted
        self._module = module
        self._home = home
        self._ranks = ranks
        self._fakes: dict[int, list[Found]] = {}
        for name, parameter in module.named_parameters():
            if is_fake(parameter):
                _add(self._fakes, Found(self._weight(name), parameter))
        self._own: dict[int, list[Found]] | None = None
        self._gradients: dict[int, list[Found]] = {}
        self._stand_ins: dict[str, Tensor] = {}
        self._present: set[str] | None = None
        ranks.talk.answer = self._answer

    def release(self) -> None:
        """Answers no more."""
        self._ranks.talk.answer = None
        if self.parted is not None:
            self.parted.release()

    def forget(self) -> None:
        """A hook begins: weights may have moved, and gradients are others."""
        if self.parted is not None:
            self.parted.forget()
        self._own = self._present = None
        self._gradients.clear()
        self._stand_ins.clear()

    # ------------------------------------------------------------------ what a tensor is

    def find(self, tensor: Tensor) -> Found | None:
        """The part that a tensor is, or is a view of."""
        if self._own is None:
            self._own = self._index()
        key = storage_key(tensor)
        for known in (self._fakes, self._own, self._gradients):
            if key in known:
                return _at(known[key], tensor)
        return self._whole_of_parts(tensor)

    def _whole_of_parts(self, tensor: Tensor) -> Found | None:
        """What a value is, or a view of one, that was joined from the parts of all copies."""
        known = None if self.parted is None else self.parted.find_whole(tensor)
        if known is None:
            return None
        (kind, name), base = known
        return Found(Part(kind, name, self._home.owners(name)), base)

    def is_here(self, part: Part) -> bool:
        """Whether this rank has the value."""
        return self._ranks.position in part.owners

    def is_everywhere(self, part: Part) -> bool:
        """Whether each rank has the value."""
        return len(part.owners) == self._ranks.num_positions

    def moved(self) -> None:
        """A weight of this rank was given other memory."""
        self._own = None

    def _weight(self, name: str) -> Part:
        return Part("weight", name, self._home.owners(name))

    def _index(self) -> dict[int, list[Found]]:
        own: dict[int, list[Found]] = {}
        for name, parameter in self._module.named_parameters():
            if not is_fake(parameter) and self._home.owners(name):
                _add(own, Found(self._weight(name), parameter))
        units = tuple(f"{unit}." if unit else "" for unit in self._home.stages_of_unit)
        for name, buffer in self._module.named_buffers():
            if name.startswith(units) and buffer.numel() and storage_key(buffer) not in own:
                owner = self._home.owner_of_buffer(name)
                _add(own, Found(Part("buffer", name, (owner,)), buffer))
        return own

    # ------------------------------------------------------------------ gradients

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """`parameter.grad` as on one device; for a weight of another rank, a stand-in for it."""
        found = self.find(parameter)
        if found is None or found.part.kind != "weight" or self.is_everywhere(found.part):
            return parameter.grad
        part = found.part
        present = self._all_present()
        if self.is_here(part):
            gradient = parameter.grad
        else:
            gradient = self._stand_in(part, parameter) if part.name in present else None
        if gradient is not None:
            self._gradients[storage_key(gradient)] = [
                Found(Part("gradient", part.name, part.owners), gradient)
            ]
        return gradient

    def _stand_in(self, part: Part, parameter: Tensor) -> Tensor:
        if part.name not in self._stand_ins:
            self._stand_ins[part.name] = empty_fake(
                tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device
            )
        return self._stand_ins[part.name]

    def set_gradient(self, parameter: Tensor, value: Tensor | None) -> bool:
        """Notes that `parameter.grad` is set; whether this rank has to set it."""
        found = self.find(parameter)
        if found is None or found.part.kind != "weight":
            return True
        if self._present is not None:
            (self._present.discard if value is None else self._present.add)(found.part.name)
        return self.is_here(found.part)

    def _all_present(self) -> set[str]:
        if self._present is None:
            positions = range(self._ranks.num_positions)
            answers = ask(self._ranks, [(position, _PRESENT) for position in positions])
            self._present = {name for names in answers.values() for name in names}
        return self._present

    # ------------------------------------------------------------------ values

    def values(self, parts: Iterable[Part]) -> dict[Part, Tensor]:
        """The values of parts that this rank does not have; each rank asks for the same ones."""
        wanted = sorted({part for part in parts if not self.is_everywhere(part)})
        if not wanted:
            return {}
        answers = ask(self._ranks, [(part.owners[0], part.key) for part in wanted])
        found = zip(wanted, answers.values(), strict=True)
        return {part: value for part, value in found if not self.is_here(part)}

    def computed(
        self, views: Sequence[tuple[Found, Tensor]], operation: str, rest: tuple[Any, ...]
    ) -> list[Any]:
        """What an operation makes of views, each computed by a rank that has it."""
        items = []
        for found, view in views:
            offset = int(view.storage_offset()) - int(found.base.storage_offset())
            place = (tuple(view.shape), view.stride(), offset)
            key = ("computed", (*found.part.key, place, operation, rest))
            items.append((found.part.owners[0], key))
        answers = ask(self._ranks, items)
        return [answers[item] for item in items]

    def _answer(self, key: Any) -> Any:
        kind, name = key
        if key == _PRESENT:
            return [n for n, p in self._module.named_parameters() if p.grad is not None]
        if kind != "computed":
            return self._value(kind, name)
        part_kind, part_name, (shape, stride, offset), operation, rest = name
        value = self._value(part_kind, part_name)
        namespace, packet, overload = operation.split(".")
        function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
        with torch.no_grad():
            return function(value.as_strided(shape, stride, offset), *rest)

    def _value(self, kind: str, name: str) -> Tensor:
        if kind == "buffer":
            return self._module.get_buffer(name).detach()
        parameter = self._module.get_parameter(name)
        value = parameter.grad if kind == "gradient" else parameter
        if self.parted is not None and value is not None:
            value = self.parted.whole(value)
        if value is None or is_fake(value):
            raise CutError(
                f"the {kind} of {name} was asked for, and {self._ranks} has none: the ranks do not "
                "run the same code between steps"
            )
        return laid_out_like(value.detach(), parameter)


def laid_out_like(value: Tensor, like: Tensor) -> Tensor:
    """A value with the strides of another tensor, so that a view of one is one of the other."""
    if value.stride() == like.stride() and value.storage_offset() == 0:
        return value
    laid_out = torch.empty_strided(
        like.size(), like.stride(), dtype=value.dtype, device=value.device
    )
    return laid_out.copy_(value)


def _add(known: dict[int, list[Found]], found: Found) -> None:
    known.setdefault(storage_key(found.base), []).append(found)


def _at(found: list[Found], tensor: Tensor) -> Found | None:
    """Several weights may share a storage, as those of an LSTM on a GPU do."""
    if len(found) == 1:
        return found[0]
    offset = int(tensor.storage_offset())
    before = [f for f in found if int(f.base.storage_offset()) <= offset]
    return max(before, key=lambda f: int(f.base.storage_offset()), default=None)


__all__ = ["Found", "Part", "Parts", "laid_out_like"]
