"""How weights were made, one operation after the other, so that they can be made again."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import ConfigError
from lightning_pipe.split._fake import plain_functions, without_modes
from lightning_pipe.split.frozen import version_of
from lightning_pipe.split.rng import Drawn, again
from lightning_pipe.split.tree import flatten, tensors, unflatten

_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))


class View:
    """A tensor as a view of a storage that has a recipe."""

    __slots__ = ("dtype", "number", "place")

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number
        self.dtype = tensor.dtype
        self.place = int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride()

    def __repr__(self) -> str:
        return f"{self.number} {self.dtype} {self.place}"

    def blank(self, device: torch.device) -> Any:
        """A storage for it, where it is all of it."""
        _, shape, stride = self.place
        made = torch.empty_strided(shape, stride, dtype=self.dtype, device=device)
        return made.untyped_storage()

    def of(self, storage: Any) -> Tensor:
        """The same view of another storage."""
        view = torch.empty(0, dtype=self.dtype, device=storage.device)
        return view.set_(storage, *self.place)


class Held:
    """A tensor from elsewhere: a copy of a small one, or a large one, of a checkpoint say."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self.tensor = tensor
        self.version = version

    def __repr__(self) -> str:
        return f"{self.tensor.dtype} {tuple(self.tensor.shape)}"

    def get(self) -> Tensor:
        """The tensor, if it is what it was.

        Raises:
            ConfigError: It was written to.
        """
        if self.version is not None and version_of(self.tensor) != self.version:
            raise ConfigError(
                f"a tensor of shape {tuple(self.tensor.shape)} was written to after weights were "
                "made from it in configure_model, and before they were given to the ranks: they "
                "cannot be made again. Write to a clone of it"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of a recipe.

    Attributes:
        function: What to call.
        arguments: Its positional and keyword arguments, tensors encoded.
        writes: Storages that it writes.
        makes: Storages that it makes, by the place of the output.
        before: For each storage that it reads, the entry that wrote it last.
        drawn: The state of the random generator, if it draws.
    """

    function: Any
    arguments: Any
    writes: frozenset[int]
    makes: dict[int, int]
    before: dict[int, int]
    drawn: Drawn | None

    @property
    def numbers(self) -> frozenset[int]:
        """All that it has to do with."""
        return self.writes.union(self.makes.values(), self.before)


@dataclass(slots=True)
class Storage:
    """A storage that has a recipe.

    Attributes:
        number: Its name in the recipe.
        key: Tells it from other storages of this process.
        handle: It.
        num_bytes: Its size when it is there.
        last: The entry that wrote it last.
    """

    number: int
    key: int
    handle: Any
    num_bytes: int
    last: int = -1


class Tape:
    """All operations on storages that have a recipe, in order."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    @property
    def length(self) -> int:
        """How many there are."""
        return len(self._entries)

    def add(self, entry: Entry) -> None:
        """Notes one."""
        self._entries.append(entry)

    @property
    def digest(self) -> str:
        """The same on ranks that did the same."""
        known = hashlib.sha256()
        for entry in self._entries:
            leaves, _ = flatten(entry.arguments)
            said = [_said(leaf) for leaf in leaves]
            what = (str(entry.function), said, sorted(entry.writes), sorted(entry.makes.items()))
            known.update(repr(what).encode())
            if entry.drawn is not None:
                known.update(entry.drawn.state.numpy().tobytes())
        return known.hexdigest()

    def make(self, storage: Storage) -> None:
        """Does again what made a storage, into it; it has memory already."""
        with without_modes(), plain_functions(), torch.no_grad():
            there: dict[int, Any] = {}
            steps = self._steps(storage.last)
            last_use = {number: i for i in steps for number in self._entries[i].numbers}
            for index in steps:
                entry = self._entries[index]
                self._run(entry, there, storage)
                for number in entry.numbers - {storage.number}:
                    if last_use[number] == index:
                        there.pop(number, None)
            found = there[storage.number]
            if found is not storage.handle:
                storage.handle.copy_(found)

    def _steps(self, last: int) -> list[int]:
        """The entries that lead to one, in order."""
        found, waiting = set(), [last]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += self._entries[index].before.values()
        return sorted(found)

    def _run(self, entry: Entry, there: dict[int, Any], target: Storage) -> None:
        """Runs an entry on the storages that are there; those of the target are its own."""
        name = entry.function.overloadpacket.__name__
        if target.number in entry.makes.values() and name in _EMPTY:
            there[target.number] = target.handle
            return
        for number in entry.writes - entry.before.keys():  # all of it is written
            if number not in there:
                there[number] = target.handle if number == target.number else None

        def decoded(leaf: Any) -> Any:
            if isinstance(leaf, Held):
                return leaf.get()
            if not isinstance(leaf, View):
                return leaf
            if there[leaf.number] is None:
                there[leaf.number] = leaf.blank(target.handle.device)
            return leaf.of(there[leaf.number])

        leaves, spec = flatten(entry.arguments)
        args, kwargs = unflatten([decoded(leaf) for leaf in leaves], spec)
        with again(entry.drawn, kwargs) as kwargs:
            outputs = tensors(entry.function(*args, **kwargs))
        for place, number in entry.makes.items():
            there[number] = outputs[place].untyped_storage()


def _said(leaf: Any) -> str:
    """An argument in words that are the same on all ranks."""
    if isinstance(leaf, torch.device):
        return leaf.type
    if isinstance(leaf, torch.Generator):
        return "generator"
    return repr(leaf)


__all__ = ["Entry", "Held", "Storage", "Tape", "View"]
