"""What units did before: a later trace need not run all of them again.

A trace runs every unit on fakes, which for a stack of equal blocks is the same work again and
again. Units that behaved alike in the first trace, call by call, are one *class*. In later traces
(another shape, evaluation, another draw of dropped layers) one unit of a class runs for each kind
of arguments, and the others are taken to do what it did. Where that is wrong, a stage finds out
when it runs the unit (see `StageProgram.watch`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.split._fake import without_modes
from lightning_pipe.split.streams import Entered
from lightning_pipe.split.trace import Alias, Constant, Leaf, Meta, NewTensor, SideAttribute, Trace
from lightning_pipe.split.tree import TreeSpec

_MAX_OUTCOMES = 4096
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call of a unit made."""

    given: TreeSpec
    made: TreeSpec
    leaves: tuple[Leaf, ...]
    num_outputs: int
    flops: int
    activation_bytes: int
    draws: bool = False
    entered: Entered = ()
    #: forward hooks of the unit up to the last one that gave another output
    hooks_done: int = 0
    #: whether it computes a loss over targets
    has_loss: bool = False


def arguments_key(arguments: list[Any]) -> Hashable:
    """Describe the arguments of a call: everything but the data."""
    position: dict[int, int] = {}
    described: list[Hashable] = []
    for number, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            first = position.setdefault(id(argument), number)
            described.append(first if first != number else Meta.of(argument))
        elif isinstance(argument, _PLAIN):
            described.append((type(argument).__name__, str(argument)))
        else:
            described.append(type(argument).__qualname__)
    return tuple(described)


class UnitMemo:
    """Outcomes of units, by class and arguments."""

    def __init__(self) -> None:
        self._class_of: dict[str, Hashable] = {}
        self._outcomes: OrderedDict[Hashable, Outcome] = OrderedDict()

    def learn(self, root: nn.Module, trace: Trace) -> None:
        """Sort the units of a trace into classes; those that are known keep theirs."""
        calls: dict[str, list[Hashable]] = {}
        for call in trace.calls:
            calls.setdefault(call.unit, []).append(
                (call.arguments, call.leaves, call.num_outputs, call.flops, call.activation_bytes)
            )
        for unit, behaviour in calls.items():
            if unit in self._class_of:
                continue
            module = root.get_submodule(unit)
            shapes = tuple(tuple(p.shape) for p in module.parameters())
            kind = (type(module), shapes, tuple(behaviour))
            try:
                self._class_of[unit] = hash(kind)
            except TypeError:  # a constant that cannot be hashed: a class of its own
                self._class_of[unit] = unit

    def key(self, unit: str, module: nn.Module, arguments: Hashable) -> Hashable | None:
        """Where the outcome of a call is kept; None if the unit is not known."""
        kind = self._class_of.get(unit)
        if kind is None:
            return None
        flags = tuple(p.requires_grad for p in module.parameters())
        return kind, arguments, flags, module.training, torch.is_grad_enabled()

    def get(self, key: Hashable | None, given: TreeSpec) -> Outcome | None:
        """What such a call made before."""
        outcome = self._outcomes.get(key) if key is not None else None
        return outcome if outcome is not None and outcome.given == given else None

    def put(self, key: Hashable | None, outcome: Outcome) -> None:
        """Remember what a call made, if that is all that it did."""
        if key is None or not all(map(_is_simple, outcome.leaves)):
            return
        self._outcomes[key] = outcome
        if len(self._outcomes) > _MAX_OUTCOMES:
            self._outcomes.popitem(last=False)


class SharedOutcomes:
    """What units did that no rank can run without their weights: their shapes depend on values.

    A trace after the cut asks the ranks that have the weights (see `Elsewhere`).
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Outcome] = {}
        #: by this rank, since they were last given to the others
        self.made: dict[Hashable, Outcome] = {}

    def get(self, key: Hashable, given: TreeSpec) -> Outcome | None:
        """What such a call made, on whichever rank."""
        outcome = self._known.get(key)
        return outcome if outcome is not None and outcome.given == given else None

    def note(self, key: Hashable, outcome: Outcome) -> None:
        """This rank has run such a call."""
        simple = (_is_simple(leaf) or isinstance(leaf, SideAttribute) for leaf in outcome.leaves)
        if all(simple):
            self.made[key] = outcome

    def learn(self, made: Iterable[Mapping[Hashable, Outcome]]) -> bool:
        """Take over what all ranks have made, in the order of the ranks; tell if that is new."""
        before = len(self._known)
        for outcomes in made:
            for key, outcome in outcomes.items():
                self._known.setdefault(key, outcome)
        self.made = {}
        return len(self._known) > before


class Elsewhere(CutError):
    """A unit must run to be traced, and its weights are on another rank."""


def _is_simple(leaf: Leaf) -> bool:
    return isinstance(leaf, (NewTensor, Alias)) or (
        isinstance(leaf, Constant) and leaf.known and isinstance(leaf.value, _PLAIN)
    )


def rebuild(outcome: Outcome, arguments: list[Any]) -> list[Any]:
    """Make the outputs of a call anew."""
    made: list[Any] = []
    for leaf in outcome.leaves:
        if isinstance(leaf, Alias):
            made.append(arguments[leaf.argument])
        elif isinstance(leaf, Constant):
            made.append(leaf.value)
        else:
            assert isinstance(leaf, (NewTensor, SideAttribute))
            ghost = leaf.meta.ghost()
            if leaf.meta.requires_grad:
                with without_modes():  # no leaf of the graph: it may be written in place
                    ghost = ghost.requires_grad_().clone()
            made.append(ghost)
    return made
