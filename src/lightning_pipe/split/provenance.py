"""Where does a tensor come from? Two ledgers, kept while a step is traced.

The operator ledger (a dispatch mode) sees every operator and every alias, and knows for each tensor
which unit outputs and parameters went into it. The value ledger (a torch-function mode) sees the
torch calls that the glue makes, in an order that can be repeated, and makes each result a value
that may be sent. Where a storage is written in place the operator ledger is right and the value
ledger is not.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from lightning_pipe.split._fake import (
    DEVICE_OF,
    VALUE_NEEDED,
    DispatchMode,
    TorchFunctionMode,
    as_fake,
    is_fake,
    mutated_arguments,
    storage_key,
    without_modes,
)
from lightning_pipe.split.rng import is_draw
from lightning_pipe.split.streams import Streams, draw_in_vain, draws_by_values
from lightning_pipe.split.trace import GlueValue, Meta, Source, ValueKey
from lightning_pipe.split.tree import map_tensors, tensors
from lightning_pipe.split.typed import address_of

Sources = frozenset[Source]
NOTHING: Sources = frozenset()


class ValueNeeded(Exception):
    """The glue needs the value of a tensor that another stage computes."""

    def __init__(self, function: str, frames: tuple[int, ...]) -> None:
        super().__init__(f"{function} needs the value of a tensor that another stage computes")
        self.frames = frames


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


_ATEN = torch.ops.aten
#: operators that look at nothing but the shape of what they are given
_LIKE = frozenset(
    (
        *(_ATEN.empty_like, _ATEN.full_like, _ATEN.ones_like, _ATEN.zeros_like),
        *(_ATEN.rand_like, _ATEN.randint_like, _ATEN.randn_like),
        *(_ATEN.new_empty, _ATEN.new_full, _ATEN.new_ones, _ATEN.new_zeros),
    )
)

#: torch calls that turn a tensor into plain Python data, and what stands for it while tracing
_PLACEHOLDERS = {
    "item": lambda t: 1.0 if t.is_floating_point() else 1,
    "tolist": lambda t: torch.ones(t.shape, dtype=t.dtype).tolist(),
    "numpy": lambda t: torch.ones(t.shape, dtype=t.dtype).numpy(),
    "__array__": lambda t: torch.ones(t.shape, dtype=t.dtype).numpy(),
    "__float__": lambda t: 1.0,
    "__int__": lambda t: 1,
    "__bool__": lambda t: False,
    "__index__": lambda t: 1,
    "__format__": lambda t: "1.0",
}


#: torch calls that differentiate inside the step: the graph ends at the stage's border
_DIFFERENTIATE = frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))


class InnerGradient(Exception):
    """The step differentiates on its own."""


_BINARY = frozenset(
    (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"),
        *("and", "or", "xor", "div"),
    )
)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def function_name(func: Any) -> str:
    """Name a torch function so that ``a + b``, ``b.__radd__(a)`` and ``a += b`` have one name."""
    name = str(getattr(func, "__name__", func)).strip("_")
    return name[1:] if name[:1] in "ri" and name[1:] in _BINARY else name


class ValueLedger(TorchFunctionMode):
    """Numbers the torch calls of the glue and keeps the graph of their results.

    Args:
        operators: The operator ledger of the same trace.
        streams: The random streams of it.
        truth: What conditions on fakes are taken for, in their order, and false from there on,
            until the end of the step shows that no unit call depends on them.
        known_reads: What an earlier trace, with real values, read at each place.
        pinned: Torch functions that failed on fakes: whoever calls them needs their inputs.
        recomputed: Tells whether a checkpointed region is open: what it makes is made again in the
            backward, from its inputs.
        instead: What is read of the batch, by the number of the read, in place of what it says.
    """

    def __init__(
        self,
        operators: OperatorLedger,
        streams: Streams,
        *,
        truth: Sequence[bool] = (),
        known_reads: Mapping[tuple[int, int], Any] | None = None,
        pinned: Set[str] = frozenset(),
        recomputed: Callable[[], bool] = lambda: False,
        instead: Mapping[int, Any] | None = None,
    ) -> None:
        super().__init__()
        self._operators = operators
        self._streams = streams
        self._recomputed = recomputed
        self._instead = instead or {}
        self._pinned = pinned
        self._truth = truth
        self._known_reads = known_reads or {}
        self._read_count: Counter[int] = Counter()
        self._values: dict[int, Sources] = {}
        self._kept: list[Tensor] = []
        self._results: dict[tuple[int, int, int], Tensor] = {}
        self._segment = 0
        self._count = 0
        self._paused = False
        #: a step that is traced without gradients has nothing that a custom function could hide
        self._grad_enabled = torch.is_grad_enabled()
        #: number of unit calls so far
        self.segment = 0
        self.glue: dict[tuple[int, int, int], GlueValue] = {}
        self._script: dict[int, list[str]] = {}
        self.control: set[Source] = set()
        #: calls that draw, and whether the stream begins anew after them
        self.random_calls: dict[tuple[int, int], bool] = {}
        #: (segment, sources, modules on the stack) of values that were read as Python data
        self.reads: list[tuple[int, Sources, tuple[int, ...]]] = []
        #: what conditions on fakes were taken for, in their order
        self.guesses: list[bool] = []
        self.read_values: dict[tuple[int, int], Any] = {}
        #: truth values and whole numbers that were read of nothing but the batch, in their order
        self.batch_reads: list[int] = []
        #: torch functions that failed on fakes
        self.failed: set[str] = set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not look: a unit is running, or we are doing our own bookkeeping."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def of(self, tensor: Tensor) -> Sources:
        """Return the nearest values that ``tensor`` is made of."""
        if self._operators.is_written(tensor):
            return self._operators.of(tensor)
        known = self._values.get(id(tensor))
        return known if known is not None else self._operators.of(tensor)

    def set(self, tensor: Tensor, sources: Sources) -> None:
        """Record what ``tensor`` is made of."""
        self._values[id(tensor)] = sources
        self._kept.append(tensor)

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        inputs = tensors((args, kwargs))
        parents = NOTHING.union(*(self.of(t) for t in inputs))
        place = (self.segment, self._count if self._segment == self.segment else 0)
        reads, draws = self._operators.value_reads, self._operators.random_draws
        address = address_of(func, args)
        if address is not None:
            return address
        if func in _DIFFERENTIATE:
            raise InnerGradient(getattr(func, "__name__", "grad"))
        try:
            out = func(*args, **kwargs)
        except (*VALUE_NEEDED, RuntimeError, TypeError) as error:
            out = self._placeholder(func, inputs, parents, error)
        if _name(func) in _PLACEHOLDERS:
            self._operators.read_draws |= any(self._operators.is_drawn(t) for t in inputs)
            self._note_read(out, parents, inputs)
            out = self._of_batch(out, parents, inputs)
        elif self._operators.value_reads != reads or _name(func) in self._pinned:
            self.control |= parents
        if self._operators.random_draws != draws:
            self._note_draws(place, func, args, kwargs, inputs, parents)
        self._record(func, out, inputs, parents)
        return out

    def _note_draws(
        self,
        place: tuple[int, int],
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[Tensor],
        parents: Sources,
    ) -> None:
        """Move the generators as with values, and note what a stage without them has to do."""
        anew = draws_by_values(_name(func))
        if any(is_fake(t) for t in inputs):
            with self.paused():
                anew |= not draw_in_vain(func, args, kwargs)
        elif any(not isinstance(source, str) for source in parents):  # will it without the values?
            anew |= not self._draws_on_fakes(func, args, kwargs)
        self.random_calls[place] = anew
        if anew:
            self._streams.anew()

    def _draws_on_fakes(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Tell whether the draws of a call can be made where its values are not known."""
        with self.paused(), without_modes():
            args, kwargs = map_tensors(as_fake, (args, kwargs))
            state = self._streams.random.state(host=False)
            try:
                return draw_in_vain(func, args, kwargs)
            finally:
                self._streams.random.put_back(state)

    def _placeholder(
        self, func: Any, inputs: list[Tensor], parents: Sources, error: Exception
    ) -> Any:
        name = _name(func)
        fakes = [t for t in inputs if is_fake(t)]
        if fakes and name not in _PLACEHOLDERS:
            self.failed.add(name)
        if not fakes or (name not in _PLACEHOLDERS and not isinstance(error, VALUE_NEEDED)):
            raise error
        if name not in _PLACEHOLDERS:
            raise ValueNeeded(name, calling_modules()) from error
        place = (self.segment, self._read_count[self.segment])
        if place in self._known_reads:
            return self._known_reads[place]
        self.reads.append((self.segment, parents, calling_modules()))
        if name == "__bool__":
            number = len(self.guesses)
            self.guesses.append(number < len(self._truth) and self._truth[number])
            return self.guesses[-1]
        with self.paused():
            return _PLACEHOLDERS[name](fakes[0])  # type: ignore[no-untyped-call]

    def _note_read(self, out: Any, parents: Sources, inputs: list[Tensor]) -> None:
        """Remember what was read: whoever runs this glue needs the value."""
        if not parents:
            return
        self.control |= parents
        place = (self.segment, self._read_count[self.segment])
        self._read_count[self.segment] += 1
        if not any(is_fake(t) for t in inputs):
            self.read_values[place] = out

    def _of_batch(self, out: Any, parents: Sources, inputs: list[Tensor]) -> Any:
        """What is read of the batch alone: every stage reads the same."""
        drawn = any(is_fake(t) or self._operators.is_drawn(t) for t in inputs)
        if parents or drawn or not isinstance(out, int):
            return out
        number = len(self.batch_reads)
        self.batch_reads.append(out)
        return self._instead.get(number, out)

    def _record(self, func: Any, out: Any, inputs: list[Tensor], parents: Sources) -> None:
        outputs = tensors(out)
        if not outputs:
            return
        if self._segment != self.segment:
            self._segment, self._count = self.segment, 0
        key = (-1, self.segment, self._count)
        self._count += 1
        self._script.setdefault(self.segment, []).append(function_name(func))
        for tensor in outputs:
            self._kept.append(tensor)
        if not isinstance(out, Tensor):
            for tensor in outputs:
                self._values[id(tensor)] = parents
            return
        if any(out is t for t in inputs):
            self._values[id(out)] = parents | self.of(out)
            return
        sources = parents or self._operators.of(out)
        if all(isinstance(s, str) for s in sources):
            # made of parameters and the batch only: every stage that needs it makes it again
            self._values[id(out)] = sources
            return
        self._results[key] = out
        self._values[id(out)] = frozenset({key})
        self.glue[key] = GlueValue(
            key,
            function_name(func),
            sources,
            Meta.of(out),
            (torch.is_grad_enabled() or not self._grad_enabled) and not self._recomputed(),
        )

    def script(self) -> tuple[tuple[str, ...], ...]:
        """The names of the glue calls that returned tensors, by the unit calls before them."""
        return tuple(tuple(self._script.get(n, ())) for n in range(self.segment + 1))

    def close(self) -> None:
        """Bar values from crossing whose storage was written: a receiver would not see the
        write."""
        for key, result in self._results.items():
            if self._operators.is_written(result):
                self.glue[key].can_cross = False
