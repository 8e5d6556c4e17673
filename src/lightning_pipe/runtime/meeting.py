"""All ranks of a pipeline at one place of their program; else an error that says who is where.

Collectives pair by their order. Without a check, a rank that saves a checkpoint alone would give
its sizes to another that waits for a batch, or wait for it until the timeout. So before a
collective that follows code of the user, all ranks meet: they compare the name of the place. This
costs one small message. A rank that needs something of the others while they are elsewhere (a
weight, in a hook that one rank alone runs) asks, and those who wait at a place answer and wait on.
A signal reaches one rank or all, at any time; what it asks for goes with these messages, so that
all ranks do it at one place.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from operator import and_, or_
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipe.errors import MeetingError
from lightning_pipe.runtime import share
from lightning_pipe.runtime.ranks import Ranks, connected, waiting
from lightning_pipe.runtime.where import users_line

Item = tuple[int, Hashable]
"""The position that knows something, and what it is asked."""

#: what several of them are called
PLURAL = {"rank": "ranks", "copy": "copies", "tensor rank": "tensor ranks"}


def meet(ranks: Ranks, place: str, flag: int = 0) -> list[int]:
    """Waits until all ranks are at this place; meanwhile answers those that ask something.

    Args:
        ranks: This rank.
        place: What this rank is about to do, as the end of "rank 0 ...".
        flag: A number for the others.

    Returns:
        The flags of all ranks, by position.

    Raises:
        MeetingError: Other ranks are at another place; on all ranks.
    """
    if ranks.num_positions == 1 or ranks.talk.depth:
        ranks.talk.heard |= ranks.talk.requests
        return [flag]
    with waiting(ranks, place), connected(ranks):
        while True:
            headers = _exchange(ranks, is_question=False, text=place, flag=flag)
            if not any(header[0] for header in headers):
                break
            _answer(ranks, headers, None)
    if len({header[1] for header in headers}) > 1:
        _raise_apart(ranks, place)
    for header in headers:
        ranks.talk.heard |= header[3]
    return [header[2] for header in headers]


def meet_everywhere(ranks: Ranks, place: str, flag: int = 0) -> list[int]:
    """Waits until all ranks of all pipelines are at this place.

    Args:
        ranks: This rank.
        place: As for :func:`meet`.
        flag: Some bits for the others, less than 2 ** 16.

    Returns:
        Flags in which each bit is set if it is set on any, or on all, ranks of a line: those of all
        ranks, as far as `any` and `all` of a bit can tell.
    """
    flags = meet(ranks, place, flag)
    for others in ranks.others:
        some, every = reduce(or_, flags), reduce(and_, flags)
        others.talk.requests, others.talk.heard = ranks.talk.heard, 0
        told = meet(others, place, some << 16 | every)
        ranks.talk.heard |= others.talk.heard
        flags = [found for both in told for found in (both >> 16, both & 0xFFFF)]
    return flags


def together(everywhere: bool) -> Callable[..., Any]:
    """:func:`meet_everywhere`, or :func:`meet`."""
    return meet_everywhere if everywhere else meet


@contextmanager
def at(ranks: Ranks, place: str) -> Iterator[None]:
    """Meets, and lets this rank do within the body what needs no further meeting."""
    meet(ranks, place)
    ranks.talk.depth += 1
    try:
        with waiting(ranks, place), connected(ranks):
            yield
    finally:
        ranks.talk.depth -= 1


@contextmanager
def everywhere(ranks: Ranks, place: str) -> Iterator[None]:
    """As :func:`at`, for all ranks of all pipelines."""
    with ExitStack() as stack:
        for met in (ranks, *ranks.others):
            stack.enter_context(at(met, place))
        yield


def ask(ranks: Ranks, items: Sequence[Item]) -> dict[Item, Any]:
    """Asks others; they answer where they ask something themselves, or meet.

    Raises:
        Exception: What the one who was asked could not answer with.
    """
    if ranks.num_positions == 1:
        answers = {item: _own_answer(ranks, item[1]) for item in items}
    else:
        with waiting(ranks, f"asks for {items[0][1]}"), connected(ranks):
            headers = _exchange(ranks, is_question=True, text=repr(tuple(items)), flag=0)
            answers = _answer(ranks, headers, tuple(items))
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return answers


def _exchange(ranks: Ranks, *, is_question: bool, text: str, flag: int) -> list[tuple[int, ...]]:
    own = torch.tensor([is_question, zlib.crc32(text.encode()), flag, ranks.talk.requests])
    found = [torch.empty_like(own) for _ in ranks.order]
    dist.all_gather(found, own, group=ranks.control_group)
    return [tuple(found[place].tolist()) for place in ranks.order]


def _answer(
    ranks: Ranks, headers: Sequence[tuple[int, ...]], own: tuple[Item, ...] | None
) -> dict[Item, Any]:
    """One round of answers; all ranks are in it, also those that asked nothing."""
    if own is not None and len({header[:2] for header in headers}) == 1:
        questions: Sequence[tuple[Item, ...] | None] = [own]
    else:
        questions = share.gather_objects(ranks, own) or []
    wanted = dict.fromkeys(item for question in questions for item in question or ())
    found = {}
    for item in wanted:
        owner, key = item
        value = _own_answer(ranks, key) if owner == ranks.position else None
        found[item] = share.broadcast_object(ranks, value, owner)
    return {item: found[item] for item in own or ()}


def _own_answer(ranks: Ranks, key: Hashable) -> Any:
    try:
        assert ranks.talk.answer is not None, f"{ranks} has no answers yet"
        return ranks.talk.answer(key)
    except Exception as error:  # it belongs to who asked
        return error


def _raise_apart(ranks: Ranks, place: str) -> None:
    listed = "; ".join(share.gather_objects(ranks, f"{ranks} {place}{_here()}") or [])
    raise MeetingError(
        f"the {PLURAL[ranks.called]} of the pipeline are at different places of the program: "
        f"{listed}. Each of these needs all ranks, so that none could go on. Let all ranks do the "
        "same: take a condition on the rank (`is_global_zero`, `global_rank == 0`, "
        "`rank_zero_only`) away from it, as in `trainer.save_checkpoint(...)`, which writes its "
        "file once anyway"
    )


def _here() -> str:
    line = users_line(sys._getframe())
    return f" (in {line})" if line else ""
