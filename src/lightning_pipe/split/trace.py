"""What a trace is: the unit calls of one step, the glue between them, and who reads what.

A *value* is an output leaf of a unit call, or the result of one torch call in the glue. The trace
holds the graph of values by their keys:

    (call, leaf)          leaf ``leaf`` of unit call ``call``
    (-1, segment, k)      the k-th tensor-returning torch call after ``segment`` unit calls
    "blocks.0.weight"     a parameter that the glue reads

It knows nothing of stages: :mod:`lightning_pipe.split.cut` places the calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.errors import StageMismatchError
from lightning_pipe.split._fake import empty_fake
from lightning_pipe.split.parted import Layout, is_parted, part_of
from lightning_pipe.split.spec import ValueSpec
from lightning_pipe.split.streams import Drawing, Entered
from lightning_pipe.split.tree import TreeSpec

ValueKey = tuple[int, int] | tuple[int, int, int]
Source = tuple[int, int] | tuple[int, int, int] | str


@dataclass(frozen=True, slots=True)
class Meta:
    """Everything about a tensor but its data.

    Where processes share a stage, shape and strides are those of this process's part.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    layout: Layout | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Describe ``tensor``; where several processes share it, this one's part and the layout."""
        layout = Layout.of(tensor)
        if layout is not None:
            # a sum that is not complete has the shape of the whole
            own = cls.of(part_of(tensor))
            return replace(own, requires_grad=tensor.requires_grad, layout=layout)
        strided = tensor.layout is torch.strided
        stride = tuple(tensor.stride()) if strided else (0,) * tensor.dim()
        return cls(tuple(tensor.shape), stride, tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a send moves; expanded dimensions (stride 0) are counted once."""
        count = 1
        for size, step in zip(self.shape, self.stride, strict=True):
            count *= 1 if step == 0 else size
        return count * self.dtype.itemsize

    def ghost(self) -> Tensor:
        """Make a fake tensor of this description; it says that it needs a gradient if the value
        did, and has a history, for a leaf must not be written in place."""
        made = empty_fake(self.shape, self.stride, self.dtype, self.device)
        if self.layout is not None:
            made = self.layout.whole(made)
        if not self.requires_grad or not torch.is_grad_enabled():
            return made
        return made.requires_grad_().clone()

    def laid_out(self, part: Tensor) -> Tensor:
        """A received value as the step knows it: only parts travel."""
        return part if self.layout is None else self.layout.whole(part)

    def to_send(self, value: Tensor, name: str) -> Tensor:
        """What travels of a value.

        Raises:
            StageMismatchError: It is shared now, and was not when the step was traced.
        """
        if not is_parted(value):
            return value
        if self.layout is None:
            raise StageMismatchError(
                f"{name} should be sent as an ordinary tensor, as it was when the step was traced, "
                "and it is a DTensor now"
            )
        return self.layout.part(value)

    def spec(self, name: str) -> ValueSpec:
        """Describe the value as it crosses a boundary."""
        return ValueSpec(name, self.shape, self.dtype, self.requires_grad)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """An output leaf that the unit made."""

    meta: Meta


@dataclass(frozen=True, slots=True)
class Alias:
    """An output leaf that is the argument itself; nothing needs to be sent."""

    argument: int


@dataclass(frozen=True, slots=True)
class Constant:
    """An output leaf that is no tensor; ``known`` is false for what depends on data or draws."""

    value: Any
    known: bool = True


@dataclass(frozen=True, slots=True)
class WrittenOutput:
    """An output leaf that is an argument which the unit wrote in place."""

    argument: int
    meta: Meta


@dataclass(frozen=True, slots=True)
class WrittenArgument:
    """An argument that the unit wrote in place and did not return."""

    argument: int
    meta: Meta


@dataclass(frozen=True, slots=True)
class SideAttribute:
    """A tensor that the unit left in an attribute of itself (an auxiliary loss, say)."""

    module: str
    attribute: str
    meta: Meta


Leaf = NewTensor | Alias | Constant | WrittenOutput | WrittenArgument | SideAttribute


@dataclass(slots=True)
class UnitCall:
    """One call of a unit.

    ``leaves[:num_outputs]`` rebuild what the call returned, the rest are extra outputs that travel
    beside it. ``inputs`` are the values and glue parameters that the arguments are made of, nearest
    first known value; ``unit_inputs`` the same in terms of unit outputs only. ``activation_bytes``
    is what the unit keeps for its backward; ``saved`` lists it by the number of the storage and its
    bytes, since neighbours may keep the same one.
    """

    index: int
    unit: str
    inputs: frozenset[Source]
    unit_inputs: frozenset[Source]
    structure: TreeSpec
    leaves: tuple[Leaf, ...]
    num_outputs: int
    in_checkpoint: bool = False
    flops: int = 0
    parameters: int = 0
    parameter_bytes: int = 0
    activation_bytes: int = 0
    saved: tuple[tuple[int, int], ...] = ()
    #: whether the unit draws numbers that may steer its own code: it may return what it was given
    draws: bool = False
    #: what the call was given, without the data (:func:`lightning_pipe.split.memo.arguments_key`)
    arguments: Hashable = None
    #: the modules that it calls
    entered: Entered = ()
    #: forward hooks of the unit up to the last one that gave another output
    hooks_done: int = 0
    #: whether it computes a loss over targets, some of which may not count
    has_loss: bool = False

    @property
    def passes_through(self) -> bool:
        """Whether an output is an argument itself."""
        return any(isinstance(leaf, Alias) for leaf in self.leaves)

    def meta(self, leaf: int) -> Meta:
        """Describe the tensor at ``leaf``."""
        kind = self.leaves[leaf]
        assert not isinstance(kind, (Alias, Constant))
        return kind.meta


