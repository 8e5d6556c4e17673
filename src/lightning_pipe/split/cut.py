"""Place the calls on stages and find what crosses each cut.

The boundary of a cut is a minimum vertex cut, in bytes, of the graph of values between what is
known before the cut (unit outputs of earlier stages) and what comes after it reads. Any value may
cross, unit output or glue: ``h = h + block(h)`` then sends one tensor where its terms would be a
growing list. Cuts are made left to right: what a stage can send on is what it received and what it
made itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import networkx as nx

from lightning_pipe.errors import CutError
from lightning_pipe.split.spec import ValueSpec
from lightning_pipe.split.trace import Source, Trace, ValueKey


def place(trace: Trace, starts: Sequence[int]) -> tuple[int, ...]:
    """Return the stage of every call, from the index of the first call of each stage.

    Raises:
        CutError: ``starts`` does not begin at call 0, or leaves a stage empty.
    """
    if tuple(starts) == (0,):
        return (0,) * len(trace.calls)
    if not starts or starts[0] != 0 or any(b <= a for a, b in pairwise(starts)):
        raise CutError(
            f"stage starts {tuple(starts)}: the first is 0 and each is above the one before."
        )
    if starts[-1] >= len(trace.calls):
        raise CutError(
            f"stage starts {tuple(starts)}: the step makes {len(trace.calls)} unit "
            "calls, so the last "
            "stage would be empty."
        )
    stage_of_call: list[int] = []
    for index in range(len(trace.calls)):
        stage = stage_of_call[-1] if stage_of_call else 0
        if stage + 1 < len(starts) and index == starts[stage + 1]:
            stage += 1
        stage_of_call.append(stage)
    return tuple(stage_of_call)


@dataclass(frozen=True, slots=True)
class Segments:
    """A step laid over units that already have a home: runs of calls, each on one stage's weights.

    Attributes:
        segment_of_call: Segment of every call; segments are the stages of a :class:`StepCut`.
        home: For each segment, the stage whose weights it uses. A step that goes through the model
            twice has more segments than stages.
    """

    segment_of_call: tuple[int, ...]
    home: tuple[int, ...]


def place_like(trace: Trace, homes: Mapping[str, Iterable[int]], *, num_stages: int) -> Segments:
    """Lay a step over the stages that already hold its units (evaluation, or another shape).

    A unit that lives on several stages is used where the previous call was, if it is there, else on
    the nearest later stage. The tail always runs on the last stage.

    Args:
        trace: The step.
        homes: For each unit name the stages that hold its weights. A unit inside or around a known
        one
            is looked up by its name's beginning.
        num_stages: Stages of the training cut.

    Raises:
        CutError: No stage holds all of a unit.
    """
    segment_of_call: list[int] = []
    home: list[int] = []
    for call in trace.calls:
        choices = sorted(_homes_of(call.unit, homes, last=num_stages - 1))
        if not choices:
            raise CutError(
                f"unit '{call.unit}' is called whole in this step, but the training step cut it "
                "into pieces on several stages. Choose other split_points, or run this step on one "
                "device."
            )
        here = home[-1] if home else min(choices)
        stage = (
            here if here in choices else min((c for c in choices if c > here), default=choices[0])
        )
        if not home or stage != here:
            home.append(stage)
        segment_of_call.append(len(home) - 1)
    if not home or home[-1] != num_stages - 1:
        home.append(num_stages - 1)
    return Segments(tuple(segment_of_call), tuple(home))


def _homes_of(unit: str, homes: Mapping[str, Iterable[int]], *, last: int) -> set[int]:
    """Find the stages that hold a unit; what the training step never calls lives on the last."""
    if unit in homes:
        return set(homes[unit])
    name = unit
    while name := name.rpartition(".")[0]:
        if name in homes:
            return set(homes[name])
    inside = [set(stages) for known, stages in homes.items() if known.startswith(unit + ".")]
    return set.intersection(*inside) if inside else {last}


@dataclass
class StepCut:
    """A step, cut into stages.

    Args:
        trace: The step.
        stage_of_call: Stage of every call; never decreases.
        num_stages: Stages; more than ``stage_of_call`` shows if the last have no call.
        glue_values: Let glue values cross, not unit outputs only.
    """

    trace: Trace
    stage_of_call: tuple[int, ...]
    num_stages: int = 0
    glue_values: bool = True
    #: keys of the values that cross from stage s to s + 1
    crossing: tuple[tuple[ValueKey, ...], ...] = field(init=False)

    def __post_init__(self) -> None:
        stages = self.stage_of_call
        if any(b < a for a, b in pairwise(stages)):
            raise CutError("the stages of the calls of a step never go back.")
        self.num_stages = max(self.num_stages, (stages[-1] + 1) if stages else 1)
        find = self._minimum_cut if self.glue_values else self._unit_cut
        crossing: list[tuple[ValueKey, ...]] = []
        for stage in range(1, self.num_stages):
            crossing.append(find(stage, crossing[-1] if crossing else None))
        self.crossing = tuple(crossing)
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse two values in one memory that is written after the cut: a receiver has two.

        Raises:
            CutError: Two such values cross.
        """
        for stage, keys in enumerate(self.crossing):
            for shared in self.trace.shared:
                both = sorted(shared & set(keys))
                if len(both) > 1:
                    raise CutError(
                        f"the cut between stages {stage} and {stage + 1} separates "
                        f"{self.trace.name(both[0])} and {self.trace.name(both[1])}: they are two "
                        "views of one memory, and one of them is written in place later, which "
                        "the other would not see. Write into a `.clone()`, or cut elsewhere with "
                        "split_points."
                    )

    # ------------------------------------------------------------------ boundaries

    @cached_property
    def boundaries(self) -> tuple[tuple[ValueSpec, ...], ...]:
        """What crosses from stage ``s`` to ``s + 1``, in the order in which it is sent."""
        return tuple(
            tuple(self.trace.meta(key).spec(self.trace.name(key)) for key in keys)
            for keys in self.crossing
        )

    def with_shapes_of(self, trace: Trace) -> StepCut:
        """The same cut of the same step at other sizes."""
        other = copy.copy(self)
        other.trace = trace
        vars(other).pop("boundaries", None)
        return other

    def first_call(self, stage: int) -> int:
        """Index of the first call at or after ``stage``; the number of calls if there is none."""
        calls = self.stage_of_call
        return next((i for i, s in enumerate(calls) if s >= stage), len(calls))

    def stages_of_units(self) -> dict[str, frozenset[int]]:
        """The stages that call each unit."""
        found: dict[str, set[int]] = {}
        for call, stage in zip(self.trace.calls, self.stage_of_call, strict=True):
            found.setdefault(call.unit, set()).add(stage)
        return {unit: frozenset(stages) for unit, stages in found.items()}

    def _needs(self, stage: int) -> frozenset[Source]:
        """What the calls of ``stage`` and later, and the tail, read."""
        needs = set(self.trace.tail_inputs | self.trace.control)
        for call in self.trace.calls:
            if self.stage_of_call[call.index] >= stage:
                needs |= call.inputs
        return frozenset(needs)

    def _is_after(self, key: Source, stage: int) -> bool:
        return not isinstance(key, str) and len(key) == 2 and self.stage_of_call[key[0]] >= stage

    def tail_boundary(self, rows: int) -> tuple[ValueKey, ...]:
        """Find what the tail of the step, after its last unit, is made of.

        Args:
            rows: Rows of the batch; of the values of the glue only those with rows are taken, so
                that the values of micro-batches can be put together.
        """
        calls = len(self.trace.calls)

        def has_rows(key: ValueKey) -> bool:
            if len(key) == 2:
                return True
            shape = self.trace.glue[key].meta.shape
            in_body = key[1] < calls and self.trace.glue[key].can_cross
            return in_body and bool(shape) and shape[0] % rows == 0

        known = self.crossing[-1] if self.crossing else None
        return self._minimum_cut(self.num_stages, known, has_rows)

    def _minimum_cut(
        self,
        stage: int,
        before: tuple[ValueKey, ...] | None,
        allowed: Callable[[ValueKey], bool] | None = None,
    ) -> tuple[ValueKey, ...]:
        can_cross = allowed or (lambda key: self._can_cross(key, stage))
        graph = nx.DiGraph()
        known = None if before is None else set(before)
        visited: set[ValueKey] = set()
        pending = [k for k in self._needs(stage) if not isinstance(k, str)]
        pending = [k for k in pending if not self._is_after(k, stage)]
        graph.add_edges_from((("out", key), "target") for key in pending)
        while pending:
            key = pending.pop()
            if key in visited:
                continue
            visited.add(key)
            capacity = {"capacity": self._price(key)} if can_cross(key) else {}
            graph.add_edge(("in", key), ("out", key), **capacity)
            if self._is_known(key, stage, known):
                graph.add_edge("source", ("in", key))
                continue
            for parent in self._parents(key):
                if not self._is_after(parent, stage):
                    pending.append(parent)
                    graph.add_edge(("out", parent), ("in", key))
        if "source" not in graph or "target" not in graph:
            return ()
        try:
            _, (left, right) = nx.minimum_cut(graph, "source", "target")
        except nx.NetworkXUnbounded as error:
            raise CutError(
                f"no cut before call {self.first_call(stage)} of the step can be sent: a value "
                "there is written in place on both sides."
            ) from error
        return tuple(sorted(k for k in visited if ("in", k) in left and ("out", k) in right))

    def _parents(self, key: ValueKey) -> list[ValueKey]:
        """List what a glue value is made of; a unit output is made of nothing here."""
        if len(key) == 2:
            return []
        return [parent for parent in self.trace.glue[key].parents if not isinstance(parent, str)]

    def _can_cross(self, key: ValueKey, stage: int) -> bool:
        """Tell whether the sender has ``key`` at the moment when its part of the step ends."""
        if len(key) == 2:
            return True
        return key[1] <= self.first_call(stage) and self.trace.glue[key].can_cross

    def _is_known(self, key: ValueKey, stage: int, known: set[ValueKey] | None) -> bool:
        """Tell whether the stage before the cut has ``key`` without making it from other values."""
        if known is not None and key in known:
            return True
        return len(key) == 2 and (known is None or self.stage_of_call[key[0]] == stage - 1)

    def _price(self, key: ValueKey) -> int:
        meta = self.trace.meta(key)
        return max(1, meta.wire_bytes * (2 if meta.requires_grad else 1))

    def _unit_cut(self, stage: int, before: tuple[ValueKey, ...] | None) -> tuple[ValueKey, ...]:
        needs = set(self.trace.tail_unit_inputs) | set(self.trace.control)
        for call in self.trace.calls:
            if self.stage_of_call[call.index] >= stage:
                needs |= call.unit_inputs
        found = {k for k in needs if not isinstance(k, str) and not self._is_after(k, stage)}
        expanded: set[ValueKey] = set()
        while found:
            key = found.pop()
            if len(key) == 2:
                expanded.add(key)
            else:
                parents = self.trace.glue[key].parents
                found |= {p for p in parents if not isinstance(p, str) and p not in expanded}
        return tuple(sorted(expanded))

    # ------------------------------------------------------------------ weights

    def calls_of(self, stage: int) -> tuple[int, ...]:
        """Indices of the calls that ``stage`` runs."""
        return tuple(i for i, s in enumerate(self.stage_of_call) if s == stage)

    def units_of(self, stage: int) -> tuple[str, ...]:
        """Names of the units that ``stage`` runs, each once."""
        return tuple(dict.fromkeys(self.trace.calls[i].unit for i in self.calls_of(stage)))

    def glue_parameters(self, stage: int) -> frozenset[str]:
        """Parameters that the glue of ``stage`` reads on the way from what it has to what it
        makes."""
        if not self.glue_values:
            return self.trace.glue_parameters
        received = set(self.crossing[stage - 1]) if stage else set()
        last = stage == self.num_stages - 1
        pending: set[Source] = set() if last else set(self.crossing[stage])
        if last:
            pending |= self.trace.tail_inputs | self.trace.control
        for index in self.calls_of(stage):
            pending |= self.trace.calls[index].inputs
        found: set[str] = set()
        seen: set[Source] = set()
        while pending:
            source = pending.pop()
            if source in seen or source in received:
                continue
            seen.add(source)
            if isinstance(source, str):
                found.add(source)
            elif len(source) == 3:
                pending |= self.trace.glue[source].parents
        return frozenset(found)

    def parameters(
        self, stage: int, unit_parameters: Mapping[str, frozenset[str]]
    ) -> frozenset[str]:
        """Names of all parameters that ``stage`` must hold.

        Args:
            stage: The stage.
            unit_parameters: For each unit name, the first names of the parameters inside it.
        """
        names = set(self.glue_parameters(stage))
        for unit in self.units_of(stage):
            names |= unit_parameters[unit] | self.trace.glue_reads_by_unit.get(unit, frozenset())
        return frozenset(names)
