"""The step program of one stage: the user's whole step, in which only the stage's own units run.

An earlier unit returns what was received for it, or a ghost (a fake tensor of the right shape)
where this stage needs no value of it. At the first call of a later stage the step is over: it is
unwound by an exception that ``except Exception`` does not catch. A ghost that reaches an own unit,
a send, the loss or a log is an error that names producer and consumer, never a wrong number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_pipe.split._fake import GHOSTS, TorchFunctionMode, inside_step
from lightning_pipe.split.again import Again, repeatable_calls
from lightning_pipe.split.compiled import CompiledUnits
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.generators import generators_of
from lightning_pipe.split.nested import opened_encoders
from lightning_pipe.split.patching import Replacement, find_metrics
from lightning_pipe.split.rng import Generator, preserved
from lightning_pipe.split.run import MicrobatchRun
from lightning_pipe.split.snapshot import AttributeKeeper
from lightning_pipe.split.spec import ValueSpec
from lightning_pipe.split.streams import callable_modules
from lightning_pipe.split.trace import ValueKey
from lightning_pipe.split.typed import asking_files


def _is_in(module: str, unit: str) -> bool:
    return module == unit or module.startswith(unit + ".")


class StageProgram:
    """One stage of a cut step.

    Args:
        cut: The cut step.
        stage: Index of this stage.
        root: The user's module on this rank.
        device_type: Device whose random generator is keyed beside the CPU's.
        watch: Check all that the stage does against the trace, which was derived and may be wrong.
        again: Units that keep their inputs only and run again for the backward, where they can.
        generators: Of the module, where they are known.
        compiled: Makes forwards of units that are compiled.
    """

    def __init__(
        self,
        cut: StepCut,
        stage: int,
        root: nn.Module,
        *,
        device_type: str = "cpu",
        watch: bool = False,
        again: AbstractSet[str] = frozenset(),
        generators: tuple[Generator, ...] | None = None,
        compiled: CompiledUnits | None = None,
    ) -> None:
        self.stage = stage
        self.watch = watch
        self.is_last = stage == cut.num_stages - 1
        self.inputs: tuple[ValueSpec, ...] = cut.boundaries[stage - 1] if stage else ()
        self.outputs: tuple[ValueSpec, ...] = () if self.is_last else cut.boundaries[stage]
        # what a run of a micro-batch reads, too
        self.cut = cut
        self.trace = cut.trace
        self.root = root
        self.device_type = device_type
        self.generators = generators_of(root) if generators is None else generators
        self.modules = callable_modules(root)
        self.input_keys: Sequence[ValueKey] = cut.crossing[stage - 1] if stage else ()
        self.output_keys: Sequence[ValueKey] = () if self.is_last else cut.crossing[stage]
        self.first_call = cut.first_call(stage)
        own = cut.calls_of(stage)
        self.last_call = own[-1] if own else self.first_call - 1
        self.has_later_calls = cut.first_call(stage + 1) < len(self.trace.calls)
        self._wants_again = again
        self.recomputer = Again(root, cut.trace, device_type, self.generators)
        self.runs_again = self._calls_to_run_again()
        #: whether anything here runs again in the backward, so that its halves cost too much
        self.recomputes = False
        others = self.trace.units if self.trace.restless else ()
        names = dict.fromkeys((*self.trace.unit_names, *others))
        self.units = [(name, root.get_submodule(name)) for name in names]
        self._ghosts: dict[ValueKey, Tensor] = {}
        self.needs_mode = watch or cut.num_stages > 1 or any(self.trace.random_glue.values())
        modules = [module for _, module in self.units]
        self.asking = asking_files(root, modules)
        self.opens_encoders = any(True for _ in opened_encoders(root, modules))
        in_units = tuple(name + "." for name in names)
        owned = set(cut.units_of(stage))
        compiled = compiled or CompiledUnits(None)
        self._compiled = compiled.replacements(root, sorted(owned), sorted(self.trace.drawing))
        self.numbers = {
            unit: [pair for pair in self.trace.changed_attributes if _is_in(pair[0], unit)]
            for unit in self.trace.unit_names
            if unit not in owned
        }
        self._glue_attributes = frozenset(
            pair for pair in self.trace.changed_attributes if not f"{pair[0]}.".startswith(in_units)
        )

    def compiled_for(self, *, watched: bool) -> list[Replacement]:
        """What makes its units run compiled.

        Args:
            watched: Whether the functions of torch are: units that compute losses are then not
                compiled, so that these are seen.
        """
        if not watched:
            return self._compiled
        losses = {call.unit for call in self.trace.calls if call.has_loss}
        seen = [self.root.get_submodule(name) for name in losses]
        return [r for r in self._compiled if not any(r[0] is module for module in seen)]

    def run(
        self,
        step: Callable[[], Any],
        received: tuple[Tensor, ...],
        *,
        key: int,
        record: Sequence[ValueKey] = (),
        watch: TorchFunctionMode | None = None,
        metrics: Sequence[nn.Module] | None = None,
        keep_random: bool = True,
    ) -> tuple[Tensor, ...] | StepResult:
        """Run this stage's part of ``step``.

        Args:
            step: The user's step on one micro-batch.
            received: The values of :attr:`inputs`, in that order.
            key: Random key of the micro-batch, equal on all stages.
            record: On the last stage, values to give back too.
            watch: Sees the functions of torch that the step calls.
            metrics: The metric objects of the module; found anew if not given.
            keep_random: Put the random generators back; if not, the caller does.

        Returns:
            The values of :attr:`outputs`; on the last stage what the step returned.

        Raises:
            CutError: The step went another way than when it was traced, or needs a value that this
                stage does not have.
        """
        run = MicrobatchRun(self, received, key, record, watch)
        run.metrics = find_metrics(self.root) if metrics is None else metrics
        ghosts = AttributeKeeper(self.root, self.trace.ghost_attributes)
        numbers = AttributeKeeper(
            self.root, frozenset(pair for pairs in self.numbers.values() for pair in pairs)
        )
        glue = None if self.is_last else AttributeKeeper(self.root, self._glue_attributes)
        GHOSTS.tainted.clear()
        try:
            kept = preserved(self.device_type, self.generators) if keep_random else nullcontext()
            with kept, inside_step():
                return run.execute(step)
        finally:
            self.recomputes |= run.recomputes
            GHOSTS.tainted.clear()
            if glue is not None:
                glue.restore()
            ghosts.restore(only_fakes=True)
            numbers.restore()

    def at(self, cut: StepCut) -> StageProgram:
        """The same stage of the same step at other sizes, which were derived and are watched."""
        other = copy.copy(self)
        other.watch = True
        other.cut, other.trace, other._ghosts = cut, cut.trace, {}
        other.runs_again = other._calls_to_run_again()
        other.inputs = cut.boundaries[self.stage - 1] if self.stage else ()
        other.outputs = () if self.is_last else cut.boundaries[self.stage]
        return other

    def _calls_to_run_again(self) -> frozenset[int]:
        own = frozenset(self.cut.calls_of(self.stage))
        return own & repeatable_calls(self.trace, self._wants_again)

    def ghost(self, key: ValueKey) -> Tensor:
        """Return a fake for a value that this stage does not need."""
        if key in self.trace.written:
            return self.trace.meta(key).ghost()
        if key not in self._ghosts:
            self._ghosts[key] = self.trace.meta(key).ghost()
        return self._ghosts[key]
