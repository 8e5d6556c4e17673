"""The shapes of a step at sizes that it was not traced at.

Traces of one skeleton (:mod:`lightning_pipe.split.signature`) that saw the same calls differ in
numbers only. Each number is taken for the simplest rule that fits all of them: constant, or an
integer multiple of a changing size, of a sum or product of two, plus a constant; or a size over a
stride, rounded down, as convolutions have it. What no rule or more than one answer fits is not
guessed: that batch is traced. A rule may still be wrong (``if length > 8``): whoever runs a derived
step for the first time has to check it (see `StageProgram.watch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Any

from lightning_pipe.split.trace import Alias, Constant, Leaf, Meta, Trace, ValueKey

_MAX_SAMPLES = 8
_MAX_STRIDE = 1024
_MAX_WRONG = 3

Vector = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """A trace at some sizes, and what the caller made of it."""

    sizes: Vector
    trace: Trace
    made: Any


class Family:
    """Samples of one skeleton; those that saw the same step are a group."""

    def __init__(self) -> None:
        self._groups: list[list[Sample]] = []
        self._right = 0
        self._wrong: set[Vector] = set()

    def add(self, sample: Sample) -> None:
        """Remember a trace."""
        for group in self._groups:
            if _alike(group[0].trace, sample.trace):
                group.append(sample)
                if len(group) > _MAX_SAMPLES:
                    group.pop(1)
                return
        self._groups.append([sample])

    def derive(self, sizes: Vector) -> Sample | None:
        """The step at other sizes: a copy of a trace with other shapes; None if that is a guess."""
        if not self._groups or not self.is_trusted(sizes):
            return None
        group = min(self._groups, key=lambda g: min(_distance(s.sizes, sizes) for s in g))
        rules = _Rules.of([sample.sizes for sample in group], sizes)
        if len(group) < 2 or rules is None:
            return None
        metas: dict[ValueKey, Meta] = {}
        known: dict[tuple[Meta, ...], Meta | None] = {}  # equal blocks have equal shapes
        for key in group[0].trace.keys():  # noqa: SIM118 - a method
            seen = tuple(sample.trace.meta(key) for sample in group)
            if seen not in known:
                known[seen] = _derived(seen, rules)
            meta = known[seen]
            if meta is None:
                return None
            metas[key] = meta
        return Sample(sizes, replace(group[0].trace, derived=metas), group[0].made)

    def is_trusted(self, sizes: Vector) -> bool:
        """Whether what is derived, or taken from memory, may be tried at these sizes."""
        often_wrong = len(self._wrong) > _MAX_WRONG + self._right // 8
        return not often_wrong and sizes not in self._wrong

    def confirm(self) -> None:
        """What was derived was right."""
        self._right += 1

    def reject(self, sizes: Vector) -> None:
        """What was derived at these sizes was wrong; a family that often is gives up."""
        self._wrong.add(sizes)
        for group in self._groups:
            group[:] = [sample for sample in group if sample.sizes != sizes]
        self._groups = [group for group in self._groups if group]


def _distance(one: Vector, other: Vector) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


# ---------------------------------------------------------------------- the same step


def _alike(one: Trace, other: Trace) -> bool:
    """Tell whether two traces differ in nothing but the numbers of their shapes."""
    return _structure(one) == _structure(other) and all(
        a.structure == b.structure for a, b in zip(one.calls, other.calls, strict=True)
    )


def _structure(trace: Trace) -> Any:
    calls = [
        (
            *(call.unit, call.inputs, call.unit_inputs, call.num_outputs, call.in_checkpoint),
            tuple(_kind(leaf) for leaf in call.leaves),
        )
        for call in trace.calls
    ]
    glue = [
        (g.key, g.function, g.parents, g.can_cross, _without_numbers(g.meta))
        for g in trace.glue.values()
    ]
    return (
        *(calls, glue, trace.tail_inputs, trace.tail_unit_inputs, trace.control, trace.written),
        *(dict(trace.random_glue), trace.glue_parameters, dict(trace.glue_reads_by_unit)),
        *(
            trace.changed_attributes,
            trace.changed_buffers,
            trace.ghost_attributes,
            trace.glue_buffers,
        ),
        *(trace.training, trace.on_fakes, trace.script),
    )


def _kind(leaf: Leaf) -> Any:
    if isinstance(leaf, Constant):
        value = leaf.value
        plain = isinstance(value, (bool, int, float, str, type(None)))
        return (type(value), value if plain else None)
    if isinstance(leaf, Alias):
        return leaf
    rest = tuple(getattr(leaf, name, None) for name in ("argument", "module", "attribute"))
    return (type(leaf), rest, _without_numbers(leaf.meta))


def _without_numbers(meta: Meta) -> Any:
    return (len(meta.shape), meta.dtype, meta.device, meta.requires_grad)


# ---------------------------------------------------------------------- numbers


@dataclass(slots=True)
class _Rules:
    """What numbers become at new sizes.

    Attributes:
        terms: Simple terms in the changing sizes: their values in the samples, and the new one.
        pairs: Sums and products of two of them.
        known: Answers so far.
    """

    terms: Mapping[Vector, int]
    pairs: Sequence[tuple[Vector, int]]
    known: dict[Vector, int | None]

    @classmethod
    def of(cls, samples: Sequence[Vector], sizes: Vector) -> _Rules | None:
        """Find what changes; None if the new sizes change what never changed before."""
        terms: dict[Vector, int] = {}
        for place, new in enumerate(sizes):
            vector = tuple(sample[place] for sample in samples)
            if terms.setdefault(vector, new) != new:
                return None
            if len(set(vector)) == 1 and vector[0] != new:
                return None
        changing = {v: new for v, new in terms.items() if len(set(v)) > 1}
        pairs = []
        for (a, new_a), (b, new_b) in combinations_with_replacement(changing.items(), 2):
            pairs.append((tuple(x * y for x, y in zip(a, b, strict=True)), new_a * new_b))
            if a != b:
                pairs.append((tuple(x + y for x, y in zip(a, b, strict=True)), new_a + new_b))
        return cls(changing, pairs, {})

    def number(self, values: Vector) -> int | None:
        """The number that was ``values`` in the samples; None if that is not clear."""
        if values not in self.known:
            self.known[values] = self._find(values)
        return self.known[values]

    def _find(self, values: Vector) -> int | None:
        if len(set(values)) == 1:
            return values[0]
        found = _agreed(_multiple(term, values, new) for term, new in self.terms.items())
        if found is _NOTHING:
            found = _agreed(_floor(term, values, new) for term, new in self.terms.items())
        if found is _NOTHING:
            found = _agreed(_multiple(term, values, new) for term, new in self.pairs)
        return found if isinstance(found, int) else None


_NOTHING, _UNCLEAR = object(), object()


def _agreed(answers: Iterable[Any]) -> Any:
    """One answer, if all rules that fit give the same."""
    found = {answer for answer in answers if answer is not _NOTHING}
    if not found:
        return _NOTHING
    return found.pop() if len(found) == 1 else _UNCLEAR


def _multiple(term: Vector, values: Vector, new: int) -> Any:
    """``values = factor * term + constant``, at a new value of the term."""
    pairs = dict(zip(term, values, strict=True))
    (x0, v0), *others = pairs.items()
    if not others:
        return _NOTHING
    factor, rest = divmod(others[0][1] - v0, others[0][0] - x0)
    fits = all(v0 + factor * (x - x0) == v for x, v in zip(term, values, strict=True))
    if rest or factor < 1 or not fits:
        return _NOTHING
    return max(0, v0 + factor * (new - x0))


def _floor(term: Vector, values: Vector, new: int) -> Any:
    """``values = (term + offset) // stride``, if all strides and offsets that fit agree."""
    answers: set[int] = set()
    for stride in range(2, _MAX_STRIDE):
        low = max(stride * v - x for x, v in zip(term, values, strict=True))
        high = min(stride * v + stride - 1 - x for x, v in zip(term, values, strict=True))
        if low <= high:
            answers |= {(new + low) // stride, (new + high) // stride}
        if len(answers) > 1:
            return _UNCLEAR
    return answers.pop() if answers else _NOTHING


# ---------------------------------------------------------------------- metas


def _derived(metas: Sequence[Meta], rules: _Rules) -> Meta | None:
    if metas[0].layout is not None:  # how a length is divided is not known from two of them
        return None
    shape = []
    for place in range(len(metas[0].shape)):
        size = rules.number(tuple(meta.shape[place] for meta in metas))
        if size is None:
            return None
        shape.append(size)
    return replace(metas[0], shape=tuple(shape), stride=_strides(metas, tuple(shape)))


def _strides(metas: Sequence[Meta], shape: Vector) -> Vector:
    """The strides of the first sample, scaled as its shape was; a ghost needs no more."""
    first = metas[0]
    order = sorted(range(len(shape)), key=lambda n: (-first.stride[n], n))
    dense, wanted = _dense(first.shape, order), _dense(shape, order)
    return tuple(
        0 if stride == 0 else (stride // dense[n]) * wanted[n] or wanted[n]
        for n, stride in enumerate(first.stride)
    )


def _dense(shape: Vector, order: Sequence[int]) -> dict[int, int]:
    strides, step = {}, 1
    for n in reversed(order):
        strides[n] = step
        step *= max(1, shape[n])
    return strides
