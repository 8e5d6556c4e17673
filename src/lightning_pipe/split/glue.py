"""The glue of a stage: the torch calls between units, numbered as the trace numbered them."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lightning_pipe.errors import CutError
from lightning_pipe.split._fake import (
    GHOSTS,
    VALUE_NEEDED,
    TorchFunctionMode,
    is_fake,
    is_foreign,
    taint,
)
from lightning_pipe.split.provenance import function_name
from lightning_pipe.split.streams import Streams, draw_in_vain, has_fakes
from lightning_pipe.split.trace import Trace, ValueKey
from lightning_pipe.split.tree import tensors
from lightning_pipe.split.typed import address_of
from lightning_pipe.split.watch import check_script


class GlueRun(Protocol):
    """What the glue has to know of the micro-batch that runs."""

    trace: Trace
    #: unit calls so far
    count: int
    #: a unit is running
    busy: bool
    streams: Streams
    received: dict[ValueKey, Tensor]
    wanted: frozenset[ValueKey]
    produced: dict[ValueKey, Tensor]

    @property
    def watched_stage(self) -> int | None:
        """The stage, if its trace may be wrong."""

    def hook_runs_elsewhere(self, tensor: Any) -> bool:
        """Tell whether a tensor hook belongs to another stage."""

    def explain(self, name: str, inputs: Any, error: Exception) -> Exception:
        """Turn a failure that only a ghost can cause into one that says so."""


class Glue(TorchFunctionMode):
    """Repeats the numbering of the trace; puts received glue values in and takes sent ones out."""

    def __init__(self, run: GlueRun) -> None:
        super().__init__()
        self._run = run
        self._segment = 0
        self._count = 0

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        run = self._run
        if run.busy:
            return func(*args, **kwargs)
        segment = run.count
        count = self._count if self._segment == segment else 0
        key = (-1, segment, count)
        name = getattr(func, "__name__", "")
        if name in _HOOKS and run.hook_runs_elsewhere(args[0]):
            return NoHandle()
        address = address_of(func, args)
        if address is not None:
            return address
        anew = run.trace.random_glue.get(key[1:])
        if key in run.received and function_name(func) == run.trace.glue[key].function:
            self._segment, self._count = segment, count + 1
            if anew is not None:
                self._follow(func, args, kwargs, anew=anew, in_vain=True)
            return run.received[key]
        out = self._computed(key, func, args, kwargs, anew)
        if GHOSTS.tainted:
            _spread_taint((args, kwargs), out)
        if isinstance(out, Tensor) or tensors(out):
            self._segment, self._count = segment, count + 1
            self._made(key, func, out)
        return out

    def _computed(
        self, key: tuple[int, int, int], func: Any, args: Any, kwargs: Any, anew: bool | None
    ) -> Any:
        run = self._run
        in_vain = anew is not None and has_fakes(args, kwargs)
        state = run.streams.random.state(host=False) if in_vain else None
        try:
            out = func(*args, **kwargs)
        except (*VALUE_NEEDED, RuntimeError, TypeError) as error:
            name = getattr(func, "__name__", "")
            raise run.explain(name, (args, kwargs), error) from error
        if state is not None:  # some of its draws may have been made
            run.streams.random.put_back(state)
        if anew is not None:
            self._follow(func, args, kwargs, anew=anew, in_vain=in_vain)
        return out

    def _follow(self, func: Any, args: Any, kwargs: Any, *, anew: bool, in_vain: bool) -> None:
        """Let the generators stand after a call where they stand on a stage with its values."""
        if anew:
            self._run.streams.anew()
        elif in_vain:
            draw_in_vain(func, args, kwargs)

    def _made(self, key: tuple[int, int, int], func: Any, out: Any) -> None:
        run = self._run
        if run.watched_stage is not None:
            check_script(run.trace, key[1], key[2], func, run.watched_stage)
        wanted = key in run.wanted
        if key in run.received or (wanted and function_name(func) != run.trace.glue[key].function):
            raise CutError(
                f"the step went another way than when it was traced: {function_name(func)} where "
                f"{run.trace.name(key)} was expected."
            )
        if wanted:
            run.produced[key] = out

    def done(self, segment: int) -> int:
        """How many calls that return tensors were made in a segment, if it is the last one."""
        return self._count if self._segment == segment else 0


def _spread_taint(inputs: Any, out: Any) -> None:
    """What is made from a tensor that lost a write is as wrong as the tensor."""
    if any(is_foreign(t) and not is_fake(t) for t in tensors(inputs)):
        taint(t for t in tensors(out) if not is_fake(t))


_HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})


class NoHandle:
    """The handle of a hook that runs on another stage."""

    def remove(self) -> None:
        """Nothing was registered here."""
