"""A schedule as data: what every rank does, in which order.

``Action`` is one thing that a rank does and prints as ``2F0`` (stage 2, forward, micro-batch 0).
``Schedule`` holds the order of every rank. The checker, the simulator, the picture and the engine
read this one object, so they cannot disagree. Knows no time, no bytes, no torch.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.checks import check_actions, check_complete, deadlock

__all__ = ["Action", "Op", "Order", "Schedule"]

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Op(str, Enum):
    """The kind of an action.

    A full backward B is I and W in one. I computes the gradient of the stage's inputs, which the
    previous stage waits for; W computes the gradient of its weights, which nobody waits for.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"

    def __str__(self) -> str:
        return self.value


_FORWARD, _WEIGHT = Op.FORWARD, Op.WEIGHT  # looked up millions of times


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does: ``op`` for one micro-batch on one stage.

    >>> str(Action(2, Op.FORWARD, 0))
    '2F0'
    >>> Action.parse("2F0") == Action(2, Op.FORWARD, 0)
    True
    """

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Reads the text form.

        Raises:
            ScheduleError: The text is not an action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            shown = text.strip()[:40]
            raise ScheduleError(
                f"{shown!r} is not an action; an action is stage, one of F B I W, and "
                "micro-batch, such as 2F0",
                action=shown,
            )
        return cls(int(match[1]), Op(match[2]), int(match[3]))


Order = tuple["Action | None", ...]
"""What one rank does, first to last; ``None`` is an idle slot, for drawings."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The orders of all ranks of a pipeline.

    Args:
        name: Where the schedule is from: the name of its builder, or of its file.
        orders: One order per rank. A rank is a position in the pipeline, from 0.
        num_stages: Stages of the whole model, over all ranks.
        num_microbatches: Micro-batches of one step.

    >>> schedule = Schedule.from_csv("0F0,0F1,,0B0,0B1\\n,1F0,1B0,1F1,1B1", name="by hand")
    >>> schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    (2, 2, 2)
    >>> print(schedule)
    rank 0 | 0F0 0F1     0B0     0B1
    rank 1 |     1F0 1B0 1F1 1B1
    """

    name: str
    orders: tuple[Order, ...]
    num_stages: int
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.orders)

    @property
    def stage_to_rank(self) -> tuple[int, ...]:
        """The rank that holds each stage; -1 for a stage that no order names."""
        ranks = [-1] * self.num_stages
        for rank, order in enumerate(self.orders):
            for action in order:
                if action is not None:
                    ranks[action.stage] = rank
        return tuple(ranks)

    @property
    def has_backward(self) -> bool:
        """Whether the schedule trains; otherwise it only evaluates."""
        return any(a is not None and a.op is not Op.FORWARD for order in self.orders for a in order)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """The order of one rank without its idle slots."""
        return tuple(action for action in self.orders[rank] if action is not None)

    def stages(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(sorted({action.stage for action in self.actions(rank)}))

    def keep_microbatches(self, num_microbatches: int) -> Schedule:
        """The same schedule for its first micro-batches only.

        What remains of an order that runs still runs, since leaving actions out only takes waits
        away.
        """
        if not 1 <= num_microbatches <= self.num_microbatches:
            raise ScheduleError(
                f"{self.name}: cannot keep {num_microbatches} micro-batches of "
                f"{self.num_microbatches}"
            )
        orders = tuple(
            tuple(a for a in self.actions(rank) if a.microbatch < num_microbatches)
            for rank in range(self.num_ranks)
        )
        return replace(self, orders=orders, num_microbatches=num_microbatches)

    def check(self) -> Schedule:
        """Proves that the schedule can be run, and returns it.

        Every stage is on one rank; every (stage, micro-batch) has one F and, if the schedule
        trains, either one B or one I and one W; and with receives that wait and sends that do not,
        no rank waits for ever.

        Raises:
            ScheduleError: With the rank, the step and the action at fault.
        """
        check_actions(self)
        check_complete(self)
        deque(self.execution(), maxlen=0)  # to its end, which a deadlock would not let it reach
        return self

    def execution(self) -> Iterator[tuple[int, int, Action]]:
        """Yields (rank, step, action); whatever an action waits for comes before it.

        Raises:
            ScheduleError: The schedule deadlocks; what was yielded until then is what ran.
        """
        return ((rank, step, action) for rank, step, action, _, _ in self.walk())

    def walk(self) -> Iterator[tuple[int, int, Action, int | None, int | None]]:
        """As ``execution``, with what each action ``needs`` and ``makes``.

        Raises:
            ScheduleError: The schedule deadlocks.
        """
        done: set[int | None] = {None}
        waiting: dict[int | None, list[int]] = defaultdict(list)
        steps = [0] * self.num_ranks
        runnable = list(range(self.num_ranks - 1, -1, -1))
        while runnable:
            rank = runnable.pop()
            order, step = self.orders[rank], steps[rank]
            while step < len(order):
                action = order[step]
                if action is not None:
                    needed = self.needs(action)
                    if needed not in done:
                        waiting[needed].append(rank)
                        break
                    made = self.makes(action)
                    yield rank, step, action, needed, made
                    done.add(made)
                    if made in waiting:
                        runnable += waiting.pop(made)
                step += 1
            steps[rank] = step
        if waiting:
            raise deadlock(self, steps)

    def makes(self, action: Action) -> int | None:
        """A number for what others may wait for: an output, or (< 0) an input gradient.

        None for W, which nobody waits for.
        """
        if action.op is _WEIGHT:
            return None
        value = action.stage * self.num_microbatches + action.microbatch
        return value if action.op is _FORWARD else -1 - value

    def needs(self, action: Action) -> int | None:
        """The number, in the sense of ``makes``, of the one thing that an action waits for.

        F needs the output of the stage before; B and I the input gradient of the stage after (which
        implies their own forward); W its own I.
        """
        stage, op = action.stage, action.op
        if op is _FORWARD:
            return None if stage == 0 else (stage - 1) * self.num_microbatches + action.microbatch
        if op is not _WEIGHT:
            if stage == self.num_stages - 1:
                return stage * self.num_microbatches + action.microbatch
            stage += 1
        return -1 - (stage * self.num_microbatches + action.microbatch)

    def in_flight(self) -> tuple[int, ...]:
        """The most activations of one (stage, micro-batch) that each rank holds at a time.

        Held from F to the end of B or W; nothing is held when the schedule only evaluates. 1F1B
        holds P - s on stage s, GPipe M.
        """
        if not self.has_backward:
            return (0,) * self.num_ranks
        peaks = []
        for rank in range(self.num_ranks):
            held = peak = 0
            for action in self.actions(rank):
                held += {Op.FORWARD: 1, Op.INPUT: 0}.get(action.op, -1)
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)

    def aligned(self) -> Schedule:
        """The same schedule with idle slots put in: every action takes one slot, sending none."""
        slots: list[list[Action | None]] = [[] for _ in self.orders]
        ready: dict[int, int] = {}
        for rank, _, action in self.execution():
            row = slots[rank]
            needed = self.needs(action)
            start = max(len(row), 0 if needed is None else ready[needed])
            row.extend([None] * (start - len(row)))
            row.append(action)
            made = self.makes(action)
            if made is not None:
                ready[made] = start + 1
        return replace(self, orders=tuple(tuple(row) for row in slots))

    def to_csv(self) -> str:
        """One line per rank, one cell per step, empty where idle: torch's compute-only format."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for order in self.orders:
            writer.writerow(["" if action is None else str(action) for action in order] or [""])
        return text.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Reads what ``to_csv`` and torch write, and checks it. Empty lines and lines that start
        with # are skipped.

        Raises:
            ScheduleError: A cell is not an action, or the schedule cannot be run; with rank, step
                and action.
        """
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        try:
            rows = list(csv.reader(lines))
        except csv.Error as error:  # a cell without end, such as one of another kind of file
            raise ScheduleError(f"{name}: this is no table of actions ({error})") from None
        orders = tuple(_parse_order(name, rank, cells) for rank, cells in enumerate(rows))
        found = [action for order in orders for action in order if action is not None]
        if not found:
            raise ScheduleError(
                f"{name}: no action found in {len(lines)} lines; one line per rank is needed"
            )
        num_stages = 1 + max(action.stage for action in found)
        num_microbatches = 1 + max(action.microbatch for action in found)
        return cls(name, orders, num_stages, num_microbatches).check()

    def __str__(self) -> str:
        rows = self.aligned().orders
        width = max((len(str(a)) for row in rows for a in row if a is not None), default=1)
        label = len(str(max(self.num_ranks - 1, 0)))
        return "\n".join(
            f"rank {rank:>{label}} | "
            + " ".join(f"{'' if a is None else str(a):<{width}}" for a in row).rstrip()
            for rank, row in enumerate(rows)
        )


def _parse_order(name: str, rank: int, cells: Iterable[str]) -> Order:
    order: list[Action | None] = []
    for step, cell in enumerate(cells):
        try:
            order.append(Action.parse(cell) if cell.strip() else None)
        except ScheduleError as error:
            raise ScheduleError(
                f"{name}: rank {rank}, step {step}: {error}",
                rank=rank,
                step=step,
                action=error.action,
            ) from None
    return tuple(order)
