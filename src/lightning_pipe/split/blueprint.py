"""A module whose weights can be made again, so that they need not be there.

While `configure_model` runs, every operation runs as it would on one device, in the same order and
with the same random numbers. What is large and is no longer looked at is freed, and kept as a
recipe: the operations that made it, each with the state of the random generator before it. Whoever
reads such a weight gets it made again. After the cut the rank makes what it owns, and forgets the
rest. So it never holds more than its share, the largest tensor and `BUDGET_BYTES`.

Weights that a module made on the meta device are initialised by its `reset_parameters`.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import (
    num_users,
    plain_functions,
    storage_key,
)
from lightning_pipe.split.absent import Absent
from lightning_pipe.split.frozen import version_of
from lightning_pipe.split.recipe import Entry, Held, Storage, Tape, View
from lightning_pipe.split.rng import Drawn
from lightning_pipe.split.schemas import mutated_arguments
from lightning_pipe.split.shown import ColdParameter, Functions, Operations
from lightning_pipe.split.tree import map_tensors, tensors

LEAST_BYTES = 1 << 16
"""Smaller tensors stay as they are."""
BUDGET_BYTES = 1 << 26
"""So much stays for those who look at it next."""

#: these replace everything that was in the tensor they write
_FILLS = frozenset(
    (
        *("uniform_", "normal_", "fill_", "zero_", "copy_", "random_", "bernoulli_", "log_normal_"),
        *("exponential_", "cauchy_", "geometric_"),
    )
)
_PLAIN_FILLS = frozenset(("copy_", "fill_", "zero_"))
_RESIZES = frozenset(("resize_", "resize_as_", "set_"))


class Blueprint:
    """What is needed to make the weights of a module again.

    Args:
        device: Where weights are made that the module has put on the meta device.

    Attributes:
        peak_bytes: Most bytes that weights with a recipe have held at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.budget_bytes = BUDGET_BYTES
        self.peak_bytes = 0
        self._tape = Tape()
        self._numbers = itertools.count()
        self._known: dict[int, Storage] = {}
        self._hot: OrderedDict[int, Storage] = OrderedDict()
        self._hot_bytes = 0
        self._now: set[int] = set()
        self._active = 0
        self._building = False
        self._guarded: list[tuple[nn.Parameter, type[nn.Parameter]]] = []
        self._absent = Absent(device)

    @property
    def is_active(self) -> bool:
        """Whether operations are seen."""
        return bool(self._active)

    # ------------------------------------------------------------------ contexts

    @contextmanager
    def building(self, module: nn.Module) -> Iterator[None]:
        """Code makes weights of a module; at the end all that is cold are its parameters."""
        if self._active:
            yield
            return
        with self._settled(module), self._modes():
            yield
            self._absent.make(module)

    def make_absent(self, module: nn.Module) -> None:
        """Initialises what code before has put on the meta device."""
        with self._settled(module), self._modes():
            self._absent.make(module)

    @contextmanager
    def _settled(self, module: nn.Module) -> Iterator[None]:
        self.unguard()
        before, self._building = self._building, True
        try:
            yield
        finally:
            self._building = before
            with plain_functions():
                self._settle(module)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Code reads and writes weights."""
        if self._active:
            yield
            return
        with self._modes():
            yield

    @contextmanager
    def _modes(self) -> Iterator[None]:
        self._active += 1
        try:
            with Functions(self), Operations(self):
                yield
        finally:
            self._active -= 1

    def _settle(self, module: nn.Module) -> None:
        """Only parameters of the module that share memory with nothing else may be cold."""
        users = Counter(map(storage_key, module.parameters()))
        self._drop_unused()
        for storage in list(self._known.values()):
            if num_users(storage.handle) != 1 + users[storage.key]:
                self._pin(storage)
        for parameter in module.parameters():
            if type(parameter) not in (nn.Parameter, ColdParameter):
                self.pin_all(parameter)
        self.guard(module)

    def guard(self, module: nn.Module) -> None:
        """Whoever uses a parameter that is cold gets it made."""
        for parameter in module.parameters():
            if self.is_cold(parameter) and type(parameter) is not ColdParameter:
                self._guarded.append((parameter, type(parameter)))
                parameter.__class__ = ColdParameter
                vars(parameter)["blueprint"] = self

    def unguard(self) -> None:
        """Parameters are plain again; reading one that is not there ends the process."""
        for parameter, kind in self._guarded:
            parameter.__class__ = kind
            vars(parameter).pop("blueprint", None)
        self._guarded.clear()

    @contextmanager
    def unguarded(self, module: nn.Module) -> Iterator[None]:
        """Our own code replaces parameters, and reads none.

        Raises:
            ConfigError: One has no value.
        """
        self._absent.check()
        self.unguard()
        try:
            yield
        except BaseException:
            self.guard(module)
            raise

    def check(self) -> None:
        """Refuses weights that were made on the meta device and never given a value.

        Raises:
            ConfigError: With their names.
        """
        self._absent.check()

    # ------------------------------------------------------------------ in the end

    def is_cold(self, tensor: Tensor) -> bool:
        """Whether a tensor can be made again, so that it need not be there."""
        return self._of(tensor) is not None

    @property
    def digest(self) -> str:
        """The same on ranks that built the same weights."""
        return self._tape.digest

    def finish(self) -> None:
        """Makes everything that somebody still has, and forgets how."""
        self.unguard()
        self._drop_unused()
        for storage in list(self._known.values()):
            self._pin(storage)
        self._tape = Tape()

    # ------------------------------------------------------------------ one operation

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation, and notes it if it is part of a recipe."""
        name = func.overloadpacket.__name__
        given = tensors((args, kwargs))
        written = mutated_arguments(func, args, kwargs)
        with self._absent.following(given, written) as results:
            results.append(self._run(name, func, args, kwargs, given, written))
        return results[0]

    def _run(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> Any:
        inputs = {storage_key(t): s for t in given if (s := self._of(t)) is not None}
        self._now = {storage.number for storage in inputs.values()}
        if name in _RESIZES:
            self.pin_all(given)
            return func(*args, **kwargs)
        if not written and _only_looks(func):
            return self._looked(func, args, kwargs, inputs.values())
        filled = self._filled(name, given)
        if filled is not None and filled.number not in self._hot and name in _PLAIN_FILLS:
            # as when a checkpoint is loaded: done when somebody looks
            return self._noted(None, func, args, kwargs, inputs, written, filled)
        for storage in inputs.values():
            if storage.number in self._hot:
                self._hot.move_to_end(storage.number)
            elif storage is filled:
                self._warm(storage)
            else:
                self._make(storage)
        if not self._building and not any(map(self.is_cold, written)):
            result = func(*args, **kwargs)
        else:
            result = self._noted(func, func, args, kwargs, inputs, written, filled)
        self._cool_down()
        return result

    def _looked(
        self, func: Any, args: Any, kwargs: dict[str, Any], inputs: Iterable[Storage]
    ) -> Any:
        """A view, say: there has to be memory, whatever is in it."""
        cold = [storage for storage in inputs if storage.number not in self._hot]
        for storage in cold:
            storage.handle.resize_(storage.num_bytes)
        try:
            return func(*args, **kwargs)
        finally:
            for storage in cold:
                storage.handle.resize_(0)

    def _filled(self, name: str, given: Sequence[Tensor]) -> Storage | None:
        """The storage that an operation fills, whatever was in it."""
        storage = self._of(given[0]) if name in _FILLS else None
        if storage is None or not _is_whole(given[0], storage.num_bytes):
            return None
        keys = [storage_key(tensor) for tensor in given]
        return storage if keys.count(keys[0]) == 1 else None

    def _noted(
        self,
        run: Any,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: Mapping[int, Storage],
        written: Sequence[Tensor],
        filled: Storage | None,
    ) -> Any:
        drawn = Drawn.before(func, args, kwargs)
        before = {s.number: s.last for s in inputs.values() if s is not filled}
        arguments = map_tensors(self._encoded, (args, kwargs))
        result = args[0] if run is None else run(*args, **kwargs)
        made = {}
        for place, output in enumerate(tensors(result)):
            if storage_key(output) not in inputs and (new := self._track(output)) is not None:
                made[place] = new
        writes = [s for t in written if (s := self._of(t)) is not None]
        if made or writes:
            for storage in (*writes, *made.values()):
                storage.last = self._tape.length
            makes = {place: storage.number for place, storage in made.items()}
            numbers = frozenset(storage.number for storage in writes)
            self._tape.add(Entry(func, arguments, numbers, makes, before, drawn))
        return result

    def _encoded(self, tensor: Tensor) -> View | Held:
        storage = self._of(tensor)
        if storage is not None:
            return View(storage.number, tensor)
        if tensor.numel() * tensor.element_size() < LEAST_BYTES:
            return Held(tensor.detach().clone(), None)
        return Held(tensor, version_of(tensor))

    # ------------------------------------------------------------------ storages

    def _of(self, tensor: Tensor) -> Storage | None:
        return self._known.get(storage_key(tensor))

    def _track(self, tensor: Tensor) -> Storage | None:
        """Begins a recipe for a new tensor, if it is large and plain."""
        if not self._building or tensor.layout != torch.strided or tensor.is_meta:
            return None
        handle = tensor.untyped_storage()
        if handle.nbytes() < LEAST_BYTES or not handle.resizable():
            return None
        storage = Storage(next(self._numbers), storage_key(tensor), handle, handle.nbytes())
        self._known[storage.key] = storage
        self._now.add(storage.number)
        self._heat(storage)
        return storage

    def _heat(self, storage: Storage) -> None:
        self._hot[storage.number] = storage
        self._hot_bytes += storage.num_bytes
        self.peak_bytes = max(self.peak_bytes, self._hot_bytes)

    def _warm(self, storage: Storage) -> None:
        """Gives a storage memory, whatever is in it."""
        self._cool_down(storage.num_bytes)
        storage.handle.resize_(storage.num_bytes)
        self._heat(storage)

    def _cool(self, storage: Storage) -> None:
        self._leave(storage)
        storage.handle.resize_(0)

    def _leave(self, storage: Storage) -> None:
        if self._hot.pop(storage.number, None) is not None:
            self._hot_bytes -= storage.num_bytes

    def _drop_unused(self) -> None:
        """Forgets what nobody has any more."""
        for storage in list(self._known.values()):
            if num_users(storage.handle) == 1:
                self._cool(storage)
                del self._known[storage.key]

    def _cool_down(self, more_bytes: int = 0) -> None:
        """Frees what was not looked at for longest, but for what is looked at now."""
        for number, storage in list(self._hot.items()):
            if self._hot_bytes + more_bytes <= self.budget_bytes:
                return
            if number not in self._now:
                self._cool(storage)

    def _pin(self, storage: Storage) -> None:
        """From here on a storage is as any other."""
        if storage.number not in self._hot:
            self._make(storage)
        self._leave(storage)
        del self._known[storage.key]

    def pin_all(self, values: Any) -> None:
        """Tensors in a nest are as any others from here on."""
        for tensor in tensors(values):
            storage = self._of(tensor)
            if storage is not None:
                self._pin(storage)

    def _make(self, storage: Storage) -> None:
        """Follows the recipe of a storage."""
        self._warm(storage)
        self._tape.make(storage)


def _only_looks(func: Any) -> bool:
    """Whether an operation makes views only."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _is_whole(tensor: Tensor, num_bytes: int) -> bool:
    """Whether a tensor is all of a storage of so many bytes, each place once."""
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if length != 1 and stride != size:
            return False
        size *= length
    return size * tensor.element_size() == num_bytes


__all__ = ["Blueprint"]
