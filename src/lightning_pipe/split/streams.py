"""Every module that draws has a stream of random numbers of its own.

A module whose own code draws (dropout, noise, a coin) begins its stream when it is called, seeded
by its name and the number of its calls in the step, and when it returns, the code around it finds
its own stream where it left it. So what a module draws does not depend on what ran before it here,
nor on which modules are units: every cut, one stage too, draws the same. A trace finds these
modules; the others need no seed. Code of the step itself, and of modules that hold units, draws
from its stream on every stage alike: what no value is there for is drawn in vain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lightning_pipe.split._fake import is_fake, without_modes
from lightning_pipe.split.patching import ENTRIES, Call, Replacement, attributes, made_up
from lightning_pipe.split.rng import KeyedRandom
from lightning_pipe.split.tree import map_tensors, tensors
from lightning_pipe.split.units import is_metric

#: name of a module that draws, "" for the step, to whether it draws from Python or NumPy too
Drawing = Mapping[str, bool]
#: modules that draw for nothing but to leave values out
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
_ANEW = -2  # tells the seeds of a stream that begins anew from others
#: calls of modules in a call of a unit; the names of its own parts begin with a dot
Entered = tuple[tuple[str, int], ...]


class Streams:
    """The random streams of one micro-batch on one rank.

    Args:
        modules: All modules of the step, by name (:func:`callable_modules`).
        random: Seeds.
        drawing: Modules with a stream of their own.
        watch: Look at all modules, and find those that draw.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        random: KeyedRandom,
        drawing: Drawing,
        *,
        watch: bool = False,
    ) -> None:
        self.random = random
        self.drawing = drawing
        self._modules = modules
        self._watch = watch
        #: whether anything here draws from Python or NumPy: their states are slow to keep
        self._host = watch or any(drawing.values())
        self._is_idle = not drawing and not watch
        self._counts: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()
        self._stack = [""]
        #: modules that drew, seen while watching
        self.found: dict[str, bool] = {}
        #: how often Python or NumPy drew, seen while watching
        self.num_moves = 0

    def begin(self) -> None:
        """Seed for the start of the step."""
        self.random.begin()
        if self._watch:
            self.random.mark()

    def salt(self, num_calls: int) -> None:
        """Seed anew after so many unit calls where other numbers are wanted."""
        self.look()
        self.random.salt(num_calls)
        if self._watch:
            self.random.mark()

    def anew(self) -> None:
        """Begin the stream of the code that runs now anew: it drew who knows how many numbers."""
        name = next(name for name in reversed(self._stack) if not name or name in self.drawing)
        self._begun[name] += 1
        self.random.seed(number_of(name), self._counts[name], _ANEW, self._begun[name], host=False)

    # ------------------------------------------------------------------ modules

    def replacements(self) -> Iterator[Replacement]:
        """List what gives the modules their streams for the length of a run."""
        for name in filter(None, self._modules if self._watch else self.drawing):
            module = self._modules[name]
            for entry in ENTRIES:
                yield module, entry, self._wrapper(name, getattr(module, entry), entry)

    def _wrapper(self, name: str, original: Call, entry: str) -> Call:
        host = self.drawing.get(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if entry == "forward" and self._stack[-1] == name:
                return original(*args, **kwargs)
            if host is None:
                return self._seen(name, original, args, kwargs)
            with self._stream(name, host):
                self._counts[name] += 1
                return original(*args, **kwargs)

        return call

    def _seen(self, name: str, original: Call, args: Any, kwargs: Any) -> Any:
        """Call a module that has no stream, for all that is known."""
        self.look()
        self._counts[name] += 1
        self._stack.append(name)
        try:
            return original(*args, **kwargs)
        finally:
            self.look()
            self._stack.pop()

    @contextmanager
    def _stream(self, name: str, host: bool) -> Iterator[None]:
        self.look()
        state = self.random.state(host=host)
        self.random.seed(number_of(name), self._counts[name], host=host)
        if self._watch:
            self.random.mark()
        self._stack.append(name)
        try:
            yield
        finally:
            self.look()
            self._stack.pop()
            self.random.put_back(state)
            if self._watch:
                self.random.mark()

    @contextmanager
    def of_unit(self, name: str, entered: Entered = ()) -> Iterator[None]:
        """Run a unit: nothing that it draws moves the stream of the code around it.

        Args:
            name: The unit.
            entered: What it calls, when traced: all stages count the same, whatever it calls now.
        """
        before = self._counts[name]
        if self._is_idle:  # nobody is known to draw before or after it
            self.random.seed(number_of(name), before, host=False)
            yield
            self._counts[name] = before + 1
            return
        known = [(part, self._counts[part] + n) for part, n in self._named(name, entered)]
        if name in self.drawing:  # its wrapper begins its stream
            yield
        else:
            with self._stream(name, self._host):
                yield
        for part, count in known:
            self._counts[part] = count
        self._counts[name] = max(self._counts[name], before + 1)

    def pass_over(self, name: str, entered: Entered) -> None:
        """Count as if a unit had been called that another stage calls."""
        before = self._counts[name]
        if self._is_idle:
            self._counts[name] = before + 1
            return
        for part, count in self._named(name, entered):
            self._counts[part] += count
        self._counts[name] = max(self._counts[name], before + 1)

    def _named(self, unit: str, entered: Entered) -> Iterator[tuple[str, int]]:
        for part, count in entered:
            name = unit + part if part.startswith(".") or not part else part
            if self._watch or name in self.drawing or not part:
                yield name, count

    # ------------------------------------------------------------------ again

    def counts(self) -> Counter[str]:
        """How often each module was called by now, for :meth:`again`."""
        return self._counts.copy()

    def rewind(self, counts: Counter[str]) -> None:
        """Count from there again: what ran since did not count."""
        self._counts = counts.copy()

    @contextmanager
    def again(
        self, counts: Counter[str], extra: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> Iterator[None]:
        """Run a part of the step once more, in a backward: its modules draw what they drew.

        Args:
            counts: How often modules had been called when that part began.
            extra: Units in it, which nobody routes in a backward, by the names that they have as
                units: a module may have several.
        """
        before, self._counts = self._counts, counts.copy()
        stack, self._stack = self._stack, [""]
        units = {name: module for name, module in extra.items() if name not in self.drawing}
        try:
            with attributes(self.replacements()), attributes(self._of_units(units)):
                yield
        finally:
            self._counts, self._stack = before, stack

    def _of_units(self, units: Mapping[str, nn.Module]) -> Iterator[Replacement]:
        for name, module in units.items():
            yield module, "_call_impl", partial(self._run_unit, name, module._call_impl)

    def _run_unit(self, name: str, original: Call, /, *args: Any, **kwargs: Any) -> Any:
        with self.of_unit(name):
            return original(*args, **kwargs)

    # ------------------------------------------------------------------ watching

    def note_draw(self) -> None:
        """A torch function draws in the module that was called last."""
        self.found.setdefault(self._stack[-1], False)

    def look(self) -> None:
        """Find out whether Python or NumPy drew in the module that was called last."""
        if self._watch and self.random.moved():
            self.found[self._stack[-1]] = True
            self.num_moves += 1
            self.random.mark()

    def kinds(self) -> dict[str, bool]:
        """Name all modules that may draw: those of a class of which one drew, or is known to.

        Dropout that trains is known to: its rate may be zero now and not later.
        """
        hosts: dict[type, bool] = {
            type(m): False for m in self._modules.values() if isinstance(m, DROPOUTS) and m.training
        }
        step: dict[str, bool] = {}
        for name, host in (*self.drawing.items(), *self.found.items()):
            if not name:
                step[name] = step.get(name, False) or host
                continue
            kind = type(self._modules[name])
            hosts[kind] = hosts.get(kind, False) or host
        return {**step, **{n: hosts[type(m)] for n, m in self._modules.items() if type(m) in hosts}}

    def entered_since(self, before: Counter[str], unit: str) -> Entered:
        """Say which modules were called since then, in a call of a unit."""
        inside = f"{unit}."
        return tuple(
            (name[len(unit) :] if unit and f"{name}.".startswith(inside) else name, count)
            for name, count in (self._counts - before).items()
        )


def callable_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Name the modules below ``root`` that may be given a stream: not scripts, nor metrics."""
    found: dict[str, nn.Module] = {}
    closed: tuple[str, ...] = ()
    for name, module in root.named_modules():
        if not name or name.startswith(closed) or is_metric(module):
            continue
        found[name] = module
        if isinstance(module, torch.jit.ScriptModule):
            del found[name]
            closed = (*closed, f"{name}.")
    return found


@lru_cache(maxsize=65536)
def number_of(name: str) -> int:
    """Make a part of a seed of the name of a module: the same on every rank and in every run."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


#: torch functions that draw as many numbers as the values that they are given ask for
_BY_VALUES = ("binomial", "dirichlet", "gamma", "poisson", "rrelu")


def draws_by_values(name: str) -> bool:
    """Tell whether a torch function of this name draws more numbers for some values."""
    return any(part in name for part in _BY_VALUES)


def draw_in_vain(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Move the generators as a torch function does that has no values here to draw for.

    The function runs on values that are made up, for its draws alone.

    Returns:
        Whether it could: it may refuse such values.
    """
    with torch.no_grad(), without_modes():
        try:
            args, kwargs = map_tensors(lambda t: made_up(t).clone(), (args, kwargs))
            func(*args, **kwargs)
        except Exception:
            return False
    return True


def has_fakes(*values: Any) -> bool:
    """Tell whether any of the tensors has no values."""
    return any(is_fake(tensor) for tensor in tensors(values))
