"""The schedules: one pure function each, and the registry ``SCHEDULES`` that names them.

A builder takes (P ranks, M micro-batches, V chunks per rank) and returns the orders of a schedule
that is complete and free of deadlock for *every* M >= 1, because a short last batch gives fewer
micro-batches than usual. What a user may ask for is narrower (``validate_user``): a schedule that
would only be slow is refused by name, with what is legal. A new schedule is one function and one
line in ``SCHEDULES``.

In the drawings F1 is the forward of the first micro-batch, B1 its backward.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.ir import Action, Op, Order, Schedule
from lightning_pipe.planning.zero_bubble import dualpipev, zbv, zero_bubble

__all__ = [
    "SCHEDULES",
    "Builder",
    "forward_only",
    "gpipe",
    "interleaved_1f1b",
    "looped_bfs",
    "make_schedule",
    "naive",
    "one_f_one_b",
    "validate_user",
]

Orders = tuple[Order, ...]
Builder = Callable[[int, int, int], Orders]
"""(num_ranks, num_microbatches, virtual_stages) -> one order per rank."""


def naive(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """One micro-batch at a time, through all stages and back: what a model spread over devices does
    by itself.

        rank 0 | F1 .  .  B1 F2 .  .  B2
        rank 1 | .  F1 B1 .  .  F2 B2 .

    Bubble (P-1)/P for every M. Holds one micro-batch.
    """
    return tuple(
        tuple(
            Action(stage, op, microbatch)
            for microbatch in range(num_microbatches)
            for op, stages in ((Op.FORWARD, chunks), (Op.BACKWARD, chunks[::-1]))
            for stage in stages
        )
        for chunks in _looped(num_ranks, virtual_stages)
    )


def gpipe(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """All forwards, then all backwards.

        rank 0 | F1 F2 F3 .  .  B1 B2 B3
        rank 1 | .  F1 F2 F3 B1 B2 B3

    Bubble (P-1)/(M+P-1); holds all M micro-batches. Source: Huang et al., "GPipe", section 2.2,
    https://arxiv.org/abs/1811.06965.
    """
    return looped_bfs(num_ranks, num_microbatches, virtual_stages)


def looped_bfs(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """Breadth first: all micro-batches through one chunk, then through the next; backward likewise.

    Stage s is on rank s mod P. Bubble (P-1)/(V*M+P-1) for M >= P, and the fewest switches between
    chunks, which is kind to sharded weights; holds V*M activations. Source: Lamy-Poirier,
    "Breadth-First Pipeline Parallelism", section 4, https://arxiv.org/abs/2211.05953.
    """
    return tuple(
        tuple(
            Action(stage, op, microbatch)
            for op, stages in ((Op.FORWARD, chunks), (Op.BACKWARD, chunks[::-1]))
            for stage in stages
            for microbatch in range(num_microbatches)
        )
        for chunks in _looped(num_ranks, virtual_stages)
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Orders:
    """One forward, one backward: each rank starts backwards as soon as it can.

        rank 0 | F1 F2 .  B1 F3 B2 .  B3
        rank 1 | .  F1 B1 F2 B2 F3 B3

    Bubble (P-1)/(M+P-1) as GPipe's, but stage s holds only min(M, P-s) micro-batches. The flushing
    form of Narayanan et al., "PipeDream-2BW", section 3.2, https://arxiv.org/abs/2006.09503. On one
    rank with several chunks every micro-batch goes forth and back before the next.
    """
    if num_ranks == 1:
        return naive(1, num_microbatches, virtual_stages)
    return tuple(
        _alternate(
            [Action(rank, Op.FORWARD, m) for m in range(num_microbatches)],
            [Action(rank, Op.BACKWARD, m) for m in range(num_microbatches)],
            num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    )


def interleaved_1f1b(num_ranks: int, num_microbatches: int, virtual_stages: int = 2) -> Orders:
    """1F1B over V chunks per rank: a micro-batch loops V times over the ranks, so that filling
    takes 1/V of the time.

    Stage s is on rank s mod P. Micro-batches go in groups of P (the first groups take one more
    where M is no multiple): a group passes a rank's first chunk, then its second, and so on. Bubble
    (P-1)/(V*M+P-1) where M is a multiple of P; rank r holds at most (V-1)*P + 2*(P-1-r) + 1
    activations. Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", section 2.2.2, https://arxiv.org/abs/2104.04473.
    """
    if virtual_stages == 1 or num_ranks == 1:
        return one_f_one_b(num_ranks, num_microbatches, virtual_stages)
    groups = _groups(num_ranks, num_microbatches)
    orders = []
    for rank, chunks in enumerate(_looped(num_ranks, virtual_stages)):
        forwards = [Action(s, Op.FORWARD, m) for group in groups for s in chunks for m in group]
        backwards = [
            Action(s, Op.BACKWARD, m) for group in groups for s in chunks[::-1] for m in group
        ]
        warm_up = (virtual_stages - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, warm_up))
    return tuple(orders)


SCHEDULES: Mapping[str, Builder] = MappingProxyType(
    {
        "naive": naive,
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "interleaved_1f1b": interleaved_1f1b,
        "interleaved": interleaved_1f1b,
        "looped_bfs": looped_bfs,
        "zero_bubble": zero_bubble,
        "zbv": zbv,
        "dualpipev": dualpipev,
    }
)
"""Every schedule by the name that ``PipelineStrategy(schedule=...)`` takes."""

_ONE_CHUNK = frozenset({"naive", "gpipe", "1f1b", "zero_bubble"})
_TWO_CHUNKS = frozenset({"zbv", "dualpipev"})
_CANONICAL = {"interleaved": "interleaved_1f1b"}


def make_schedule(
    name_or_csv_path: str | os.PathLike[str],
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int = 1,
    strict: bool = True,
) -> Schedule:
    """Builds a schedule by name, or reads it from a CSV file, and checks it.

    Args:
        name_or_csv_path: A key of ``SCHEDULES``, or the path of a file that ends in ``.csv``.
        num_ranks: P, ranks per pipeline.
        num_microbatches: M, micro-batches per step.
        virtual_stages: V, chunks per rank. A file says itself how many; there 1 means "as in the
            file".
        strict: Refuse what a user should not ask for (``validate_user``). Without it every M >= 1
            is built (from a file: every M up to the file's), which is how a short last batch is
            run.

    Raises:
        ScheduleError: An unknown name, an illegal combination, or a file that cannot be run; legal
            values are named.

    >>> print(make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    rank 0 | 0F0 0F1     0B0     0B1
    rank 1 |     1F0 1B0 1F1 1B1
    """
    _check_positive(num_ranks, num_microbatches, virtual_stages)
    name = os.fspath(name_or_csv_path)
    if name.lower().endswith(".csv"):
        return _from_file(Path(name), num_ranks, num_microbatches, virtual_stages, strict)
    _check_chunks(name, num_ranks, virtual_stages)
    if strict:
        validate_user(name, num_ranks, num_microbatches, virtual_stages)
    orders = SCHEDULES[name](num_ranks, num_microbatches, virtual_stages)
    canonical = _CANONICAL.get(name, name)
    return Schedule(canonical, orders, num_ranks * virtual_stages, num_microbatches).check()


def validate_user(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> None:
    """Refuses what a user should not ask for, before anything starts.

    Raises:
        ScheduleError: Naming what was asked and the nearest legal values.

    >>> validate_user("interleaved_1f1b", num_ranks=2, num_microbatches=6, virtual_stages=2)
    """
    _check_positive(num_ranks, num_microbatches, virtual_stages)
    _check_chunks(name, num_ranks, virtual_stages)
    interleaved = SCHEDULES[name] is interleaved_1f1b and num_ranks > 1 and virtual_stages > 1
    if interleaved and not _is_even(num_ranks, num_microbatches):
        below = _nearest_even(num_ranks, num_microbatches, -1)
        above = _nearest_even(num_ranks, num_microbatches, +1)
        raise ScheduleError(
            f"{name} with P={num_ranks}, V={virtual_stages}, M={num_microbatches}: "
            f"{num_microbatches} micro-batches do not make even groups of at least {num_ranks}; "
            f"use num_microbatches={below} or {above}"
        )
    if (
        SCHEDULES[name] in (one_f_one_b, interleaved_1f1b)
        and not interleaved
        and num_ranks > 1
        and num_microbatches < num_ranks
    ):
        raise ScheduleError(
            f"{name} with P={num_ranks}, M={num_microbatches}: 1F1B needs at least as many "
            f"micro-batches as stages, and {num_microbatches} < {num_ranks}; use "
            f"num_microbatches={num_ranks} or more (good is {4 * num_ranks}), or "
            "schedule='gpipe', which runs with any number"
        )


def forward_only(
    placement: Sequence[int], num_microbatches: int, *, num_ranks: int | None = None
) -> Schedule:
    """The schedule of an evaluation: every micro-batch passes the segments in turn, no backward.

    Args:
        placement: ``placement[k]`` is the rank that runs segment k. Any chain: a rank may come
            again and again.
        num_microbatches: Micro-batches of the step.
        num_ranks: Ranks of the pipeline, where the last ones may run nothing; by default as many as
            placed.

    Returns:
        A schedule whose stages are the segments. A rank that could run several takes the deepest,
        which drains, or the first, which fills: whichever is over sooner.

    >>> print(forward_only([0, 1, 0], 2))
    rank 0 | 0F0 0F1 2F0 2F1
    rank 1 |     1F0 1F1
    """
    used = 1 + max(placement, default=-1)
    ranks = used if num_ranks is None else num_ranks
    if not placement or min(placement) < 0 or used > ranks or num_microbatches < 1:
        raise ScheduleError(
            f"forward_only: {len(placement)} segments on ranks {list(placement)} with "
            f"{num_microbatches} micro-batches and {ranks} ranks; at least one of each, and ranks "
            f"0..{ranks - 1}"
        )
    candidates = (
        _pipelined(placement, ranks, num_microbatches, deepest_first)
        for deepest_first in (True, False)
    )
    return min(candidates, key=_slots).check()


def _pipelined(
    placement: Sequence[int], num_ranks: int, num_microbatches: int, deepest_first: bool
) -> Schedule:
    """Slot by slot, each rank runs one of its segments whose input was there before the slot."""
    segments: dict[int, list[int]] = {}
    for segment in sorted(range(len(placement)), reverse=deepest_first):
        segments.setdefault(placement[segment], []).append(segment)
    orders: list[list[Action | None]] = [[] for _ in range(num_ranks)]
    done = [0] * len(placement)  # micro-batches that left each segment
    while done[-1] < num_microbatches:
        arrived = [num_microbatches, *done[:-1]]
        for rank, own in segments.items():
            for segment in own:
                if done[segment] < arrived[segment]:
                    orders[rank].append(Action(segment, Op.FORWARD, done[segment]))
                    done[segment] += 1
                    break
    frozen = tuple(tuple(order) for order in orders)
    return Schedule("forward_only", frozen, len(placement), num_microbatches)


def _slots(schedule: Schedule) -> int:
    """How long the schedule takes if every action takes one slot."""
    return max(len(row) for row in schedule.aligned().orders)


def _looped(num_ranks: int, virtual_stages: int) -> list[list[int]]:
    """The stages of each rank, ascending: stage s is on rank s mod P."""
    return [list(range(rank, num_ranks * virtual_stages, num_ranks)) for rank in range(num_ranks)]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> Order:
    """``warm_up`` forwards, then one forward and one backward in turn, then the backwards that are
    left."""
    order = forwards[:warm_up]
    steady = forwards[warm_up:]
    for forward, backward in zip(steady, backwards, strict=False):
        order += (forward, backward)
    return (*order, *backwards[len(steady) :])


def _groups(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches in floor(M/P) groups (one at least) whose sizes differ by one at most, larger
    ones first.

    Larger first keeps the last rank alive: the warm-up is measured by the first group.
    """
    rounds = max(1, num_microbatches // num_ranks)
    size, larger = divmod(num_microbatches, rounds)
    starts = [group * size + min(group, larger) for group in range(rounds + 1)]
    return [range(starts[group], starts[group + 1]) for group in range(rounds)]


def _is_even(num_ranks: int, num_microbatches: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def _nearest_even(num_ranks: int, num_microbatches: int, direction: int) -> int:
    """The next legal M of interleaved 1F1B in one direction; 1 and all multiples of P are legal, so
    there is one."""
    while not _is_even(num_ranks, num_microbatches):
        num_microbatches += direction
    return num_microbatches


def _check_positive(num_ranks: int, num_microbatches: int, virtual_stages: int) -> None:
    if min(num_ranks, num_microbatches, virtual_stages) < 1:
        raise ScheduleError(
            f"P={num_ranks} ranks, M={num_microbatches} micro-batches, V={virtual_stages} chunks "
            "per rank: each must be 1 at least"
        )


def _check_chunks(name: str, num_ranks: int, virtual_stages: int) -> None:
    """The name is known and allows this V."""
    if name not in SCHEDULES:
        close = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f", did you mean {close[0]!r}? Legal" if close else "; legal"
        raise ScheduleError(
            f"schedule={name!r} is unknown{hint} are {', '.join(SCHEDULES)}, or the path of "
            "a .csv file"
        )
    if name in _TWO_CHUNKS and virtual_stages != 2:
        raise ScheduleError(
            f"{name} with V={virtual_stages}: its stages lie in a V over the ranks, there and "
            "back; use virtual_stages=2"
        )
    if name in _ONE_CHUNK and virtual_stages != 1 and num_ranks != 1:
        raise ScheduleError(
            f"{name} with P={num_ranks}, V={virtual_stages}: one stage per rank is what this "
            "schedule has; use virtual_stages=1, or schedule='interleaved_1f1b' or 'looped_bfs' "
            "for several"
        )


def _from_file(
    path: Path, num_ranks: int, num_microbatches: int, virtual_stages: int, strict: bool
) -> Schedule:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"schedule={str(path)!r}: the file cannot be read ({error})") from error
    schedule = Schedule.from_csv(text, path.name)
    if schedule.num_ranks != num_ranks:
        raise ScheduleError(
            f"{path.name}: the file has {schedule.num_ranks} ranks (lines), but the pipeline has "
            f"{num_ranks}"
        )
    if virtual_stages not in (1, schedule.num_stages / num_ranks):
        raise ScheduleError(
            f"{path.name}: the file has {schedule.num_stages} stages on {num_ranks} ranks, but "
            f"virtual_stages={virtual_stages}; leave virtual_stages out"
        )
    if num_microbatches > schedule.num_microbatches or (
        strict and num_microbatches != schedule.num_microbatches
    ):
        raise ScheduleError(
            f"{path.name}: the file has {schedule.num_microbatches} micro-batches, but "
            f"{num_microbatches} were asked for; use num_microbatches={schedule.num_microbatches}"
        )
    if num_microbatches < schedule.num_microbatches:
        schedule = schedule.keep_microbatches(num_microbatches)
    return schedule.check()
