"""Trace a step, and choose the units again until the trace can be cut.

Each refusal of the tracer names a module that must stay whole or be opened; the loop ends because
every round adds at least one name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.split._fake import is_fake, quiet_fakes
from lightning_pipe.split.callers import KeepWhole
from lightning_pipe.split.ends import Skipped
from lightning_pipe.split.generators import generators_of
from lightning_pipe.split.memo import SharedOutcomes, UnitMemo
from lightning_pipe.split.memoised import clear_memoised
from lightning_pipe.split.provenance import InnerGradient, ValueNeeded
from lightning_pipe.split.rng import Salts, preserved
from lightning_pipe.split.streams import Drawing
from lightning_pipe.split.trace import Trace
from lightning_pipe.split.tracer import Silenced, Tracer
from lightning_pipe.split.units import find_units, has_blocks, has_children, num_parameters

_MAX_ROUNDS = 40
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Given(NamedTuple):
    """What every attempt is given, whatever was found out: random numbers, silence, what other
    ranks know."""

    key: int
    salts: Salts | None
    device_type: str
    silenced: Silenced | None
    shared: SharedOutcomes | None
    instead: Mapping[int, Any] | None


class _Search:
    """The state of the loop: which modules were found to be indivisible, which too coarse."""

    def __init__(
        self,
        root: nn.Module,
        num_stages: int,
        like: Trace | None,
        memo: UnitMemo | None,
        given: _Given,
    ) -> None:
        self.root = root
        self.given = given
        self.like = like
        self.memo = memo if like is not None else None
        self.num_stages = num_stages
        self.keep_whole: set[str] = set(like.keep_whole) if like else set()
        self.open_up: set[str] = set(like.open_up) if like else set()
        self.known_reads = dict(like.read_values) if like else {}
        self.real = False
        self.truth: tuple[bool, ...] = ()
        self.pinned: set[str] = set(like.pinned) if like else set()
        self.drawing: Drawing = like.drawing if like else {}
        self.notes: list[str] = []
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.names = {id(m): n for n, m in root.named_modules()}
        self.total = num_parameters(root)

    def units(self) -> dict[str, nn.Module]:
        return find_units(
            self.root, self.num_stages, keep_whole=self.keep_whole, open_up=self.open_up
        )

    def keep(self, names: set[str], why: str) -> bool:
        """Keep modules whole from the next round on; tell whether that is new."""
        new = names - self.keep_whole
        if not new:
            return False
        self.keep_whole |= new
        self.open_up -= new
        self.notes.append(f"{', '.join(sorted(new))} kept whole: {why}")
        return True

    def go_real(self, why: str) -> None:
        """Trace with real values from the next round on.

        Raises:
            CutError: It is real already, or the weights are on other ranks.
        """
        if self.real:
            raise CutError(f"the step cannot be traced: {why}")
        foreign = [n for n, p in self.root.named_parameters() if is_fake(p)]
        if foreign:
            raise CutError(
                f"the step cannot be traced: {why}; its values are needed but "
                f"{len(foreign)} parameters "
                f"(such as {foreign[0]}) are on other ranks. Give batches of the shape "
                "of the first one."
            )
        self.real = True
        self.notes.append(f"traced with real values: {why}")

    def inside_opened(self, module_ids: set[int], units: dict[str, nn.Module]) -> set[str]:
        """Of the modules given, those that were opened and hold less than half of the model."""
        found = set()
        for identity in module_ids:
            name = self.names.get(identity)
            if not name or name in units or isinstance(self.modules[name], _CONTAINERS):
                continue
            opened = any(unit.startswith(name + ".") for unit in units)
            if opened and num_parameters(self.modules[name]) < 0.5 * self.total:
                found.add(name)
        return found


def trace_step(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    num_stages: int,
    key: int = 0,
    salts: Salts | None = None,
    device_type: str = "cpu",
    like: Trace | None = None,
    memo: UnitMemo | None = None,
    silenced: Silenced | None = None,
    shared: SharedOutcomes | None = None,
    instead: Mapping[int, Any] | None = None,
) -> Trace:
    """Trace ``step(batch)`` on fakes and find the units of ``root`` that fit ``num_stages`` stages.

    Nothing that the step changes is left behind: attributes, containers, buffers, memoised helpers
    and random generators are put back. Gradient mode is that of the caller: call under
    ``torch.no_grad()`` to trace an evaluation step.

    Args:
        root: The user's module; its parameters may be fakes where they belong to other ranks.
        step: The step as a function of one micro-batch.
        batch: One micro-batch, any nest of tensors.
        num_stages: Stages to cut into (P * V), which decides how fine the units are.
        key: Random key of the micro-batch.
        salts: Other random seeds for some places of the step.
        device_type: Device whose random generator is keyed beside the CPU's.
        like: The first trace of the module: its units are chosen again, and where it had to read
            values for real, those are taken for granted.
        memo: What units did before, which spares running all of them; only with ``like``.
        silenced: What to replace so that the step talks to nobody, such as loggers.
        shared: What units did on other ranks that cannot be run on this one.
        instead: What is read of the batch, by the number of the read, in place of what it says.

    Raises:
        CutError: The step cannot be traced; the message names the module and the reason.
    """
    given = _Given(key, salts, device_type, silenced, shared, instead)
    search = _Search(root, num_stages, like, memo, given)
    try:
        return _search(search, step, batch)
    except CutError as refusal:
        if num_stages > 1:
            raise
        # nothing is cut, so nothing needs to be known
        return Trace(training=torch.is_grad_enabled(), notes=(f"not traced: {refusal}",))


def _search(search: _Search, step: Callable[[Any], Any], batch: Any) -> Trace:
    with preserved(search.given.device_type, generators_of(search.root)), quiet_fakes():
        for _ in range(_MAX_ROUNDS):
            units = search.units()
            try:
                trace = _attempt(search, units, step, batch)
            finally:
                clear_memoised(search=search.memo is None)
            if trace is not None:
                trace.notes = (*search.notes, *trace.notes)
                trace.keep_whole = frozenset(search.keep_whole)
                trace.open_up = frozenset(search.open_up)
                trace.pinned = frozenset(search.pinned)
                trace.read_values = {**search.known_reads, **trace.read_values}
                return trace
    raise CutError(f"the step cannot be traced in {_MAX_ROUNDS} rounds: {'; '.join(search.notes)}")


def _attempt(
    search: _Search,
    units: dict[str, nn.Module],
    step: Callable[[Any], Any],
    batch: Any,
) -> Trace | None:
    tracer = Tracer(
        search.root,
        units,
        real=search.real,
        truth=search.truth,
        known_reads=search.known_reads,
        pinned=search.pinned,
        memo=search.memo,
        like=search.like,
        drawing=search.drawing,
        **search.given._asdict(),
    )
    try:
        trace = tracer.run(step, batch)
    except Exception as error:
        search.pinned |= tracer.values.failed
        _mend(search, units, tracer, error)
        return None
    again = (
        _value_dependent(search, units, tracer)
        or _uncalled(search, units, trace)
        or _leaking(search, units, tracer, trace)
        or _drawing(search, trace)
    )
    return None if again else trace


def _mend(search: _Search, units: dict[str, nn.Module], tracer: Tracer, error: Exception) -> None:
    """Change the search so that the next round does not fail like this; or raise."""
    if isinstance(error, KeepWhole):
        if not search.keep({error.name}, str(error)):
            raise CutError(str(error)) from error
    elif isinstance(error, ValueNeeded):
        if not _blame(search, units, set(error.frames), "its code needs values"):
            search.go_real(str(error))
    elif isinstance(error, InnerGradient):
        raise CutError(
            f"the step calls {error} inside itself: its graph would have to reach through all "
            "stages, and a stage only has its own part. Take the term out of the step, or train "
            "this model on one device."
        ) from None
    elif isinstance(error, Skipped) and not search.real and _guess_again(search, tracer):
        return
    elif isinstance(error, CutError) or search.real or _users_own(error, tracer):
        raise error
    elif not _guess_again(search, tracer):
        _retry_real(search, error)


def _guess_again(search: _Search, tracer: Tracer) -> bool:
    """Conditions on fakes were taken for false and the step raised: take the last one for true."""
    guesses = list(tracer.values.guesses)
    while guesses and guesses[-1]:
        guesses.pop()
    if not guesses:
        return False
    search.truth = (*guesses[:-1], True)
    return True


def _users_own(error: Exception, tracer: Tracer) -> bool:
    """Tell whether the step fails before any unit was called: then it fails on one device too."""
    return not tracer.calls


def _retry_real(search: _Search, error: Exception) -> None:
    """The step failed on fakes; a run with real values tells whether it fails on one device too."""
    try:
        search.go_real(f"{type(error).__name__}: {error}")
    except CutError as refusal:
        raise refusal from error


def _blame(search: _Search, units: dict[str, nn.Module], frames: set[int], why: str) -> bool:
    found = search.inside_opened(frames, units)
    innermost = sorted(found, key=len)[-1:]
    return bool(innermost) and search.keep(set(innermost), why)


def _value_dependent(search: _Search, units: dict[str, nn.Module], tracer: Tracer) -> bool:
    """Keep modules whole whose own glue reads values; or trace for real when the outer step
    does."""
    if search.keep(
        search.inside_opened(tracer.operators.reading_modules, units), "its code depends on values"
    ):
        search.real = False
        return True
    early = [r for r in tracer.values.reads if r[0] < len(tracer.calls)]
    if not early or search.real:
        return False
    frames = {identity for _, _, stack in early for identity in stack}
    if _blame(search, units, frames, "its code reads values"):
        return True
    search.go_real("a value is read between the blocks")
    return True


def _uncalled(search: _Search, units: dict[str, nn.Module], trace: Trace) -> bool:
    """Close a module again whose children are never called but whose weights are read by its own
    code."""
    called = {call.unit for call in trace.calls}
    parents: set[str] = set()
    for name, module in units.items():
        read = any(
            f"{name}.{inner}" in trace.glue_parameters for inner, _ in module.named_parameters()
        )
        if name in called or not read:
            continue
        parent = name.rpartition(".")[0]
        while parent and isinstance(search.modules[parent], _CONTAINERS):
            parent = parent.rpartition(".")[0]
        if parent and not has_blocks(search.modules[parent]):
            parents.add(parent)
    return search.keep(parents, "its code reads the weights of its children")


def _drawing(search: _Search, trace: Trace) -> bool:
    """Give modules that draw their streams before the step's way depends on what it draws."""
    new = trace.draws and trace.drawing != search.drawing
    search.drawing = trace.drawing
    return new


def _leaking(search: _Search, units: dict[str, nn.Module], tracer: Tracer, trace: Trace) -> bool:
    """Open a unit when a tensor made inside it is used outside without being an output."""
    leaking = {trace.calls[index].unit for index in tracer.operators.leaks}
    if not leaking:
        return False
    divisible = {n for n in leaking if has_children(units[n])} - search.open_up - search.keep_whole
    if divisible:
        search.open_up |= divisible
        search.notes.append(
            f"{', '.join(sorted(divisible))} opened: an inner tensor is used outside"
        )
        return True
    name = sorted(leaking)[0]
    raise CutError(
        f"'{name}' cannot be cut off: a tensor that is made inside it is used outside "
        "without being "
        "returned; return it from forward, or keep it in an attribute of the module that makes it."
    )
