"""One micro-batch on one stage: routes the calls of units to what runs, what stands for others, or
the end of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_pipe.errors import CutError, StageMismatchError
from lightning_pipe.split._fake import (
    TorchFunctionMode,
    function_mode_off,
    is_fake,
    is_foreign,
)
from lightning_pipe.split.ends import Skipped, StageExit, StepResult
from lightning_pipe.split.glue import Glue
from lightning_pipe.split.nested import opened_encoders
from lightning_pipe.split.patching import (
    Wrapper,
    attributes,
    outermost,
    quiet_metrics,
    routed,
    run_forward_hooks,
    silent_metrics,
    silent_talk,
)
from lightning_pipe.split.recompute import Regions
from lightning_pipe.split.rng import KeyedRandom
from lightning_pipe.split.streams import Streams
from lightning_pipe.split.trace import (
    Alias,
    Constant,
    NewTensor,
    SideAttribute,
    UnitCall,
    ValueKey,
    WrittenArgument,
    WrittenOutput,
)
from lightning_pipe.split.tree import flatten, tensors, unflatten
from lightning_pipe.split.unknown import Unknown, forget, unknown_output
from lightning_pipe.split.watch import check_aliases, check_made, check_script

if TYPE_CHECKING:
    from lightning_pipe.split.program import StageProgram


class MicrobatchRun:
    """One micro-batch on one stage."""

    def __init__(
        self,
        program: StageProgram,
        received: tuple[Tensor, ...],
        key: int,
        record: Sequence[ValueKey],
        watch: TorchFunctionMode | None,
    ) -> None:
        self.program = program
        self.trace = program.trace
        self.count = 0
        self.busy = False
        self.glue: Glue | None = None
        self.metrics: Sequence[nn.Module] = ()
        self._watch = watch
        self._compiled = program.compiled_for(watched=watch is not None)
        random = KeyedRandom(key, program.device_type, program.generators)
        self.streams = Streams(program.modules, random, self.trace.drawing)
        self._given = dict(zip(program.input_keys, received, strict=True))
        self._versions = {k: t._version for k, t in self._given.items()}
        self.received = {
            k: t.clone() if k in self.trace.written else t
            for k, t in ((k, self.trace.meta(k).laid_out(t)) for k, t in self._given.items())
        }
        self._record = record
        keys = (*program.output_keys, *record)
        self.wanted = frozenset(k for k in keys if k not in self._given)
        self.produced: dict[ValueKey, Tensor] = {}
        stages = program.cut.stage_of_call
        self._regions = Regions(
            lambda: self.busy,
            known=self.trace.regions,
            owns=lambda call: stages[call] == program.stage,
            replay=self._replay,
        )

    @property
    def recomputes(self) -> bool:
        """Whether anything runs again for the backward."""
        return bool(self.program.runs_again) or self._regions.recomputes

    @property
    def watched_stage(self) -> int | None:
        """The stage, if its trace may be wrong."""
        return self.program.stage if self.program.watch else None

    # ------------------------------------------------------------------ the step

    def execute(self, step: Callable[[], Any]) -> tuple[Tensor, ...] | StepResult:
        program = self.program
        units = [(module, self._wrapper(name, module)) for name, module in program.units]
        try:
            with ExitStack() as stack:
                stack.enter_context(attributes(self._replacements()))
                stack.enter_context(attributes(program.asking))
                stack.enter_context(attributes(self._compiled))
                stack.enter_context(attributes(self.streams.replacements()))
                stack.enter_context(attributes(list(routed(units))))
                if (program.needs_mode or self._record) and program.opens_encoders:
                    modules = [module for module, _ in units]
                    stack.enter_context(attributes(list(opened_encoders(program.root, modules))))
                if self._watch is not None:
                    stack.enter_context(self._watch)
                if program.needs_mode or self._record:
                    self.glue = stack.enter_context(Glue(self))
                stack.enter_context(self._regions.watched())
                self.streams.begin()
                value = step()
        except StageExit:
            return self._outputs()
        if not program.is_last:
            if not program.has_later_calls:
                return self._outputs()
            if value is None and program.trace.training:
                raise Skipped
            raise CutError(
                f"stage {program.stage}: the step ended before unit "
                f"'{self.trace.calls[program.last_call + 1].unit}' was called; when it "
                "was traced it went on. A step must call the same units in the same order on every "
                "micro-batch."
            )
        if value is None and program.trace.training:
            raise Skipped
        if self.count != len(self.trace.calls):
            raise CutError(
                f"the step made {self.count} unit calls, {len(self.trace.calls)} when it "
                "was traced. A step must call the same units in the same order on every "
                "micro-batch."
            )
        self.check_real(value, "the step returns")
        recorded = (self._given.get(key, self.produced.get(key)) for key in self._record)
        return StepResult(value, tuple(None if t is None else t.detach() for t in recorded))

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        root = self.program.root
        log = getattr(root, "log", None)
        if not self.program.is_last:
            return [
                *silent_metrics(self.metrics, lambda _: None),
                *silent_talk(root, lambda _: None),
            ]
        found = list(quiet_metrics(self.metrics, self._unseen))
        if callable(log):

            def checked(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
                self.check_real(value, f"self.log('{name}') reads")
                return self._unseen(log)(name, value, *args, **kwargs)

            found.append((root, "log", checked))
        return found

    def _unseen(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Let a call of the tail make torch calls that the trace did not see: they are no glue."""

        def unseen(*args: Any, **kwargs: Any) -> Any:
            before, self.busy = self.busy, True
            try:
                return call(*args, **kwargs)
            finally:
                self.busy = before

        return unseen

    def _replay(self, function: Callable[..., Any], call: int | None) -> Callable[..., Any]:
        """Make of the region of a checkpoint what runs in the backward: it draws the same."""
        counts = self.streams.counts()
        name = None if call is None else self.trace.calls[call].unit
        units = {n: module for n, module in self.program.units if n == name}
        inner = Regions(lambda: True, replay=self._replay)

        def replay(*args: Any, **kwargs: Any) -> Any:
            with attributes(self._compiled), self.streams.again(counts, units), inner.watched():
                return function(*args, **kwargs)

        return replay

    def check_real(self, value: Any, what: str) -> None:
        """Refuse a value that has no data on this stage."""
        for leaf in flatten(value)[0]:
            if isinstance(leaf, Unknown):
                leaf.refuse()
        if any(is_foreign(t) for t in tensors(value)):
            raise CutError(
                f"stage {self.program.stage}: {what} a tensor that another stage computes and that "
                "the trace did not see being used here: the step went another way than when it was "
                "traced. Let its batch, random numbers or modes decide, and nothing else that "
                "changes from step to step"
            )

    def _outputs(self) -> tuple[Tensor, ...]:
        program = self.program
        for key, tensor in self._given.items():
            if tensor._version != self._versions[key]:
                raise CutError(
                    f"stage {program.stage}: {self.trace.name(key)} was written in place "
                    "after it was received; when it was traced it was not."
                )
        outputs: list[Tensor] = []
        for key, spec in zip(program.output_keys, program.outputs, strict=True):
            value = self._given[key] if key in self._given else self.produced.get(key)
            if value is None or is_foreign(value):
                raise CutError(
                    f"stage {program.stage} should send {spec.name}, but "
                    + ("never made it" if value is None else "has no data for it")
                    + ": the step went another way than when it was traced."
                )
            value = self.trace.meta(key).to_send(value, spec.name)
            if tuple(value.shape) != spec.shape or value.dtype != spec.dtype:
                raise StageMismatchError(
                    f"stage {program.stage} should send {spec.name} as {spec.dtype} {spec.shape}, "
                    f"but made {value.dtype} {tuple(value.shape)}: its shape depends on values. "
                    "Keep the module around it whole by split_points, or pad it to one shape."
                )
            if value.requires_grad and not spec.requires_grad:
                raise StageMismatchError(
                    f"stage {program.stage} should send {spec.name}, which had no gradient when "
                    "the step was traced and has one now."
                )
            outputs.append(value)
        return tuple(outputs)

    # ------------------------------------------------------------------ one call

    def _wrapper(self, name: str, module: nn.Module) -> Wrapper:
        return outermost(lambda: self.busy, partial(self._call, name, module))

    def _call(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        entry: str,
        args: Any,
        kwargs: Any,
    ) -> Any:
        index = self.count
        calls = self.trace.calls
        if self.program.watch and self.glue is not None:
            check_script(self.trace, index, self.glue.done(index), None, self.program.stage)
        if index >= len(calls) or calls[index].unit != name:
            expected = calls[index].unit if index < len(calls) else "the end of the step"
            raise CutError(
                f"stage {self.program.stage}: unit '{name}' was called where '{expected}' was when "
                "the step was traced. A step must call the same units in the same order on every "
                "micro-batch, unless its batch or random numbers decide. If values that a unit "
                "computes decide: put what decides and what is called into one module"
            )
        stage = self.program.cut.stage_of_call[index]
        if stage > self.program.stage:
            raise StageExit
        call = calls[index]
        if stage == self.program.stage:
            out = self._own(call, module, original, args, kwargs)
        else:
            out = self._ghost(call, module, entry, args, kwargs)
        self.count += 1
        done = index == self.program.last_call and not self.program.has_later_calls
        if done and not self.program.is_last and self.wanted <= self.produced.keys():
            raise StageExit
        return out

    def _own(
        self,
        call: UnitCall,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        for argument in tensors((args, kwargs)):
            if is_foreign(argument):
                raise CutError(
                    f"unit '{call.unit}' (stage {self.program.stage}) reads a tensor of shape "
                    f"{tuple(argument.shape)} that another stage computes and that the trace did "
                    "not see: the step went another way, or wrote it in place unseen."
                )
        self.busy = True
        try:
            watch = None if call.has_loss else self._watch  # or it would be compiled for it
            with function_mode_off(self.glue), function_mode_off(watch):
                run = partial(self._run_unit, call, original)
                if call.index in self.program.runs_again:
                    out = self.program.recomputer.run(call.unit, run, *args, **kwargs)
                else:
                    out = run(*args, **kwargs)
                if self.program.watch:
                    check_made(self.trace, call, out, self.program.stage)
                if call.passes_through:
                    check_aliases(call, out, flatten((args, kwargs))[0], self.program.stage)
            self._take(call, module, out, (args, kwargs))
        finally:
            self.busy = False
        return out

    def _run_unit(
        self, call: UnitCall, original: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        with self.streams.of_unit(call.unit, call.entered):
            return original(*args, **kwargs)

    def _take(self, call: UnitCall, module: nn.Module, out: Any, given: Any) -> None:
        """Pick the outputs that are sent; a copy where somebody writes them before they leave."""
        wanted = [k for k in self.wanted if len(k) == 2 and k[0] == call.index]
        if not wanted:
            return
        values = flatten(out)[0]
        for leaf in call.leaves[call.num_outputs :]:
            if isinstance(leaf, WrittenArgument):
                values.append(flatten(given)[0][leaf.argument])
            else:
                assert isinstance(leaf, SideAttribute)
                values.append(getattr(module.get_submodule(leaf.module), leaf.attribute))
        for key in wanted:
            if key[1] < len(values) and isinstance(values[key[1]], Tensor):
                value = values[key[1]]
                self.produced[key] = value.clone() if key in self.trace.written else value

    def _ghost(self, call: UnitCall, module: nn.Module, entry: str, args: Any, kwargs: Any) -> Any:
        """Return what an earlier stage's unit returned, as far as it was sent."""
        self.streams.pass_over(call.unit, call.entered)
        self.busy = True
        try:
            # most units return nothing but new tensors, and nobody looks at what they were given
            reads = any(not isinstance(leaf, (NewTensor, Constant)) for leaf in call.leaves)
            arguments = flatten((args, kwargs))[0] if reads else []
            values: list[Any] = []
            for position, leaf in enumerate(call.leaves):
                key = (call.index, position)
                if isinstance(leaf, Constant):
                    values.append(leaf.value if leaf.known else unknown_output(call.unit))
                elif isinstance(leaf, Alias):
                    values.append(arguments[leaf.argument])
                else:
                    values.append(self._stand_in(key, leaf, module, arguments))
            numbers = self.program.numbers.get(call.unit)
            if numbers:
                forget(self.program.root, call.unit, numbers)
            out = unflatten(values[: call.num_outputs], call.structure)
            if entry == "_call_impl" and module._forward_hooks:
                run_forward_hooks(module, args, kwargs, out, call.hooks_done)
            return out
        finally:
            self.busy = False

    def _stand_in(self, key: tuple[int, int], leaf: Any, module: nn.Module, arguments: Any) -> Any:
        received = self.received.get(key)
        value = received if received is not None else self.program.ghost(key)
        if isinstance(leaf, NewTensor):
            return value
        if isinstance(leaf, SideAttribute):
            setattr(module.get_submodule(leaf.module), leaf.attribute, value)
            return value
        assert isinstance(leaf, (WrittenOutput, WrittenArgument))
        argument = arguments[leaf.argument]
        if is_fake(argument):
            return value if received is not None else argument
        if received is not None:
            argument.copy_(received)
            return argument
        return value if isinstance(leaf, WrittenOutput) else argument

    # ------------------------------------------------------------------ glue

    def hook_runs_elsewhere(self, tensor: Any) -> bool:
        """Tell whether a tensor hook belongs to the sender: the value has no data or was
        received."""
        if is_fake(tensor):
            return True
        received = any(tensor is value for value in self.received.values())
        return received and self.count <= self.program.first_call

    def explain(self, name: str, inputs: Any, error: Exception) -> Exception:
        """Turn a failure that only a ghost can cause into one that says so."""
        if not any(is_fake(t) for t in tensors(inputs)):
            return error
        return CutError(
            f"stage {self.program.stage}: {name} needs the value of a tensor that an earlier stage "
            f"computes ({type(error).__name__}: {error})."
        )
