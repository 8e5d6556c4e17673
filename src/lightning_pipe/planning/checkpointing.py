"""Which unit calls keep their inputs only and run again for the backward: as few as fit the memory.

Activation checkpointing (Chen et al. 2016) pays a second forward of a unit for the bytes that it
would keep of every micro-batch in flight. It is worth that only under memory pressure, so it is
given to the ranks that do not fit, and there to the calls that free most bytes per FLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.memory import HEADROOM, Ledger, make_ledger
from lightning_pipe.planning.profile import Profile, ranges

__all__ = ["calls_to_run_again"]


def calls_to_run_again(
    profile: Profile,
    starts: Sequence[int],
    schedule: Schedule,
    cap_bytes: int,
    *,
    headroom_fraction: float = HEADROOM,
    allowed: AbstractSet[int] | None = None,
) -> frozenset[int]:
    """The fewest calls, by what they free for their work, after which every rank fits.

    Args:
        profile: The model, for the rows of one micro-batch.
        starts: First call of each stage.
        schedule: What is run.
        cap_bytes: Memory of a device.
        headroom_fraction: Share of it that stays free.
        allowed: Calls that may run again; all if None.

    Returns:
        Indices of calls; on a rank that cannot fit at all, all that are allowed and free anything.
    """

    def ledger(again: AbstractSet[int]) -> Ledger:
        return make_ledger(
            profile,
            starts,
            schedule,
            cap_bytes=cap_bytes,
            headroom_fraction=headroom_fraction,
            checkpointing=again,
        )

    chosen: set[int] = set()
    plain = ledger(frozenset())
    for rank, peak_bytes in enumerate(plain.rank_peak_bytes):
        if peak_bytes > plain.usable_bytes:
            order = _most_freed_first(profile, starts, schedule, rank, allowed)
            low, high = 0, len(order)
            while low < high:
                middle = (low + high) // 2
                if ledger(set(order[:middle])).rank_peak_bytes[rank] <= plain.usable_bytes:
                    high = middle
                else:
                    low = middle + 1
            chosen |= set(order[:low])
    return frozenset(chosen)


def _most_freed_first(
    profile: Profile,
    starts: Sequence[int],
    schedule: Schedule,
    rank: int,
    allowed: AbstractSet[int] | None,
) -> list[int]:
    """The calls of a rank that free anything, most bytes per FLOP first."""
    own = [
        index
        for stage, (start, end) in enumerate(ranges(starts, len(profile.units)))
        if schedule.stage_to_rank[stage] == rank
        for index in range(start, end)
        if allowed is None or index in allowed
    ]
    freed = {i: profile.units[i].saved_bytes - profile.units[i].input_bytes for i in own}
    return sorted(
        (i for i in own if freed[i] > 0), key=lambda i: -freed[i] / max(profile.units[i].flops, 1)
    )
