"""What is wrong with a schedule that cannot be run: the rank, the step and the action to blame.

The rules behind ``Schedule.check``; called from ``ir.py`` only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_pipe.errors import ScheduleError

if TYPE_CHECKING:
    from lightning_pipe.planning.ir import Schedule

__all__ = ["check_actions", "check_complete", "deadlock"]

_SHOWN = 16  # stuck ranks that an error lists


def check_actions(schedule: Schedule) -> None:
    """Every action is in range, is there once, and is on the one rank of its stage."""
    rank_of: dict[int, int] = {}
    seen: dict[tuple[int, str, int], int] = {}
    limits = f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches"
    for rank, order in enumerate(schedule.orders):
        for step, action in enumerate(order):
            if action is None:
                continue
            fault = None
            key = (action.stage, action.op, action.microbatch)
            if not (
                0 <= action.stage < schedule.num_stages
                and 0 <= action.microbatch < schedule.num_microbatches
            ):
                fault = f"is out of range; there are {limits}"
            elif rank_of.setdefault(action.stage, rank) != rank:
                fault = f"runs stage {action.stage}, which is on rank {rank_of[action.stage]}"
            elif key in seen:
                fault = f"is repeated; it is already at step {seen[key]}"
            if fault is not None:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank}, step {step}: {action} {fault}",
                    rank=rank,
                    step=step,
                    action=str(action),
                )
            seen[key] = step


def check_complete(schedule: Schedule) -> None:
    """Every (stage, micro-batch) has its F and, when training, its B or its I and W."""
    found: dict[tuple[int, int], str] = defaultdict(str)
    rank_of: dict[int, int] = {}
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            found[action.stage, action.microbatch] += action.op.value
            rank_of[action.stage] = rank
    legal = {"BF", "FIW"} if schedule.has_backward else {"F"}
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            ops = "".join(sorted(found[stage, microbatch]))
            if ops not in legal:
                raise _incomplete(schedule, rank_of.get(stage), (stage, microbatch), ops)


def _incomplete(
    schedule: Schedule, rank: int | None, where: tuple[int, int], ops: str
) -> ScheduleError:
    """The error for a (stage, micro-batch) that has only ``ops``, or too many."""
    stage, microbatch = where
    op = "F" if "F" not in ops else {"FI": "W", "FW": "I"}.get(ops, "B")
    text, step = f"{stage}{op}{microbatch}", None
    wanted = "F and either B or I and W" if schedule.has_backward else "F"
    if "B" in ops and op == "B":
        text = f"{stage}{'I' if 'I' in ops else 'W'}{microbatch}"
        fault = f"{text} is a second backward beside {stage}B{microbatch}"
        assert rank is not None, "a stage with actions has a rank"
        step = [str(action) for action in schedule.orders[rank]].index(text)
    elif rank is None:
        fault = f"{text} is missing, no rank has stage {stage}"
    else:
        fault = f"{text} is missing"
        step = len(schedule.orders[rank])
    place = "" if rank is None else f"rank {rank}, step {step}: "
    return ScheduleError(
        f"{schedule.name}: {place}{fault}; stage {stage} needs {wanted} of micro-batch "
        f"{microbatch}, got {' '.join(ops) or 'nothing'}",
        rank=rank,
        step=step,
        action=text,
    )


def deadlock(schedule: Schedule, steps: list[int]) -> ScheduleError:
    """The error for orders that wait for each other, from the step at which each rank is stuck.

    The blame is on a rank that goes backward before its own forward, or waits for itself in some
    other way, if there is one.
    """
    stuck: list[tuple[bool, int, int, str, str]] = []
    rank_of = schedule.stage_to_rank
    for rank, step in enumerate(steps):
        action = schedule.orders[rank][step] if step < len(schedule.orders[rank]) else None
        if action is None:
            continue
        needed = schedule.needs(action)
        assert needed is not None, "only an action that waits can be stuck"
        stage, microbatch = divmod(max(needed, -1 - needed), schedule.num_microbatches)
        value = f"input gradient of {stage}B" if needed < 0 else f"output of {stage}F"
        waits = f"{action} waits for the {value}{microbatch} on rank {rank_of[stage]}"
        own = f"{action.stage}F{action.microbatch}"
        alone = rank_of[stage] == rank or own in map(str, schedule.orders[rank][step + 1 :])
        stuck.append((not alone, rank, step, str(action), waits))
    _, rank, step, text, _ = min(stuck)
    lines = [
        f"rank {at}, step {when}: {waits}{'  <-- ERROR HERE' if at == rank else ''}"
        for _, at, when, _, waits in stuck[:_SHOWN]
    ]
    return ScheduleError(
        f"{schedule.name}: deadlock at rank {rank}, step {step}, action {text}; the ranks wait for "
        "each other for ever:\n  " + "\n  ".join(lines),
        rank=rank,
        step=step,
        action=text,
    )
