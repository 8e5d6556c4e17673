"""Where does a tensor come from? One of two ledgers, kept while a step is traced.

The value ledger (a torch-function mode) sees the torch calls that the glue makes, in an order that
can be repeated, and makes each result a value that may be sent. The other one is in
:mod:`lightning_pipe.split.operators`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.split._fake import (
    VALUE_NEEDED,
    TorchFunctionMode,
    as_fake,
    is_fake,
    without_modes,
)
from lightning_pipe.split.operators import NOTHING, OperatorLedger, Sources, calling_modules
from lightning_pipe.split.streams import Streams, draw_in_vain, draws_by_values
from lightning_pipe.split.trace import GlueValue, Meta, Source
from lightning_pipe.split.tree import map_tensors, tensors
from lightning_pipe.split.typed import address_of


class ValueNeeded(Exception):
    """The glue needs the value of a tensor that another stage computes."""

    def __init__(self, function: str, frames: tuple[int, ...]) -> None:
        super().__init__(f"{function} needs the value of a tensor that another stage computes")
        self.frames = frames


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