@dataclass(slots=True)
class GlueValue:
    """The result of one torch call between units."""

    key: tuple[int, int, int]
    function: str
    parents: frozenset[Source]
    meta: Meta
    can_cross: bool


@dataclass(slots=True)
class Trace:
    """One step, seen once. Built by :func:`lightning_pipe.split.analyse.trace_step`."""

    calls: tuple[UnitCall, ...] = ()
    glue: dict[tuple[int, int, int], GlueValue] = field(default_factory=dict)
    #: what the tail reads: the returned value, logged values, metrics, attributes that were set
    tail_inputs: frozenset[Source] = frozenset()
    tail_unit_inputs: frozenset[Source] = frozenset()
    #: values that somebody turned into a Python number on the way: every later stage needs them
    control: frozenset[Source] = frozenset()
    #: unit outputs whose storage is written later
    written: frozenset[ValueKey] = frozenset()
    #: glue calls that draw random numbers, and whether the stream begins anew after them
    random_glue: Mapping[tuple[int, int], bool] = field(default_factory=dict)
    #: modules that have a stream of random numbers of their own
    drawing: Drawing = field(default_factory=dict)
    glue_parameters: frozenset[str] = frozenset()
    glue_reads_by_unit: Mapping[str, frozenset[str]] = field(default_factory=dict)
    changed_attributes: frozenset[tuple[str, str]] = frozenset()
    changed_buffers: frozenset[str] = frozenset()
    #: those that the code between units changes: of modules around units, or written from outside
    glue_buffers: frozenset[str] = frozenset()
    ghost_attributes: frozenset[tuple[str, str]] = frozenset()
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: parameters to which no gradient comes: the loss does not depend on them
    without_gradient: frozenset[str] = frozenset()
    training: bool = True
    on_fakes: bool = True
    notes: tuple[str, ...] = ()
    #: modules that must stay whole, and those that had to be opened: later traces start from here
    keep_whole: frozenset[str] = frozenset()
    open_up: frozenset[str] = frozenset()
    #: values that share memory which is written later: not two of one set can cross
    shared: tuple[frozenset[ValueKey], ...] = ()
    #: checkpointed region of the glue to the one unit call in it, or None
    regions: Mapping[int, int | None] = field(default_factory=dict)
    #: whether anything in the step runs again for its backward
    recomputes: bool = False
    #: torch functions that failed on fakes: whoever calls them needs their inputs
    pinned: frozenset[str] = frozenset()
    #: what the glue read as Python data in a trace with real values, by place
    read_values: Mapping[tuple[int, int], Any] = field(default_factory=dict)
    #: what the glue before each call, and at last the tail, keeps for the backward
    glue_saved: tuple[tuple[tuple[int, int], ...], ...] = ()
    #: names of the glue calls that return tensors, in order, after each number of unit calls
    script: tuple[tuple[str, ...], ...] = ()
    #: whether the glue drew numbers that Python sees: they may decide which units are called
    draws: bool = False
    #: what the glue read of the batch: truth values and whole numbers, in their order
    batch_reads: tuple[int, ...] = ()
    #: whether these are known to decide which units are called
    steered: bool = False
    #: all units, called or not
    units: tuple[str, ...] = ()
    #: units that did not run: they were taken to do what units like them did before
    repeated: frozenset[str] = frozenset()
    #: the shapes at other sizes, for a trace that was not seen but derived from others
    derived: Mapping[ValueKey, Meta] | None = None

    @property
    def restless(self) -> bool:
        """Whether another batch or other random numbers may call other units."""
        return self.draws or self.steered

    @property
    def unit_names(self) -> tuple[str, ...]:
        """Units that were called, in the order of their first call."""
        return tuple(dict.fromkeys(call.unit for call in self.calls))

    def meta(self, key: ValueKey) -> Meta:
        """Describe the value ``key``."""
        if self.derived is not None:
            return self.derived[key]
        if len(key) == 3:
            return self.glue[key].meta
        return self.calls[key[0]].meta(key[1])

    def name(self, key: ValueKey) -> str:
        """Name a value for people and for the wire."""
        if len(key) == 3:
            return f"{self.glue[key].function} after call {key[1]} (#{key[2]})"
        return f"{self.calls[key[0]].unit}[{key[1]}] of call {key[0]}"

    def keys(self) -> Iterator[ValueKey]:
        """Name every value that is a tensor."""
        for call in self.calls:
            for number, leaf in enumerate(call.leaves):
                if not isinstance(leaf, (Alias, Constant)):
                    yield call.index, number
        yield from self.glue

    def digest_text(self) -> str:
        """A text that is equal on two ranks exactly if they saw the same step."""
        calls = [(c.unit, sorted(map(str, c.inputs)), c.leaves, c.flops) for c in self.calls]
        glue = [
            (g.key, g.function, sorted(map(str, g.parents)), g.meta) for g in self.glue.values()
        ]
        return repr((calls, glue, sorted(map(str, self.tail_inputs)), sorted(self.glue_parameters)))
