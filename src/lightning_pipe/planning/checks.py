"""What is wrong with a schedule that cannot be run: the rank, the step and the action to blame.

The rules behind ``Schedule.check``; called from ``ir.py`` only.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from lightning_pipe.errors import ScheduleError

if TYPE_CHECKING:
    from lightning_pipe.planning.ir import Action, Schedule

__all__ = ["check_actions", "check_complete", "deadlock"]


def check_actions(schedule: Schedule) -> None:
    """Every action is in range, is there once, and is on the one rank of its stage."""
    rank_of: dict[int, int] = {}
    seen: dict[tuple[int, str, int], tuple[int, int]] = {}
    limits = f"{schedule.num_stages} stages and {schedule.num_microbatches} micro-batches"
    for rank, order in enumerate(schedule.orders):
        for step, action in enumerate(order):
            if action is None:
                continue
            fault = None
            key = (action.stage, action.op.value, action.microbatch)
            if not (
                0 <= action.stage < schedule.num_stages
                and 0 <= action.microbatch < schedule.num_microbatches
            ):
                fault = f"is out of range; there are {limits}"
            elif rank_of.setdefault(action.stage, rank) != rank:
                fault = f"runs stage {action.stage}, which is on rank {rank_of[action.stage]}"
            elif key in seen:
                fault = f"is repeated; it is already at step {seen[key][1]}"
            if fault is not None:
                raise ScheduleError(
                    f"{schedule.name}: rank {rank}, step {step}: {action} {fault}",
                    rank=rank,
                    step=step,
                    action=str(action),
                )
            seen[key] = rank, step


def check_complete(schedule: Schedule) -> None:
    """Every (stage, micro-batch) has its F and, when training, its B or its I and W."""
    found: dict[tuple[int, int], str] = defaultdict(str)
    for rank in range(schedule.num_ranks):
        for action in schedule.actions(rank):
            found[action.stage, action.microbatch] += action.op.value
    legal = {"BF", "FIW"} if schedule.has_backward else {"F"}
    rank_of = schedule.stage_to_rank
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            ops = found[stage, microbatch]
            if "".join(sorted(ops)) not in legal:
                raise _incomplete(schedule.name, rank_of[stage], stage, microbatch, ops, legal)


def _incomplete(
    name: str, rank: int, stage: int, microbatch: int, ops: str, legal: set[str]
) -> ScheduleError:
    if "F" not in ops:
        fault, op = "is missing", "F"
    elif "B" in ops:
        fault, op = "is a second backward beside B", "I" if "I" in ops else "W"
    elif "I" in ops:
        fault, op = "is missing", "W"
    elif "W" in ops:
        fault, op = "is missing", "I"
    else:
        fault, op = "is missing", "B"
    wanted = "F and either B or I and W" if len(legal) > 1 else "F"
    where = f"rank {rank}" if rank >= 0 else "no rank"
    return ScheduleError(
        f"{name}: {where}: {stage}{op}{microbatch} {fault}; stage {stage} needs {wanted} of "
        f"micro-batch {microbatch}, got {' '.join(ops) or 'nothing'}",
        rank=rank if rank >= 0 else None,
        action=f"{stage}{op}{microbatch}",
    )


def deadlock(schedule: Schedule, steps: list[int]) -> ScheduleError:
    """The error for orders that wait for each other; the blame is on a rank that waits for itself,
    if there is one."""
    stuck: list[tuple[bool, int, int, Action, str]] = []
    rank_of = schedule.stage_to_rank
    for rank, step in enumerate(steps):
        action = schedule.orders[rank][step] if step < len(schedule.orders[rank]) else None
        if action is None:
            continue
        needed = schedule.needs(action)
        assert needed is not None, "only an action that waits can be stuck"
        backward = needed < 0
        stage, microbatch = divmod(-1 - needed if backward else needed, schedule.num_microbatches)
        value = "input gradient" if backward else "output"
        source = f"the {value} of {stage}{'B' if backward else 'F'}{microbatch}"
        waits = f"rank {rank}, step {step}: {action} waits for {source} on rank {rank_of[stage]}"
        stuck.append((rank_of[stage] != rank, rank, step, action, waits))
    _, rank, step, action, _ = min(stuck, key=lambda entry: entry[:3])
    lines = [f"{waits}{'  <-- ERROR HERE' if at == rank else ''}" for _, at, _, _, waits in stuck]
    return ScheduleError(
        f"{schedule.name}: deadlock at rank {rank}, step {step}, action {action}; every rank that "
        "is "
        "left waits for one that does not come:\n  " + "\n  ".join(lines),
        rank=rank,
        step=step,
        action=str(action),
    )
