"""Who is who: this process, its place in its pipeline, and the groups that it talks through.

A rank is a position in a pipeline. The position of the last stage is the first global rank of the
pipeline, so the process that owns the logger and the progress bar is the one that sees the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from lightning_pipe.errors import ConfigError, PeerError
from lightning_pipe.runtime.axes import DATA, ORDER, PIPELINE, TENSOR, Axes

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Talk:
    """Where this rank is in its meetings with the others; `meeting` reads and writes it.

    Attributes:
        answer: What gives this rank's answer to a question of another.
        depth: Meetings that this rank is in, one within the other.
        place: What it waits for now; empty if for nothing.
        since_s: Since when.
        requests: What this rank was asked from outside, by a signal, as bits.
        heard: What any rank was asked before the last meeting; the same on all.
        obey: What does what was heard, on all ranks together: given whether this is between two
            training batches.
    """

    answer: Callable[[Any], Any] | None = None
    depth: int = 0
    place: str = ""
    since_s: float = field(default_factory=time.monotonic)
    requests: int = 0
    heard: int = 0
    obey: Callable[[bool], None] | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process's view of the job; made by `make_ranks`.

    Attributes:
        world_size: Processes of the job.
        global_rank: This process.
        position: This process's rank in its pipeline.
        num_positions: Ranks of a pipeline.
        order: `order[position]` is the process of that position, counted within the pipeline.
        pipeline_group: For tensors between stages; None if there is one rank.
        control_group: A gloo group of the same processes, for objects; None if there is one rank.
        axes: Which processes belong together.
        first_global_rank: The process of this pipeline that holds the last stage.
        copies: The processes that have this position in all copies of the pipeline, seen as ranks
            of a pipeline themselves, so that they can share and meet; None if there is one copy.
        tensor: Those that share the tensors of this stage, as well; None if there is one.
        called: What one of these ranks is called in messages.
        axis: The axis along which the ranks are.
        talk: Where this rank is in its meetings with the others.
    """

    world_size: int
    global_rank: int
    position: int
    num_positions: int
    order: tuple[int, ...]
    pipeline_group: dist.ProcessGroup | None = None
    control_group: dist.ProcessGroup | None = None
    axes: Axes = field(default_factory=Axes)
    first_global_rank: int = 0
    copies: Ranks | None = None
    tensor: Ranks | None = None
    called: str = "rank"
    axis: str = PIPELINE
    talk: Talk = field(default_factory=Talk, compare=False, repr=False)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of its pipeline."""
        return self.global_rank == self.first_global_rank

    @property
    def reads(self) -> bool:
        """Whether this process reads the data for its copy of the pipeline."""
        return self.is_first and not self.tensor_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Copies of the pipeline."""
        return self.axes.data_parallel

    @property
    def data_parallel_rank(self) -> int:
        """The copy that this process belongs to."""
        return self.axes.place(DATA, self.global_rank)

    @property
    def tensor_parallel_rank(self) -> int:
        """Which of the processes that share the tensors of a stage this is."""
        return self.axes.place(TENSOR, self.global_rank)

    @property
    def is_spare(self) -> bool:
        """Whether a process of another copy, or another part of it, has what this one has."""
        return bool(self.data_parallel_rank or self.tensor_parallel_rank)

    @property
    def sharers(self) -> Ranks | None:
        """The processes that may hold other parts of this one's weights: where a stage is shared,
        they are not divided over the copies as well."""
        return self.tensor or self.copies

    @property
    def others(self) -> tuple[Ranks, ...]:
        """The processes that have this position in other pipelines, axis by axis."""
        return tuple(ranks for ranks in (self.copies, self.tensor) if ranks is not None)

    @property
    def first_position(self) -> int:
        """The position of that process."""
        return self.order.index(0)

    def global_rank_of(self, position: int) -> int:
        """The process that has a position in this pipeline."""
        return self.first_global_rank + self.axes.stride(self.axis) * self.order[position]

    def position_of(self, global_rank: int) -> int:
        """The position that a process has among such ranks, in its own pipeline."""
        return self.order.index(self.axes.place(self.axis, global_rank))

    def __str__(self) -> str:
        return f"{self.called} {self.position} (global rank {self.global_rank})"


