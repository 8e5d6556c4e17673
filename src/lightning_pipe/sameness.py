"""All ranks have to see the same step: what each saw is compared before anything depends on it."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable
from typing import TypeVar

from lightning_pipe.errors import CutError
from lightning_pipe.home import Home
from lightning_pipe.runtime import meeting, share
from lightning_pipe.runtime.meeting import meet
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.memo import Elsewhere, SharedOutcomes
from lightning_pipe.split.trace import Trace

T = TypeVar("T")


def see_together(
    ranks: Ranks, shared: SharedOutcomes, make: Callable[[], T], text_of: Callable[[T], str]
) -> T:
    """Looks at a step on all ranks, which have to see the same. A unit that only its own rank can
    run is made known to the others, and they look again.

    Args:
        ranks: This rank.
        shared: What ranks have told each other of units.
        make: Looks at the step.
        text_of: A text that is equal on two ranks exactly if they saw the same.

    Raises:
        CutError: The ranks saw different steps, or another rank saw none; with its reason.
    """
    while True:
        failure = None
        try:
            found = make()
        except Exception as error:
            failure = error
        if _agree(ranks, shared, "" if failure is not None else text_of(found), failure):
            continue
        if failure is not None:
            raise failure
        return found


def text_of_trace(trace: Trace) -> str:
    """What ranks must have seen alike: the step, and whether it is tried before it is trusted,
    which takes all of them."""
    return f"{trace.digest_text()} {bool(trace.repeated)} {trace.restless}"


def same_on_all(ranks: Ranks, text: str) -> bool:
    """Whether all ranks say the same; for what each of them may have worked out by itself."""
    return len(set(share.gather_objects(ranks, text) or [text])) == 1


def _agree(ranks: Ranks, shared: SharedOutcomes, text: str, failure: Exception | None) -> bool:
    """Whether to look again, with what other ranks have found out."""
    # each rank has a device of its own
    text = re.sub(r"(?<=[a-z]):\d+|, index=\d+", "", text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    seen = (digest, reason, isinstance(failure, Elsewhere), shared.made)
    told = share.gather_objects(ranks, seen) or []
    is_new = shared.learn(made for *_, made in told)
    failed = [(rank, why) for rank, (_, why, _, _) in enumerate(told) if why is not None]
    if failed and is_new and all(elsewhere for _, why, elsewhere, _ in told if why):
        return True
    if failure is not None:
        return False
    if failed:
        raise CutError(f"the step cannot be traced on rank {failed[0][0]}: {failed[0][1]}")
    digests = [digest for digest, *_ in told]
    if len(set(digests)) > 1:
        differs = next(i for i, other in enumerate(digests) if other != digests[0])
        raise CutError(
            f"the step is not the same on all ranks: ranks 0 and {differs} of {len(digests)} "
            "traced different calls or shapes. Build the same model on every rank: nothing in "
            "it may depend on the rank or on an unseeded random choice"
        )
    return False


def refuse_other_stages(home: Home, others: Ranks) -> None:
    """Refuses pipelines that belong together and have other stages: they could not meet.

    Args:
        home: The stages of this one.
        others: This position in all of them.

    Raises:
        CutError: They differ; on all.
    """
    seen = repr((home.starts, home.stage_to_rank, [sorted(held) for held in home.held]))
    if len(set(meet(others, "has cut the model", zlib.crc32(seen.encode())))) > 1:
        raise CutError(
            f"the {meeting.PLURAL[others.called]} of the pipeline have cut the model into other "
            "stages than each other. "
            "Build the same model on every rank, with the same versions of the same packages"
        )
