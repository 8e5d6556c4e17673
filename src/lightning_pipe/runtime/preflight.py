"""Proves, before anything is sent, that what the ranks are about to do comes to an end.

A schedule is checked where it is made (`Schedule.check`), but what runs is its lowered form, with
sends and receives, which another package makes. So the very actions that will run are walked
through: each send has its receive and each pair of ranks has its messages in one order; each action
has what it needs; and even if every send and every receive waits for its other side, as NCCL's may,
no rank waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.runtime._torch import Deed

Thing = tuple[str, int, int, Op]
"""Whether it was received or made, by or for which stage, of which micro-batch, and what it is."""

Message = tuple[int, int, Op]
"""The stage that sends, the micro-batch, and what is sent."""


def check_deeds(schedule: Schedule, deeds: Mapping[int, Sequence[Deed]]) -> None:
    """Walks through what all ranks will do.

    Args:
        schedule: What was lowered.
        deeds: What each rank does, in its order.

    Raises:
        ScheduleError: With the rank, the step and the action at fault.
    """
    for rank in range(schedule.num_ranks):
        own = deeds.get(rank, ())
        computed = [d for d in own if d.kind == "compute"]
        wanted = [(a.stage, a.microbatch, a.op) for a in schedule.actions(rank)]
        if [(d.stage, d.microbatch, d.op) for d in computed] != wanted:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} would not run the actions of the schedule in its "
                f"order: {_first_difference(list(map(str, computed)), _texts(schedule, rank))}",
                rank=rank,
            )
        _check_needs(schedule, rank, own)
    _check_pairs(schedule, deeds)
    _walk(schedule, deeds)


def _check_needs(schedule: Schedule, rank: int, own: Sequence[Deed]) -> None:
    """Each action has received what it needs, and what is sent was made before."""
    there: set[Thing] = set()
    for step, deed in enumerate(own):
        stage, microbatch, op = deed.stage, deed.microbatch, deed.op
        needed = _needs(schedule, rank, deed)
        if needed is not None and needed not in there:
            raise ScheduleError(
                f"{schedule.name}: rank {rank}, step {step}: the {deed} comes before what it needs",
                rank=rank,
                step=step,
                action=str(deed),
            )
        if deed.kind == "receive":
            there.add(("got", stage, microbatch, op))
        elif deed.kind == "compute":
            there.add(("made", stage, microbatch, Op.INPUT if op is Op.BACKWARD else op))


def _needs(schedule: Schedule, rank: int, deed: Deed) -> Thing | None:
    """What has to be on a rank before a deed."""
    stage, microbatch, op = deed.stage, deed.microbatch, deed.op
    if deed.kind == "receive" or op is Op.WEIGHT:
        return None
    if deed.kind == "send":
        return "made", stage, microbatch, Op.FORWARD if op is Op.FORWARD else Op.INPUT
    source, made = (stage - 1, op) if op is Op.FORWARD else (stage + 1, Op.INPUT)
    if source < 0:
        return None
    if source == schedule.num_stages:
        return "made", stage, microbatch, Op.FORWARD
    if schedule.stage_to_rank[source] == rank:
        return "made", source, microbatch, made
    return "got", stage, microbatch, Op.FORWARD if op is Op.FORWARD else Op.BACKWARD


def _check_pairs(schedule: Schedule, deeds: Mapping[int, Sequence[Deed]]) -> None:
    """Any two ranks have the messages between them in the same order: they have no names."""
    seen: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for rank, own in deeds.items():
        for deed in own:
            if deed.kind != "compute":
                message, peer = _message(schedule, deed)
                seen[rank, peer].append(message)
    for (rank, peer), messages in seen.items():
        others = seen.get((peer, rank), [])
        if messages != others:
            raise ScheduleError(
                f"{schedule.name}: ranks {rank} and {peer} would not exchange the same messages in "
                f"the same order: {_first_difference(_told(messages), _told(others))}",
                rank=rank,
            )


def _walk(schedule: Schedule, deeds: Mapping[int, Sequence[Deed]]) -> None:
    """Every rank comes to its end, though each message waits for both of its sides."""
    steps = dict.fromkeys(deeds, 0)
    offered: set[tuple[int, Message]] = set()
    runnable = list(deeds)
    while runnable:
        rank = runnable.pop()
        own = deeds[rank]
        while steps[rank] < len(own):
            deed = own[steps[rank]]
            if deed.kind != "compute":
                message, peer = _message(schedule, deed)
                if (peer, message) not in offered:
                    offered.add((rank, message))
                    break
                offered.remove((peer, message))
                steps[peer] += 1
                runnable.append(peer)
            steps[rank] += 1
    for rank, step in steps.items():
        if step < len(deeds[rank]):
            deed = deeds[rank][step]
            raise ScheduleError(
                f"{schedule.name}: deadlock at rank {rank}, step {step}: the {deed} waits for ever",
                rank=rank,
                step=step,
                action=str(deed),
            )


def _message(schedule: Schedule, deed: Deed) -> tuple[Message, int]:
    """What is sent by a deed, named alike on both sides, and the rank on the other side."""
    towards = 1 if deed.op is Op.FORWARD else -1
    other = deed.stage + (towards if deed.kind == "send" else -towards)
    sender = deed.stage if deed.kind == "send" else other
    return (sender, deed.microbatch, deed.op), schedule.stage_to_rank[other]


def _told(messages: Sequence[Message]) -> list[str]:
    return [f"{stage}{op.value}{microbatch}" for stage, microbatch, op in messages]


def _texts(schedule: Schedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.actions(rank)]


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    for place, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return f"the {place + 1}. is {left} and {right}"
    return f"there are {len(one)} and {len(other)}"