def rank_order(stage_to_rank: Sequence[int], num_positions: int) -> tuple[int, ...]:
    """Assigns the positions of a pipeline to its processes so that the last stage is on process 0.

    >>> rank_order([0, 1, 2], 3)  # a loop: stage s is on process P-1-s
    (2, 1, 0)
    >>> rank_order([0, 1, 1, 0], 2)  # a V ends where it began
    (0, 1)
    """
    last = stage_to_rank[-1]
    if last == num_positions - 1:
        return tuple(range(num_positions - 1, -1, -1))
    return tuple((position - last) % num_positions for position in range(num_positions))


def make_ranks(
    stage_to_rank: Sequence[int],
    num_positions: int,
    *,
    data_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    mesh_order: tuple[str, ...] = ORDER,
) -> Ranks:
    """Makes the groups of all pipelines; every process of the job has to call this.

    Args:
        stage_to_rank: The position that holds each stage (`Schedule.stage_to_rank`).
        num_positions: Ranks of a pipeline.
        data_parallel_size: Copies of the pipeline.
        tensor_parallel_size: Processes that share the tensors of a stage.
        mesh_order: The axes; neighbours along the last one are neighbours in global rank.

    Returns:
        The view of this process. Without a process group, that of the only process.
    """
    initialized = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if initialized else 1
    global_rank = dist.get_rank() if initialized else 0
    axes = Axes(num_positions, data_parallel_size, tensor_parallel_size, mesh_order)
    if axes.num_ranks != world_size:
        raise ConfigError(
            f"{axes}: {axes.num_ranks} processes are needed and {world_size} were started; their "
            "product must be the number of devices"
        )
    common: dict[str, Any] = {"world_size": world_size, "global_rank": global_rank, "axes": axes}
    along: dict[str, dict[str, Any]] = {}
    for axis in (PIPELINE, DATA, TENSOR):
        for_tensors, for_objects = _groups(axes.lines(axis))
        along[axis] = {
            **common,
            "axis": axis,
            "num_positions": axes.size(axis),
            "pipeline_group": for_tensors,
            "control_group": for_objects,
            "first_global_rank": axes.first(axis, global_rank),
        }

    def others(axis: str, called: str) -> Ranks | None:
        if axes.size(axis) == 1:
            return None
        order = tuple(range(axes.size(axis)))
        place = axes.place(axis, global_rank)
        return Ranks(**along[axis], position=place, order=order, called=called)

    order = rank_order(stage_to_rank, num_positions)
    return Ranks(
        **along[PIPELINE],
        position=order.index(axes.place(PIPELINE, global_rank)),
        order=order,
        copies=others(DATA, "copy"),
        tensor=others(TENSOR, "tensor rank"),
    )


def _groups(
    members: Sequence[Sequence[int]],
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The groups of this process for tensors and for objects; None where it would be alone.

    All processes take part in making all groups, also those that they are not in.
    """
    own: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
    if len(members[0]) == 1:
        return own
    for ranks in members:
        for_tensors = dist.new_group(list(ranks))
        for_objects = dist.new_group(list(ranks), backend="gloo")
        if dist.get_rank() in ranks:
            own = for_tensors, for_objects
    return own


@contextmanager
def connected(ranks: Ranks) -> Iterator[None]:
    """Talks to other ranks within the body.

    Raises:
        PeerError: One of them has gone; torch's words for it do not say that it failed.
    """
    try:
        yield
    except RuntimeError as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
        if not where.startswith("torch.distributed."):
            raise
        waits = f" where this one {ranks.talk.place}" if ranks.talk.place else ""
        raise PeerError(
            f"{ranks}: a connection to another rank broke{waits}; the reason is in that rank's "
            f"output. Here: {error}"
        ) from error


@contextmanager
def waiting(ranks: Ranks, text: str) -> Iterator[None]:
    """Notes that this rank waits for the others within the body, unless it is known to already.

    Args:
        ranks: This rank.
        text: Where, as the end of "rank 0 ...".
    """
    talk = ranks.talk
    if talk.place:
        talk.since_s = time.monotonic()
        yield
        return
    talk.place, talk.since_s = text, time.monotonic()
    try:
        yield
    finally:
        talk.place = ""


def talks(function: Callable[Concatenate[Ranks, P], R]) -> Callable[Concatenate[Ranks, P], R]:
    """Makes a function whose first argument is this rank run :func:`connected`, and be known to
    wait for others."""
    text = f"exchanges objects ({function.__name__})"

    @wraps(function)
    def talking(ranks: Ranks, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with waiting(ranks, text), connected(ranks):
            return function(ranks, *args, **kwargs)

    return talking
