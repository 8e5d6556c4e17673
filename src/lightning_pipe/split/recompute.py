"""SEAM: ``torch.utils.checkpoint`` in the glue, while a step is traced or run.

A region that is recomputed in the backward runs there without any of our routing but that of random
streams. That is right for a region that holds one unit of this stage and draws nothing around it;
every other one (units of several stages, a ghost) runs plainly, its tensors are kept, and its
numbers are the same. The reentrant kind hides from autograd that its outputs have gradients until
it is over, so it is replaced by the other kind, which computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from lightning_pipe.split._fake import is_fake

Function = Callable[..., Any]


class Regions:
    """Counts the checkpointed regions outside of units.

    Args:
        busy: Tells whether a unit is running: what it does inside is its own affair.
        draws: Counts the random draws of the glue.
        known: Region to the one unit call in it, or None; from the trace. None while tracing.
        owns: Tells whether this stage runs a call.
        replay: Makes of a function one that runs in the backward and draws what it draws now,
            given the unit call in it, or None inside of a unit.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        *,
        draws: Callable[[], int] = lambda: 0,
        known: Mapping[int, int | None] | None = None,
        owns: Callable[[int], bool] = lambda call: False,
        replay: Callable[[Function, int | None], Function] = lambda function, call: function,
    ) -> None:
        self._busy = busy
        self._draws = draws
        self._known = known
        self._owns = owns
        self._replay = replay
        self._open: list[list[int]] = []
        self._count = 0
        #: whether there is any region, inside of units too
        self.seen = False
        #: whether one runs again for the backward here, and not plainly
        self.recomputes = False
        #: region to the one unit call in it, None where it has none or several, or draws
        self.found: dict[int, int | None] = {}

    @property
    def inside(self) -> bool:
        """Tell whether a region is open."""
        return bool(self._open)

    def note_call(self, index: int) -> None:
        """Record that a unit was called."""
        for calls in self._open:
            calls.append(index)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Stand between the step and ``torch.utils.checkpoint``."""
        module = torch.utils.checkpoint
        generator, reentrant = (
            module._checkpoint_without_reentrant_generator,
            module.CheckpointFunction,
        )

        def region(function: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            self.seen = True
            if self._busy():
                self.recomputes = True
                yield from generator(self._replay(function, None), *args, **kwargs)
                return
            with self._region() as (plain, call):
                if plain:
                    yield
                else:
                    self.recomputes = True
                    yield from generator(self._replay(function, call), *args, **kwargs)

        class Reentrant:
            """What ``checkpoint`` looks up where it finds ``CheckpointFunction``."""

            @staticmethod
            def apply(function: Any, preserve: bool, *args: Any) -> Any:
                self.seen = True
                if self._busy():
                    later = _second(function, self._replay(function, None))
                    return reentrant.apply(later, preserve, *args)
                if self._needs_gradient(args):
                    return module.checkpoint(
                        function, *args, use_reentrant=False, preserve_rng_state=preserve
                    )
                with self._region(), torch.no_grad():
                    return function(*args)

        space = vars(module)
        space["_checkpoint_without_reentrant_generator"] = region
        space["CheckpointFunction"] = Reentrant
        try:
            yield
        finally:
            space["_checkpoint_without_reentrant_generator"] = generator
            space["CheckpointFunction"] = reentrant

    def _needs_gradient(self, args: Any) -> bool:
        """Tell whether the reentrant kind would give the region a gradient: if an input has one.
        A ghost at run time does not say whether it has."""
        running = self._known is not None
        return any(
            isinstance(a, Tensor) and (a.requires_grad or (running and is_fake(a))) for a in args
        )

    @contextmanager
    def _region(self) -> Iterator[tuple[bool, int | None]]:
        """Open the next region; yields whether it runs plainly, and the one unit call in it."""
        number, self._count = self._count, self._count + 1
        calls: list[int] = []
        draws = self._draws()
        self._open.append(calls)
        try:
            call = None if self._known is None else self._known.get(number)
            yield call is None or not self._owns(call), call
        finally:
            self._open.pop()
            one = len(calls) == 1 and self._draws() == draws
            self.found[number] = calls[0] if one else None


def _second(first: Function, others: Function) -> Function:
    """One function the first time, another one from then on."""
    called = False

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal called
        now, called = others if called else first, True
        return now(*args, **kwargs)

    return function
