"""Run a step once and write down its unit calls.

Units run on fakes: no memory, no compute. A unit whose code cannot run on fakes (its shapes depend
on values) runs on random inputs of the same shapes instead. With ``real=True`` everything runs for
real: the way out for a step whose glue needs values on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from functools import partial
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.split._fake import (
    GHOSTS,
    function_mode_off,
    inside_step,
    without_modes,
)
from lightning_pipe.split.callers import KeepWhole, check_callers, whole_for_hooks
from lightning_pipe.split.frozen import contents, holds_fake
from lightning_pipe.split.generators import generators_of
from lightning_pipe.split.graph import leaves_of
from lightning_pipe.split.memo import (
    Outcome,
    SharedOutcomes,
    UnitMemo,
    arguments_key,
    rebuild,
)
from lightning_pipe.split.nest import copy_tensors, leaves
from lightning_pipe.split.nested import opened_encoders
from lightning_pipe.split.operators import OperatorLedger, Sources
from lightning_pipe.split.patching import (
    Replacement,
    Wrapper,
    attributes,
    find_metrics,
    noted_hooks,
    outermost,
    routed,
    run_forward_hooks,
    silent_metrics,
    silent_talk,
)
from lightning_pipe.split.provenance import InnerGradient, ValueLedger
from lightning_pipe.split.recompute import Regions
from lightning_pipe.split.rng import KeyedRandom, Salts
from lightning_pipe.split.saved import SavedTensors
from lightning_pipe.split.snapshot import Snapshot
from lightning_pipe.split.streams import Drawing, Streams, callable_modules
from lightning_pipe.split.trace import (
    Constant,
    Leaf,
    NewTensor,
    SideAttribute,
    Source,
    Trace,
    UnitCall,
)
from lightning_pipe.split.tree import TreeSpec, flatten, tensors, unflatten
from lightning_pipe.split.typed import asking_files
from lightning_pipe.split.unit_calls import UnitRunner, own_objects, tensor_attributes

#: the replacements that keep a step from talking, given what takes note of what it would have said
Silenced = Callable[[Callable[[Any], None]], Iterable[Replacement]]


class Tracer:
    """Traces one step. Build one for each attempt; :meth:`run` may be called once.

    Args:
        root: The user's module.
        units: Name to module, from :func:`lightning_pipe.split.units.find_units`.
        real: Run everything for real instead of on fakes.
        key: Random key of the traced micro-batch.
        truth: What conditions on fakes are taken for, in their order; false after these.
        known_reads: What an earlier trace with real values read.
        pinned: Torch functions that failed on fakes: whoever calls them needs their inputs.
        device_type: Device whose random generator is keyed beside the CPU's.
        salts: Other seeds for some places.
        memo: What units did in earlier traces; those of a known class are not run again.
        like: The first trace, with which the memo began.
        silenced: What to replace so that the step talks to nobody, given what takes note of what
            it would have said.
        shared: What units did on other ranks that cannot be run here.
        drawing: Modules that are known to draw.
        instead: What is read of the batch, by the number of the read, in place of what it says.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Mapping[str, nn.Module],
        *,
        real: bool = False,
        key: int = 0,
        device_type: str = "cpu",
        salts: Salts | None = None,
        truth: Sequence[bool] = (),
        known_reads: Mapping[tuple[int, int], Any] | None = None,
        pinned: Set[str] = frozenset(),
        memo: UnitMemo | None = None,
        like: Trace | None = None,
        silenced: Silenced | None = None,
        shared: SharedOutcomes | None = None,
        drawing: Drawing | None = None,
        instead: Mapping[int, Any] | None = None,
    ) -> None:
        self._shared = SharedOutcomes() if shared is None else shared
        self._silenced = silenced
        self._memo = None if real else memo
        self._like = like
        self._root = root
        self._units = units
        self._real = real
        self.streams = Streams(
            callable_modules(root),
            KeyedRandom(key, device_type, generators_of(root), salts=salts),
            drawing or {},
            watch=True,
        )
        self._moves_in_units = 0
        self._sizes = {name: _sizes(module) for name, module in units.items()}
        named = list(root.named_parameters(remove_duplicate=False))
        self._first_name: dict[int, str] = {}
        self._all_names: dict[str, tuple[str, ...]] = {}
        for name, parameter in named:
            first = self._first_name.setdefault(id(parameter), name)
            self._all_names[first] = (*self._all_names.get(first, ()), name)
        self._module_names = {id(m): n for n, m in root.named_modules()}
        self.operators = OperatorLedger(self._first_name, on_draw=self.streams.note_draw)
        self.values = ValueLedger(
            self.operators,
            self.streams,
            truth=truth,
            known_reads=known_reads,
            pinned=pinned,
            recomputed=lambda: self._regions.inside,
            instead=instead,
        )
        self._runner = UnitRunner(self.operators, self.values, self.streams, real=real)
        self.calls: list[UnitCall] = []
        self._repeated: set[str] = set()
        self._saved = SavedTensors(root)
        self._regions = Regions(lambda: self._busy, draws=lambda: self.operators.random_draws)
        self._busy = False
        self._sinks: set[Source] = set()
        self._unit_sinks: set[Source] = set()

    # ------------------------------------------------------------------ the step

    def run(self, step: Callable[[Any], Any], batch: Any) -> Trace:
        """Run ``step(batch)`` and return what was seen; the module is left as it was."""
        snapshot = Snapshot(self._root)
        units = [(m, self._wrapper(name, m)) for name, m in self._units.items()]
        try:
            with ExitStack() as stack:
                stack.enter_context(inside_step())
                stack.enter_context(attributes(self._replacements()))
                stack.enter_context(attributes(asking_files(self._root, self._units.values())))
                stack.enter_context(
                    attributes(list(opened_encoders(self._root, self._units.values())))
                )
                stack.enter_context(attributes(whole_for_hooks(self._root, self._units)))
                stack.enter_context(attributes(self.streams.replacements()))
                stack.enter_context(attributes(list(routed(units))))
                stack.enter_context(self._regions.watched())
                stack.enter_context(self.operators)
                stack.enter_context(self.values)
                stack.enter_context(self._saved.hooks())
                with self.values.paused():
                    batch = copy_tensors(batch)
                    self._saved.ignore(t for t in leaves(batch) if isinstance(t, Tensor))
                self.streams.begin()
                result = self._result(step, batch)
                with self.values.paused(), without_modes():
                    self._sink(result)
                    trace = self._finish(snapshot)
                    trace.without_gradient = self._without_gradient(result)
        finally:
            snapshot.restore()
            GHOSTS.tainted.clear()
        return trace

    def _result(self, step: Callable[[Any], Any], batch: Any) -> Any:
        """What the step returns; None if only its tail cannot be run on fakes.

        A later trace of a step has no weights of other ranks, so it cannot run for real. It need
        not, where the units that the first trace saw have been called: what is still to come reads
        the variables that the code has by then.
        """
        try:
            return step(batch)
        except (CutError, KeepWhole, InnerGradient):
            raise
        except Exception as error:
            like = None if self._real else self._like
            if like is None or [c.unit for c in self.calls] != [c.unit for c in like.calls]:
                raise
            with self.values.paused():
                self._sink(_variables(error))
            return None

    def _replacements(self) -> list[Replacement]:
        found = [
            *silent_metrics(find_metrics(self._root), self._sink),
            *silent_talk(self._root, self._sink),
        ]
        if self._silenced is not None:
            found += self._silenced(self._sink)
        return found

    def _sink(self, value: Any) -> None:
        """The tail reads ``value``: the last stage must have it."""
        for tensor in tensors(value):
            self._sinks |= self.values.of(tensor)
            self._unit_sinks |= self.operators.of(tensor)
            self.operators.note_leak(tensor)

    def _finish(self, snapshot: Snapshot) -> Trace:
        self.streams.look()
        changed, ghosts, buffers = set(), set(), {}
        installed = snapshot.keep_installed()
        if installed:
            self._runner.notes.append(
                f"the step installs hooks: they are on {len(installed)} modules, such as "
                f"{installed[0]}, from now on"
            )
        written = frozenset(self.operators.glue_storages)
        for module, attribute, value in snapshot.changed_attributes(written):
            changed.add((module, attribute))
            # a list of weights, as an LSTM keeps it, is no value of the step
            self._sink([t for t in contents(value) if not isinstance(t, nn.Parameter)])
            if holds_fake(value):
                ghosts.add((module, attribute))
        inside = tuple(f"{call.unit}." for call in self.calls)
        for name, buffer in snapshot.changed_buffers():
            buffers[name] = not name.startswith(inside)
            self._sink(buffer if buffers[name] else None)
        for name, buffer in snapshot.buffers_in(written):
            buffers[name] = True
            self._sink(buffer)
        self.values.close()
        for segment, sources, _ in self.values.reads:
            if segment == len(self.calls):
                self._sinks |= sources
        reads = {
            self.calls[i].unit: frozenset(names) for i, names in self.operators.unit_reads.items()
        }
        return Trace(
            calls=tuple(self.calls),
            glue=self.values.glue,
            regions=self._regions.found,
            recomputes=self._regions.seen,
            shared=tuple(
                frozenset(keys)
                for memory, keys in self._runner.memory.items()
                if len(keys) > 1 and memory in self.operators.written_storages
            ),
            tail_inputs=frozenset(self._sinks),
            tail_unit_inputs=frozenset(self._unit_sinks),
            control=frozenset(self.values.control),
            written=frozenset(self.operators.written),
            random_glue=dict(self.values.random_calls),
            drawing=self.streams.kinds(),
            glue_parameters=frozenset(self.operators.glue_parameters),
            glue_reads_by_unit=reads,
            changed_attributes=frozenset(changed) | self._of_repeated("changed_attributes"),
            changed_buffers=frozenset(buffers) | self._of_repeated("changed_buffers"),
            glue_buffers=frozenset(name for name, by_glue in buffers.items() if by_glue),
            ghost_attributes=frozenset(ghosts) | self._of_repeated("ghost_attributes"),
            parameters=self._all_names,
            training=torch.is_grad_enabled(),
            on_fakes=not self._real,
            notes=(*self._runner.notes, *snapshot.changed_objects()),
            read_values=self.values.read_values,
            glue_saved=tuple(
                self._saved.at(segment, in_unit=False) for segment in range(len(self.calls) + 1)
            ),
            script=self.values.script(),
            draws=self.streams.num_moves > self._moves_in_units or self.operators.read_draws,
            batch_reads=tuple(self.values.batch_reads),
            steered=bool(self._like and self._like.steered and self.values.batch_reads),
            units=tuple(self._units),
            repeated=frozenset(self._repeated),
        )

    # ------------------------------------------------------------------ one unit call

    def _wrapper(self, name: str, module: nn.Module) -> Wrapper:
        return outermost(lambda: self._busy, partial(self._call, name, module))

    def _call(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        entry: str,
        args: Any,
        kwargs: Any,
    ) -> Any:
        index = len(self.calls)
        arguments, structure = flatten((args, kwargs))
        given = [a for a in arguments if isinstance(a, Tensor)]
        with self.values.paused():
            inputs = Sources().union(*(self.values.of(t) for t in given))
            unit_inputs = Sources().union(*(self.operators.of(t) for t in given))
            for tensor in given:
                self.operators.note_leak(tensor)
            in_checkpoint = check_callers(name, module, self._module_names)
            self.streams.look()
            described = arguments_key(arguments)
            memo = self._memo if self._like is None or name in self._like.unit_names else None
            place = None if memo is None else memo.key(name, module, described)
            known = None if memo is None else memo.get(place, structure)
            key = name, described, module.training, torch.is_grad_enabled()
            known = known or (None if self._real else self._shared.get(key, structure))
            if known is None:
                out, known, saved = self._observe(name, module, original, arguments, structure)
                if memo is not None and not in_checkpoint and name not in self._runner.on_random:
                    memo.put(place, known)
                if name in self._runner.on_random:
                    self._shared.note(key, known)
            else:
                out, saved = self._repeat(name, module, known, arguments), ()
                if entry == "_call_impl" and module._forward_hooks:
                    run_forward_hooks(module, args, kwargs, out, known.hooks_done)
            self.calls.append(
                UnitCall(
                    index,
                    name,
                    inputs,
                    unit_inputs,
                    known.made,
                    known.leaves,
                    known.num_outputs,
                    in_checkpoint=in_checkpoint,
                    flops=known.flops,
                    parameters=self._sizes[name][0],
                    parameter_bytes=self._sizes[name][1],
                    activation_bytes=known.activation_bytes,
                    draws=known.draws,
                    saved=saved,
                    arguments=described,
                    entered=known.entered,
                    hooks_done=known.hooks_done,
                    has_loss=known.has_loss,
                )
            )
            self._regions.note_call(index)
            self.values.segment = self._saved.position = len(self.calls)
            self.streams.salt(len(self.calls))
        return out

    def _observe(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        arguments: list[Any],
        structure: TreeSpec,
    ) -> tuple[Any, Outcome, tuple[tuple[int, int], ...]]:
        """Run the unit and see what it does, and what it keeps for its backward."""
        index = len(self.calls)
        before = tensor_attributes(module)
        flops, drawn = self.operators.flops, self.operators.drawn_in_units
        scalar_draws, reads = self.operators.scalar_draws, self.operators.reads_in_units
        counts, moves = self.streams.counts(), self.streams.num_moves
        losses = self.operators.losses_in_units
        self._busy, self.operators.inside, self._saved.in_unit = True, index, True
        try:
            with (
                function_mode_off(self.values),
                self.streams.of_unit(name),
                noted_hooks(module) as hooks,
            ):
                out, written = self._runner.execute(name, module, original, arguments, structure)
        finally:
            self._busy, self.operators.inside, self._saved.in_unit = False, None, False
        moved = self.streams.num_moves - moves
        self._moves_in_units += moved
        drew = self.operators.drawn_in_units != drawn
        draws = bool(moved) or self.operators.scalar_draws != scalar_draws
        draws |= drew and name in self._runner.on_random
        if draws:
            out = own_objects(out, module, arguments)
        leaves, num_outputs, made = self._runner.outputs(
            index, module, out, arguments, written, before
        )
        if draws or self.operators.reads_in_units != reads:
            leaves = tuple(Constant(None, known=False) if _may_vary(x) else x for x in leaves)
        flops = self.operators.flops - flops
        saved = self._saved.at(index, in_unit=True)
        saved_bytes = sum(num_bytes for _, num_bytes in saved)
        entered = self.streams.entered_since(counts, name)
        outcome = Outcome(
            structure,
            made,
            leaves,
            num_outputs,
            flops,
            saved_bytes,
            draws,
            entered,
            hooks[0],
            has_loss=self.operators.losses_in_units != losses,
        )
        return out, outcome, saved

    def _without_gradient(self, result: Any) -> frozenset[str]:
        """Name the parameters that the loss does not depend on, where the graph can be seen."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            return frozenset()
        reached = {id(leaf) for leaf in leaves_of(loss)}
        missing = {
            self._first_name[id(parameter)]
            for parameter in self._root.parameters()
            if parameter.requires_grad and id(parameter) not in reached
        }
        if self._repeated or self._runner.on_random:  # parts of the graph were not made
            if self._like is None:
                return frozenset()
            return frozenset(missing & self._like.without_gradient - self._not_in(self._like))
        return frozenset(missing)

    def _not_in(self, like: Trace) -> set[str]:
        """Names of the parameters that this step uses and the first one did not."""
        units = {call.unit for call in self.calls} - {call.unit for call in like.calls}
        inside = (p for unit in units for p in self._root.get_submodule(unit).parameters())
        of_units = {self._first_name[id(parameter)] for parameter in inside}
        return of_units | (set(self.operators.glue_parameters) - like.glue_parameters)

    def _of_repeated(self, name: str) -> frozenset[Any]:
        """What the first trace says of the units that were not run in this one."""
        if self._like is None or not self._repeated:
            return frozenset()
        inside = tuple(f"{unit}." for unit in self._repeated)
        return frozenset(
            changed
            for changed in getattr(self._like, name)
            if f"{changed if isinstance(changed, str) else changed[0]}.".startswith(inside)
        )

    def _repeat(self, name: str, module: nn.Module, known: Outcome, arguments: list[Any]) -> Any:
        """Do as the unit did before."""
        index = len(self.calls)
        self._repeated.add(name)
        self.streams.pass_over(name, known.entered)
        values = rebuild(known, arguments)
        for number, (leaf, value) in enumerate(zip(known.leaves, values, strict=True)):
            if isinstance(leaf, SideAttribute):
                setattr(module.get_submodule(leaf.module), leaf.attribute, value)
            if isinstance(leaf, (NewTensor, SideAttribute)):
                key = frozenset({(index, number)})
                self.operators.set(value, key)
                self.values.set(value, key)
        reads = self._like.glue_reads_by_unit.get(name) if self._like is not None else None
        if reads:
            self.operators.unit_reads.setdefault(index, set()).update(reads)
        self.operators.flops += known.flops
        return unflatten(values[: known.num_outputs], known.made)


def _may_vary(leaf: Leaf) -> bool:
    """Tell whether a leaf of a unit that looks at values may be one of them."""
    kinds = (int, float, complex, np.ndarray, np.generic)
    return isinstance(leaf, Constant) and isinstance(leaf.value, kinds)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Elements and bytes of the parameters of ``module``."""
    counts = [(p.numel(), p.element_size()) for p in module.parameters()]
    return sum(n for n, _ in counts), sum(n * size for n, size in counts)


def _variables(error: Exception) -> list[Any]:
    """The local variables of the code that raised, and of its callers, but for our own."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    package = __name__.partition(".")[0]
    return [
        list(frame.f_locals.values())
        for frame in frames
        if not str(frame.f_globals.get("__name__", "")).startswith(package)
    ]
