"""Units that keep only their inputs, and run a second time for their backward.

The second run must be the first one again: it draws the same random numbers, reads buffers and
attributes as they were, and leaves nothing behind. Chen et al., "Training deep nets with sublinear
memory cost" (2016); the recomputation itself is ``torch.utils.checkpoint``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipe.errors import CutError
from lightning_pipe.split.frozen import version_of
from lightning_pipe.split.patching import attributes, silent_talk
from lightning_pipe.split.rng import Generator, preserved
from lightning_pipe.split.trace import Alias, Constant, NewTensor, Trace, UnitCall
from lightning_pipe.split.tree import tensors

__all__ = ["Again", "can_run_again", "names_of_classes", "repeatable_calls"]


class Again:
    """Runs a unit so that its second run can be the first one again.

    Args:
        root: The user's module.
        trace: The step.
        device_type: Device whose random generator is kept beside the CPU's.
        generators: Other generators that a unit may draw from.
    """

    def __init__(
        self, root: nn.Module, trace: Trace, device_type: str, generators: Sequence[Generator]
    ) -> None:
        self.root = root
        self._trace = trace
        self._device_type = device_type
        self._generators = generators
        self._buffers: dict[str, set[str]] = {}

    def run(
        self,
        unit: str,
        function: Callable[..., Any],
        *args: Any,
        **kw: Any,
    ) -> Any:
        """Calls a unit.

        Args:
            unit: Its name.
            function: Runs it on its random streams, in the backward too.
            args: Its arguments.
            kw: Those by keyword.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kw)
        given = [(tensor, tensor._version) for tensor in tensors((args, kw))]
        there = self._buffers_of(unit)
        known = self._buffers.get(unit, there)  # which of them change, the first run tells
        before = [(name, there[name][0].clone()) for name in known if name in there]

        dtype = torch.get_default_dtype()  # half precision sets it around a step's forward only

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            return nullcontext(), _Second(self, unit, before, given, dtype)

        out = checkpoint(
            function,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,  # its streams begin anew instead
            context_fn=contexts,
            **kw,
        )
        now = self._buffers_of(unit)
        changed = [name for name in there if name not in now or _differ(now[name], there[name])]
        if unit not in self._buffers:
            known = self._buffers[unit] = {*self._changing_buffers(unit), *changed}
            before[:] = [(name, value) for name, value in before if name in known]
        elif set(changed) - set(known):
            raise CutError(
                f"unit '{unit}' cannot run again for its backward: it changed its buffer "
                f"'{min(set(changed) - set(known))}', which its first run did not. Leave its "
                "class out of activation_checkpointing"
            )
        return out

    def random_preserved(self) -> AbstractContextManager[None]:
        """Puts the random generators back on exit."""
        return preserved(self._device_type, self._generators)

    def _buffers_of(self, unit: str) -> dict[str, tuple[Tensor, int]]:
        """All buffers inside of a unit, each with the number of writes to it."""
        module = self.root.get_submodule(unit)
        return {f"{unit}.{name}": (b, version_of(b)) for name, b in module.named_buffers()}

    def _changing_buffers(self, unit: str) -> list[str]:
        """All buffers of the modules that change any: a fake does not show what a kernel writes."""
        changed = (n for n in self._trace.changed_buffers if n.startswith(f"{unit}."))
        owners = sorted({name.rpartition(".")[0] for name in changed})
        return [
            f"{owner}.{name}"
            for owner in owners
            for name, buffer in self.root.get_submodule(owner)._buffers.items()
            if buffer is not None
        ]


def _differ(now: tuple[Tensor, int], before: tuple[Tensor, int]) -> bool:
    return now[0] is not before[0] or now[1] != before[1]


class _Second(AbstractContextManager[None]):
    """The surroundings of a second run; may be entered again, once per pass over the graph."""

    def __init__(
        self,
        again: Again,
        unit: str,
        before: Sequence[tuple[str, Tensor]],
        given: Sequence[tuple[Tensor, int]],
        dtype: torch.dtype,
    ) -> None:
        self._again = again
        self._unit = unit
        self._before = before
        self._given = given
        self._dtype = dtype
        self._open: list[ExitStack] = []

    def __enter__(self) -> None:
        if any(tensor._version != version for tensor, version in self._given):
            raise CutError(
                f"unit '{self._unit}' cannot run again for its backward: a tensor that it was "
                "given was written in place afterwards. Leave its class out of "
                "activation_checkpointing, or write into a copy"
            )
        root = self._again.root
        with ExitStack() as stack:
            stack.enter_context(self._again.random_preserved())
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            stack.enter_context(attributes(silent_talk(root, lambda _: None)))
            for name, value in self._before:
                owner, _, last = name.rpartition(".")
                space = root.get_submodule(owner)._buffers
                stack.callback(space.__setitem__, last, space[last])
                space[last] = value.clone()
            self._open.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._open.pop().close()


def can_run_again(trace: Trace, call: UnitCall) -> bool:
    """Whether a second run of a call can be told from the first by nobody.

    A unit that writes into its arguments, or whose arguments are written later, would find them
    written; one that changes attributes or leaves tensors there would do it twice.
    """
    if call.in_checkpoint or not call.unit:
        return False  # the user's own region runs it again; or it is the whole module
    inside = f"{call.unit}."
    if any(f"{module}.".startswith(inside) for module, _ in trace.changed_attributes):
        return False
    if trace.written & (call.inputs | call.unit_inputs):
        return False
    return all(isinstance(leaf, (NewTensor, Alias, Constant)) for leaf in call.leaves)


def repeatable_calls(trace: Trace, units: Collection[str]) -> frozenset[int]:
    """The calls of these units that can run again."""
    return frozenset(c.index for c in trace.calls if c.unit in units and can_run_again(trace, c))


def names_of_classes(root: nn.Module, units: Collection[str], classes: Collection[str]) -> set[str]:
    """The units that are of these classes, or inside of a module that is.

    Args:
        root: The user's module.
        units: Names of units.
        classes: Names of classes, with or without their module.
    """
    found = set()
    for unit in units:
        module: nn.Module = root
        path = [module]
        for part in unit.split(".") if unit else ():
            module = module.get_submodule(part)
            path.append(module)
        kinds = {kind for each in path[1:] or path for kind in type(each).__mro__}
        kinds -= {nn.Module, object}
        names = {k.__name__ for k in kinds} | {f"{k.__module__}.{k.__qualname__}" for k in kinds}
        if names & set(classes):
            found.add(unit)
    return found
