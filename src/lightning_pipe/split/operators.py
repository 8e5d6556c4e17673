"""Which unit outputs and parameters went into a tensor: a dispatch mode that sees every operator
and every alias. Where a storage is written in place it is right and the ledger of values is not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_pipe.split._fake import (
    DEVICE_OF,
    DispatchMode,
    is_fake,
    storage_key,
)
from lightning_pipe.split.rng import is_draw
from lightning_pipe.split.schemas import mutated_arguments
from lightning_pipe.split.trace import Source, ValueKey
from lightning_pipe.split.tree import tensors

Sources = frozenset[Source]
NOTHING: Sources = frozenset()


_ATEN = torch.ops.aten
_LOSSES = frozenset((_ATEN.cross_entropy_loss, _ATEN.nll_loss_forward, _ATEN.nll_loss2d_forward))
#: operators that look at nothing but the shape of what they are given
_LIKE = frozenset(
    (
        *(_ATEN.empty_like, _ATEN.full_like, _ATEN.ones_like, _ATEN.zeros_like),
        *(_ATEN.rand_like, _ATEN.randint_like, _ATEN.randn_like),
        *(_ATEN.new_empty, _ATEN.new_full, _ATEN.new_ones, _ATEN.new_zeros),
    )
)


def calling_modules() -> tuple[int, ...]:
    """Return the ids of the modules whose code is running, innermost first."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) not in found:
            found.append(id(owner))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(found)


class OperatorLedger(DispatchMode):
    """Follows tensors through operators, by identity and by storage.

    Args:
        parameters: id of each parameter to its name.
        on_draw: Told when an operator draws random numbers.
    """

    def __init__(
        self, parameters: Mapping[int, str], on_draw: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._on_draw = on_draw
        self._sources: dict[int, Sources] = {}
        self._by_storage: dict[int, list[Tensor]] = {}
        self._kept: list[Tensor] = []
        self._inner: dict[int, int] = {}
        #: index of the unit call that is running, or None in the glue
        self.inside: int | None = None
        #: whether it runs below a fake mode of its own
        self.on_fakes = False
        self.flops = 0
        self.unit_reads: dict[int, set[str]] = {}
        self.glue_parameters: set[str] = set()
        self.leaks: set[int] = set()
        self.written: set[ValueKey] = set()
        self.written_storages: set[int] = set()
        #: storages that the glue wrote in place
        self.glue_storages: set[int] = set()
        self.random_draws = 0
        self._drawn: set[int] = set()
        #: whether a number that torch drew was read as Python data
        self.read_draws = False
        #: single numbers drawn inside units: their code may branch on them
        self.scalar_draws = 0
        #: values that units turned into Python data
        self.reads_in_units = 0
        self.drawn_in_units = 0
        #: losses over targets that units computed
        self.losses_in_units = 0
        self.value_reads = 0
        self.reading_modules: set[int] = set()

    def of(self, tensor: Tensor) -> Sources:
        """Return the unit outputs and parameters that ``tensor`` depends on."""
        name = self._parameters.get(id(tensor))
        if name is not None:
            return frozenset({name})
        known = self._sources.get(id(tensor))
        if known is not None:
            return known
        aliases = self._by_storage.get(storage_key(tensor), ())
        return frozenset().union(*(self._sources.get(id(a), NOTHING) for a in aliases))

    def set(self, tensor: Tensor, sources: Sources) -> None:
        """Record where ``tensor`` comes from, and keep it alive so that its id stays its own."""
        self._sources[id(tensor)] = sources
        self._kept.append(tensor)
        self._by_storage.setdefault(storage_key(tensor), []).append(tensor)

    def write(self, tensor: Tensor, sources: Sources) -> None:
        """Record that the storage of ``tensor`` was written with values from ``sources``."""
        key = storage_key(tensor)
        aliases = self._by_storage.get(key, [])
        before = self.of(tensor).union(*(self._sources.get(id(a), NOTHING) for a in aliases))
        self.written.update(s for s in before if not isinstance(s, str))
        if sources or before:
            self.written_storages.add(key)
        for alias in aliases:
            self._sources[id(alias)] = self._sources.get(id(alias), NOTHING) | sources
        self.set(tensor, self.of(tensor) | sources)

    def is_written(self, tensor: Tensor) -> bool:
        """Tell whether the storage of ``tensor`` was written in place by now."""
        return storage_key(tensor) in self.written_storages

    def note_leak(self, tensor: Tensor) -> None:
        """Record a tensor that was made inside a unit, is no output of it, and is used outside."""
        maker = self._inner.get(id(tensor))
        if maker is not None and id(tensor) not in self._sources and not self.of(tensor):
            self.leaks.add(maker)

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if func is DEVICE_OF:
            return func(*args)
        if self.inside is None:
            return self._in_glue(func, args, kwargs, tensors((args, kwargs)))
        if self.on_fakes:  # seen above the fake mode already; this is what became of it below
            return func(*args, **kwargs)
        return self.inside_unit(func, args, kwargs)

    def inside_unit(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note what an operator inside a unit reads, makes and costs."""
        assert self.inside is not None
        inputs = tensors((args, kwargs))
        names = {self._parameters[id(t)] for t in inputs if id(t) in self._parameters}
        if names:
            self.unit_reads.setdefault(self.inside, set()).update(names)
        out = func(*args, **kwargs)
        count = flop_registry.get(getattr(func, "_overloadpacket", None))
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        made = tensors(out)
        if torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            self.reads_in_units += 1
        self.losses_in_units += getattr(func, "_overloadpacket", None) in _LOSSES
        if is_draw(func, args, kwargs):
            self._on_draw()
            self.drawn_in_units += 1
            self.scalar_draws += any(t.numel() == 1 for t in made)
        for tensor in made:
            self._inner[id(tensor)] = self.inside
            self._kept.append(tensor)
        return out

    def _in_glue(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        sources = NOTHING.union(*(self.of(t) for t in inputs))
        if getattr(func, "_overloadpacket", None) in _LIKE:
            sources = NOTHING  # what it makes has the shape of a value, and none of it
        self.glue_parameters.update(s for s in sources if isinstance(s, str))
        for tensor in inputs:
            self.note_leak(tensor)
        tags = getattr(func, "tags", ())
        is_read = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if is_read and any(not isinstance(s, str) for s in sources):
            self.value_reads += 1
            self.reading_modules.update(calling_modules()[:1])
        drawn = any(id(t) in self._drawn for t in inputs)
        by_number = func is torch.ops.aten.index.Tensor and not any(
            t.dtype in (torch.bool, torch.uint8) for t in inputs[1:]
        )
        self.read_draws |= drawn and is_read and not by_number
        if is_draw(func, args, kwargs):
            self.random_draws += 1
            self._on_draw()
            drawn = True
        out = func(*args, **kwargs)
        written = mutated_arguments(func, args, kwargs)
        for tensor in written:
            self.write(tensor, sources)
            self.glue_storages.add(storage_key(tensor))
        ids = {id(t) for t in written}
        for tensor in tensors(out):
            if id(tensor) not in ids:
                self.set(tensor, sources)
            if drawn and not is_fake(tensor):
                self._drawn.add(id(tensor))
        return out

    def is_drawn(self, tensor: Tensor) -> bool:
        """Tell whether a tensor of the glue, with values, is made of random numbers."""
        return id(tensor) in self._drawn
