"""What a step leaves in attributes and buffers: taken from each micro-batch, merged, and set on
every rank.

Every micro-batch starts from what was there before the step, as if all ran side by side. What each
one left is a `Change`; the changes of all micro-batches are merged into the one that the whole
batch would have made: a list grows by one loss, not by M of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from lightning_pipe._lightning import MODULE_SPACE
from lightning_pipe.split.frozen import Frozen, Name, frozen, is_data
from lightning_pipe.split.microbatch import NumberMemory
from lightning_pipe.tail.changes import Change, Gone, Put, apply_change, change_of, detached
from lightning_pipe.tail.kinds import kinds_of
from lightning_pipe.tail.merging import Where, merge_changes

_PATCHES = frozenset({"log", "print", "forward", "_call_impl", "update", "compute"})

#: (module name, name, whether it is a buffer)
Place = tuple[str, str, bool]


class Attributes:
    """The attributes and buffers that the code of a step may change.

    Args:
        root: The user's module; all its own attributes and buffers are watched.
        others: Those of its submodules to watch too.
        changing: Those that a trace saw change: nothing in them is too large to be remembered.
        memory: What numbers were seen to be in earlier steps.
    """

    def __init__(
        self,
        root: nn.Module,
        others: Iterable[Place] = (),
        changing: Iterable[Place] = (),
        *,
        memory: NumberMemory | None = None,
    ) -> None:
        self._memory = memory
        self._root = root
        self._changing = frozenset(changing)
        self._others = sorted({place for place in (*others, *self._changing) if place[0]})
        self._frozen: dict[Place, Frozen | Name] = {}
        self.changes: list[dict[Place, Change]] = []

    def freeze(self) -> None:
        """Notes how everything is before the step."""
        self.changes = []
        self._frozen = {}
        memo: dict[int, Any] = {}
        for place, value in self._present():
            self._frozen[place] = frozen(value, all_data=place in self._changing, memo=memo)

    def take(self) -> None:
        """Notes what one micro-batch changed, and undoes it."""
        self.changes.append(self.undo())

    def undo(self) -> dict[Place, Change]:
        """Puts everything back as it was before the step; returns what had changed."""
        changes: dict[Place, Change] = {}
        present = dict(self._present())
        for place, value in present.items():
            before = self._frozen.get(place)
            change = Put(detached(value)) if before is None else change_of(before, value)
            if change is not None:
                changes[place] = change
        for place in self._frozen:
            if place not in present and place[1] not in self._space(place):
                changes[place] = Gone()
        self._put_back(dict.fromkeys([*changes, *self._changing]), lambda part: part.thaw())
        return changes

    def _put_back(self, places: Iterable[Place], way: Callable[[Any], Any]) -> None:
        for place in places:
            space, name = self._space(place), place[1]
            if place not in self._frozen:
                space.pop(name, None)
                continue
            value = way(self._frozen[place])
            if name not in space or space[name] is not value:
                space[name] = value

    def merged(self, rows: Sequence[int]) -> dict[Place, Change]:
        """What the whole batch would have changed."""
        places = dict.fromkeys(place for changes in self.changes for place in changes)
        merged = {}
        for place in places:
            present = [(c[place], n) for c, n in zip(self.changes, rows, strict=True) if place in c]
            changes, sizes = [c for c, _ in present], [n for _, n in present]
            kinds = kinds_of(type(self._root.get_submodule(place[0])))
            name = ".".join(filter(None, place[:2]))
            where = Where(kinds, (place[1],), name, self._memory)
            before = self._frozen.get(place)
            before = before.target if isinstance(before, Name) else before
            merged[place] = merge_changes(changes, sizes, before, where)
        return merged

    def apply(self, changes: Mapping[Place, Change]) -> None:
        """Makes the changes, on any rank, when no graph needs what was before."""
        self.close()
        for place, change in changes.items():
            space, name = self._space(place), place[1]
            if isinstance(change, Gone):
                space.pop(name, None)
            else:
                space[name] = apply_change(space.get(name), change)

    def close(self) -> None:
        """Puts everything back into its very tensors; then nothing is remembered any more."""
        self._put_back(list(self._frozen), lambda part: part.reset())
        self._frozen = {}

    def _space(self, place: Place) -> dict[str, Any]:
        module = self._root.get_submodule(place[0])
        return module._buffers if place[2] else vars(module)

    def _present(self) -> Iterator[tuple[Place, Any]]:
        root = self._root
        for name, value in vars(root).items():
            if name not in MODULE_SPACE and name not in _PATCHES and is_plain(value):
                yield ("", name, False), value
        for name, buffer in root._buffers.items():
            yield ("", name, True), buffer
        for place in self._others:
            space = self._space(place)
            if place[1] in space and is_plain(space[place[1]]):
                yield place, space[place[1]]


def is_plain(value: Any) -> bool:
    """Whether an attribute is data that a step may leave behind, no object with a life of its
    own."""
    plain = (bool, int, float, complex, str, bytes, frozenset, np.generic)
    return value is None or isinstance(value, plain) or is_data(value)
