"""Random programs: what a step does with its parts, as data that a seed decides.

An :class:`Example` is everything about one training. Its model is a list of operations over a
growing list of values, run in the step itself, in one module below it, or in two; so the cut has to
go through code that nobody wrote for it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields
from typing import Any

from tests.fuzz.parts import DRAWING, NORMING, choose_plain

Op = tuple[Any, ...]
LOSSES = ("mse", "entropy", "two", "sum", "weighted", "dict")
#: operations whose result for a row depends on the micro-batch that it is in
RANDOM = ("drop", "noise", "ask", "coin", "peek")
BATCHES = ("dict", "list", "tuple", "nested", "record")
SCHEDULES = {
    1: ("auto", "naive", "gpipe", "1f1b", "zero_bubble"),
    2: ("auto", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"),
    3: ("auto", "interleaved_1f1b", "looped_bfs"),
}


@dataclass(frozen=True)
class Example:
    """One training: the model, its data, and how it is laid over ranks."""

    seed: int
    parts: tuple[str, ...]
    frozen: tuple[int, ...]
    ops: tuple[Op, ...]
    home: str  # where the code is: in the step, in a module, or in two
    loss: str
    batch: str
    rows: int
    short: int  # rows of the last batch
    length: int  # of sequences; 0 for none
    extras: bool  # values without rows in the batch
    ranks: int
    chunks: int
    microbatches: int
    schedule: str
    recompute: Any
    balance: str
    accumulate: int
    clip: tuple[str, float] | None
    optimizer: str
    validates: bool
    counts: bool  # a buffer that the step counts in
    alias: bool  # a part that has two names

    @property
    def in_pieces(self) -> bool:
        """Whether one device has to take the micro-batches one by one to be a measure."""
        kinds = {*DRAWING, *NORMING} & set(self.parts)
        return bool(kinds) or any(op[0] in RANDOM for op in self.ops)

    @property
    def peeks(self) -> bool:
        """Whether values that a unit gives decide which units are called, which no cut knows."""
        return any(op[0] == "peek" for op in self.ops)

    @property
    def has_norms(self) -> bool:
        """Whether micro-batches need two rows."""
        return bool(NORMING.keys() & set(self.parts))

    def __str__(self) -> str:
        texts = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "ops"]
        return f"Example({', '.join(texts)})\n  " + "\n  ".join(map(str, self.ops))


@dataclass
class _Draft:
    """A program while it grows."""

    source: random.Random
    parts: list[str] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    values: int = 1
    normed: list[int] = field(default_factory=list)

    def part(self, kind: str) -> int:
        self.parts.append(kind)
        return len(self.parts) - 1

    def any(self) -> int:
        """A value, a late one rather."""
        return self.values - 1 - int(min(self.source.expovariate(0.9), self.values - 1))

    def add(self, *op: Any, values: int = 1) -> None:
        self.ops.append(op)
        self.values += values


def _call(draft: _Draft) -> None:
    draft.add("call", draft.part(choose_plain(draft.source)), draft.any())


def _drawing(draft: _Draft) -> None:
    draft.add("call", draft.part(draft.source.choice(sorted(DRAWING))), draft.any())


def _norming(draft: _Draft) -> None:
    draft.add("call", draft.part(draft.source.choice(sorted(NORMING))), draft.any())


def _two(draft: _Draft) -> None:
    draft.add("two", draft.part("two"), draft.any(), values=2)


def _named(draft: _Draft) -> None:
    draft.add("named", draft.part("named"), draft.any(), values=1)


def _mixed(draft: _Draft) -> None:
    draft.add("mixed", draft.part("mixed"), draft.any(), draft.any())


def _repeat(draft: _Draft) -> None:
    known = [i for i, kind in enumerate(draft.parts) if kind not in (*NORMING, "two", "named")]
    known = [i for i in known if draft.parts[i] != "mixed"]
    if known:
        for _ in range(draft.source.choice((1, 1, 2))):
            draft.add("call", draft.source.choice(known), draft.any())


def _tied(draft: _Draft) -> None:
    known = [i for i, kind in enumerate(draft.parts) if kind in ("linear", "buffered")]
    if known:
        draft.add("tied", draft.source.choice(known), draft.any())


def _flag(draft: _Draft) -> None:
    draft.add(draft.source.choice(("flag", "long")), draft.part("residual"), draft.any())


def _binary(draft: _Draft) -> None:
    draft.add(draft.source.choice(("add", "mul", "inplace", "mean")), draft.any(), draft.any())


def _unary(draft: _Draft) -> None:
    kinds = ("scale", "detach", "roll", "split", "relu", "table", "keep", "cast", "where")
    draft.add(draft.source.choice(kinds), draft.any())


def _nograd(draft: _Draft) -> None:
    draft.add("nograd", draft.part("residual"), draft.any())


def _checkpointed(draft: _Draft) -> None:
    draft.add("again", draft.part("residual"), draft.any())


def _random_glue(draft: _Draft) -> None:
    draft.add(draft.source.choice(("drop", "noise")), draft.any())


def _asks(draft: _Draft) -> None:
    draft.add("ask", draft.part("residual"), draft.any())


def _coin(draft: _Draft) -> None:
    draft.add("coin", draft.part("residual"), draft.any())


def _peeks(draft: _Draft) -> None:
    draft.add("peek", draft.part("residual"), draft.any())


_STEPS = {
    _call: 40, _binary: 16, _unary: 12, _repeat: 8, _mixed: 5, _two: 5, _named: 5, _tied: 5,
    _flag: 3, _nograd: 3, _checkpointed: 2,
}  # fmt: skip
_RARE = (_drawing, _norming, _random_glue, _asks, _coin, _peeks)


def _program(source: random.Random) -> _Draft:
    draft = _Draft(source)
    steps = dict(_STEPS)
    for rare in _RARE:
        if source.random() < 0.12:
            steps[rare] = 12
    kinds, weights = list(steps), list(steps.values())
    _call(draft)
    for _ in range(source.choice((2, 3, 4, 4, 5, 6, 8))):
        source.choices(kinds, weights)[0](draft)
    return draft


def example_of(seed: int, ranks: int | None = None) -> Example:
    """The training that a seed stands for; ``ranks`` pins P, which is a draw of its own."""
    return example_from(random.Random(seed), seed, ranks)


def example_from(source: random.Random, seed: int, ranks: int | None = None) -> Example:
    """The training that a source of random numbers draws; its weights and data are the seed's."""
    drawn = source.choices((1, 2, 4), (25, 67, 8))[0]
    ranks = ranks or drawn
    draft = _program(source)
    chunks = source.choices((1, 2, 3), (65, 28, 7))[0]
    if len(draft.parts) < ranks * chunks:  # fewer units than stages are refused: seldom
        chunks = 1
        while len(draft.parts) < ranks and source.random() < 0.95:
            _call(draft)
    rows = source.randint(1, 8) if source.random() < 0.3 else source.choice((4, 6, 8))
    asks = any(op[0] in RANDOM for op in draft.ops)
    pieces = source.choice((1, 2, 2, 3, 4, 4, 6))
    schedule = source.choice(SCHEDULES[chunks])
    if schedule in ("1f1b", "interleaved_1f1b") and source.random() < 0.9:
        pieces = ranks * -(-pieces // ranks)  # other numbers are refused
    return Example(
        seed=seed,
        parts=tuple(draft.parts),
        frozen=tuple(i for i in range(len(draft.parts)) if source.random() < 0.08),
        ops=tuple(draft.ops),
        home=source.choice(("step", "module", "module", "halves")),
        loss=source.choice(LOSSES),
        batch=source.choice(BATCHES),
        rows=rows,
        short=max(1, rows - 1) if source.random() < 0.2 else rows,
        length=source.choice((0, 0, 3)),
        extras=source.random() < 0.5,
        ranks=ranks,
        chunks=chunks,
        microbatches=pieces,
        schedule=schedule,
        recompute=source.choice(("auto", "auto", "none", "all", 2)),
        balance=source.choice(("auto", "auto", "flops", "parameters", "uniform")),
        accumulate=2 if source.random() < 0.2 else 1,
        clip=source.choice((None, None, ("norm", 0.05), ("value", 0.01))),
        optimizer=source.choice(("sgd", "adamw", "groups")),
        validates=source.random() < 0.15 and not asks,
        counts=source.random() < 0.3,
        alias=source.random() < 0.1,
    )
