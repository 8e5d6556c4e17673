"""Schedules that split the backward: I (input gradient), which the previous stage waits for, and W
(weight gradient), which nobody waits for and which therefore fills what would be idle.

Each builder takes (P ranks, M micro-batches, V chunks per rank) and returns one order per rank,
complete and free of deadlock for every M >= 1. The V-shaped ones are written for many
micro-batches; for fewer, the actions of micro-batches that do not exist are left out, which cannot
make anybody wait longer.
"""

from __future__ import annotations

from collections import deque

from lightning_pipe.planning.ir import Action, Op, Order

__all__ = ["dualpipev", "zbv", "zero_bubble"]


def zero_bubble(
    num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[Order, ...]:
    """ZB-H1: 1F1B with W put off, so that I arrives a stage earlier; later ranks put off more.

        rank 0 | F1 F2 .  I1 W1 F3 I2 W2 .  I3 W3
        rank 1 | .  F1 I1 F2 I2 W1 F3 I3 W2 W3

    Bubble (P-1)(F+I-W) of time per rank: about a third of 1F1B's where F = I = W. Every rank holds
    at most P micro-batches (as the first rank of 1F1B): P-r that wait for I, and r that wait for W.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", section 2.3.1,
    https://arxiv.org/abs/2401.10241.
    """
    if num_ranks == 1:
        return (_one_rank(num_microbatches, virtual_stages),)
    orders = []
    for rank in range(num_ranks):
        warm_up = min(num_microbatches, num_ranks - 1 - rank)
        order = [Action(rank, Op.FORWARD, m) for m in range(warm_up)]
        weights = 0
        for microbatch in range(num_microbatches):
            if warm_up + microbatch < num_microbatches:
                order.append(Action(rank, Op.FORWARD, warm_up + microbatch))
            order.append(Action(rank, Op.INPUT, microbatch))
            draining = warm_up + microbatch >= num_microbatches
            if microbatch >= rank or draining:
                order.append(Action(rank, Op.WEIGHT, weights))
                weights += 1
        order += (Action(rank, Op.WEIGHT, m) for m in range(weights, num_microbatches))
        orders.append(tuple(order))
    return tuple(orders)


def _one_rank(num_microbatches: int, num_chunks: int) -> Order:
    order: list[Action] = []
    for microbatch in range(num_microbatches):
        order += (Action(stage, Op.FORWARD, microbatch) for stage in range(num_chunks))
        for stage in reversed(range(num_chunks)):
            order += (Action(stage, Op.INPUT, microbatch), Action(stage, Op.WEIGHT, microbatch))
    return tuple(order)


def zbv(num_ranks: int, num_microbatches: int, virtual_stages: int = 2) -> tuple[Order, ...]:
    """ZB-V: two chunks per rank in a V (rank r holds stages r and 2P-1-r), so the first rank has
    the loss as well.

    No bubble but the fill of P-1 forwards where F = I = W, with the memory of 1F1B: at most 2P
    half-sized activations per rank. Source: Qi et al., "Zero Bubble Pipeline Parallelism", section
    6, https://arxiv.org/abs/2401.10241, and "Pipeline Parallelism with Controllable Memory",
    https://arxiv.org/abs/2405.15362.
    """
    assert virtual_stages == 2, "a V has two arms"
    built = max(num_microbatches, 2 * num_ranks)
    return tuple(
        _without(_zbv_order(rank, num_ranks, built), num_microbatches) for rank in range(num_ranks)
    )


def _zbv_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    todo = _VShape(rank, num_ranks)
    todo.run("F0", 2 * (num_ranks - rank) - 1)
    todo.run("F1 F0", rank)
    todo.run("F1 I1 W1", num_ranks - rank)
    started = 2 * num_ranks - 1 - rank  # forwards of chunk 0 so far
    todo.run("F0 I0 W0 F1 I1 W1", num_microbatches - started)
    todo.run("I0 W0 F1 I1 W1", started - num_ranks)
    todo.run("I0 I1", rank)
    todo.run("I0 W0", num_ranks - rank)
    return todo.finish(num_microbatches)


def dualpipev(num_ranks: int, num_microbatches: int, virtual_stages: int = 2) -> tuple[Order, ...]:
    """DualPipeV: the V placement of ZB-V, where in the steady state a forward of one chunk is next
    to a full backward of the other, so that the communication of one hides behind the other.

    Only the fill and the drain split the backward. Holds at most 2P+1 half-sized activations per
    rank. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.2.1,
    https://arxiv.org/abs/2412.19437, and its V-shaped half in
    https://github.com/deepseek-ai/DualPipe (steps 1 to 8 below).
    """
    assert virtual_stages == 2, "a V has two arms"
    built = max(num_microbatches, 2 * num_ranks)
    return tuple(
        _without(_dualpipev_order(rank, num_ranks, built), num_microbatches)
        for rank in range(num_ranks)
    )


def _dualpipev_order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    after = num_ranks - 1 - rank
    todo = _VShape(rank, num_ranks)
    todo.run("F0", 2 * after)  # step 1
    todo.run("F0 F1", rank + 1)  # step 2
    todo.run("I1 W1 F1", after)  # step 3
    todo.run("F0 B1 F1 B0", num_microbatches - 2 * num_ranks + rank + 1)  # step 4, the steady state
    todo.run("B1 F1 B0", after)  # step 5
    full = (rank + 1) // 2  # step 6: the second half splits the backward
    todo.run("B1 B0", full)
    if rank % 2 == 0:
        todo.run("B1 I0", 1)
        full += 1
    todo.run("I1 I0", rank + 1 - full)
    todo.run("W I0", after)  # step 7
    return todo.finish(num_microbatches)  # step 8


class _VShape:
    """The order of one rank of a V, written in patterns of op and chunk; counts the micro-batches
    itself.

    ``F0`` is the next forward of the rank's first chunk, ``W1`` the oldest W that chunk 1 owes,
    ``W`` the oldest of both.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._next_forward = [0, 0]
        self._next_backward = [0, 0]
        self._owed: deque[tuple[int, int]] = deque()  # (chunk, micro-batch) whose W is to come
        self._order: list[Action] = []

    def run(self, pattern: str, times: int) -> None:
        for _ in range(times):
            for entry in pattern.split():
                self._append(Op(entry[0]), int(entry[1:]) if entry[1:] else None)

    def finish(self, num_microbatches: int) -> list[Action]:
        """Pays the W that are owed, chunk 1 first, and returns the order."""
        while self._owed:
            self._append(Op.WEIGHT, None)
        assert self._next_backward == [num_microbatches] * 2, "every forward has its backward"
        return self._order

    def _append(self, op: Op, chunk: int | None) -> None:
        if op is Op.WEIGHT:
            owed = next(entry for entry in self._owed if chunk is None or entry[0] == chunk)
            self._owed.remove(owed)
            chunk, microbatch = owed
        else:
            assert chunk is not None, "only W may leave its chunk open"
            counts = self._next_forward if op is Op.FORWARD else self._next_backward
            microbatch = counts[chunk]
            counts[chunk] += 1
            if op is Op.INPUT:
                self._owed.append((chunk, microbatch))
        self._order.append(Action(self._stages[chunk], op, microbatch))


def _without(order: list[Action], num_microbatches: int) -> Order:
    return tuple(action for action in order if action.microbatch < num_microbatches)
