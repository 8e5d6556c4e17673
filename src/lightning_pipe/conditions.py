"""What decides, besides its batch, whether a step is traced anew: and that all ranks have the same.

A trace needs all ranks. If a block were in eval mode or frozen on one rank alone, that rank would
trace alone, and all would wait for ever. So ranks compare where they meet before a step.
"""

from __future__ import annotations

import re
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.runtime import share
from lightning_pipe.runtime.meeting import meet
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.nest import describe
from lightning_pipe.split.parted import is_parted
from lightning_pipe.split.signature import Signature
from lightning_pipe.split.units import modules_of

_MAX_KNOWN = 64


Told = dict[str, tuple[Hashable, str]]
"""What a rank tells the others once something differs: what is compared, and the words for it."""


class Conditions:
    """The state of a module that a trace of its step depends on.

    Args:
        module: The user's module.
        ranks: This rank.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self._module = module
        self._ranks = ranks
        self._batches: dict[Hashable, int] = {}
        self._accepted: set[tuple[int, ...]] = set()
        #: by the id of a sharded weight, the one that it is a part of
        self.whole_of: Mapping[int, nn.Parameter] = {}
        self.settle()

    def settle(self) -> None:
        """Takes the modules and weights for new: a cut replaces other ones on each rank."""
        self._numbers: OrderedDict[Hashable, tuple[int, list[Any]]] = OrderedDict()
        self._next = 0
        self._last: tuple[Hashable, int] = ((), 0)
        self._places: dict[str, int] = {}
        self._replaced = ""

    def key(self) -> tuple[bytes, bytes, int]:
        """Modes of all modules, which weights are frozen, and a number of these very modules and
        weights, counted in the order in which they came."""
        modules = modules_of(self._module)
        kept = [m._parameters for m in modules]
        weights = [p for some in kept if some for p in some.values() if p is not None]
        modes = bytes([bool(m.training) for m in modules])
        flags = bytes([p.requires_grad for p in weights])
        if self.whole_of:
            weights = [self.whole_of.get(id(p), p) for p in weights]
        ids = (*map(id, modules), *map(id, weights))
        if ids != self._last[0]:
            self._last = (ids, self._number(ids, [*modules, *weights]))
        return modes, flags, self._last[1]

    def _number(self, ids: Hashable, objects: Sequence[Any]) -> int:
        places = self._named()
        before = self._places or places
        changed = (n for n in (places | before) if places.get(n) != before.get(n))
        self._replaced, self._places = next(changed, ""), places
        known = self._numbers.get(ids)
        # an object may have got the place of one that is gone
        if known is not None and all(r() is o for r, o in zip(known[1], objects, strict=True)):
            self._numbers.move_to_end(ids)
            return known[0]
        self._numbers[ids] = self._next, [_reference(one) for one in objects]
        self._next += 1
        if len(self._numbers) > _MAX_KNOWN:
            self._numbers.popitem(last=False)
        return self._numbers[ids][0]

    def _named(self) -> dict[str, int]:
        weights = self._module.named_parameters(remove_duplicate=False)
        named = {name: id(self.whole_of.get(id(p), p)) for name, p in weights}
        return {name: id(m) for name, m in self._module.named_modules()} | named

    def meet(self, place: str, batch: Any, seen: Signature, num_microbatches: int | None) -> None:
        """Meets the other ranks, and compares.

        Args:
            place: As for :func:`~lightning_pipe.runtime.meeting.meet`.
            batch: What the step is about to be given.
            seen: Its signature.
            num_microbatches: Pieces that it is to be cut into.

        Raises:
            CutError: A rank differs from the others; on all ranks.
        """
        modes, flags, number = self.key()
        others = f"{number} {num_microbatches} {self._batch_digest(seen)}"
        digest = zlib.crc32(others.encode(), zlib.crc32(modes + b"|" + flags))
        digests = tuple(meet(self._ranks, place, digest))
        if len(set(digests)) == 1 or digests in self._accepted:
            return
        told = self._tell()
        told["num_microbatches"] = num_microbatches, str(num_microbatches)
        told["the batch"] = _text(seen), describe(batch)
        _refuse(self._ranks, told)
        self._accepted.add(digests)  # one rank has a module more from the start, which is no harm

    def _tell(self) -> Told:
        told: Told = {}
        for name, module in self._module.named_modules():
            mode = "train" if module.training else "eval"
            told[f"module '{name}'" if name else "the LightningModule"] = mode, f"in {mode} mode"
        for name, parameter in self._module.named_parameters():
            trains = "trained" if parameter.requires_grad else "frozen (requires_grad=False)"
            told[f"weight '{name}'"] = trains, trains
        number = self._last[1]
        last = f", last changed at '{self._replaced}'" if self._replaced else ""
        told["the set of modules and weights"] = number, f"number {number}{last}"
        return told

    def _batch_digest(self, seen: Signature) -> int:
        digest = self._batches.get(seen)
        if digest is None:
            if len(self._batches) > _MAX_KNOWN:
                self._batches.clear()
            digest = self._batches[seen] = zlib.crc32(_text(seen).encode())
        return digest


def _text(seen: Signature) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", f"{seen.skeleton!r} {seen.sizes}")


def _refuse(ranks: Ranks, told: Told) -> None:
    """Raises, on all ranks alike, if anything differs that all have."""
    gathered = share.gather_objects(ranks, (ranks.global_rank, told)) or []
    found = sorted(gathered, key=lambda part: part[0])
    for item in found[0][1]:
        if not all(item in part for _, part in found):
            continue
        if len({part[item][0] for _, part in found}) == 1:
            continue
        shown = {part[item][1] for _, part in found}
        words = [str(part[item][len(shown) > 1]) for _, part in found]
        is_on = [f"{word} on rank {rank}" for word, (rank, _) in zip(words, found, strict=True)]
        raise CutError(
            f"the step is not the same on all ranks: {item} is {', '.join(is_on)}. A rank with "
            "another state traces the step anew, which needs all ranks, so that none could go on. "
            "Do the same on all ranks before a step: take a condition on the rank "
            "(`is_global_zero`, `global_rank == 0`, `rank_zero_only`) away from `eval()`, "
            "`freeze()`, `requires_grad_()` and what else changes the model or its batch there"
        )


def _reference(one: Any) -> Callable[[], Any]:
    """Gives an object as long as it is there; a parted tensor that is referred to weakly could not
    be moved."""
    return (lambda: one) if is_parted(one) else weakref.ref(one)
