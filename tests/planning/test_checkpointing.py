"""As few calls run again as fit the memory, and on the ranks that need it."""

from __future__ import annotations

from dataclasses import replace

from tests.planning.test_memory import layers

from lightning_pipe.planning.checkpointing import calls_to_run_again
from lightning_pipe.planning.memory import make_ledger
from lightning_pipe.planning.schedules import make_schedule

STARTS = (0, 4)
SCHEDULE = make_schedule("1f1b", num_ranks=2, num_microbatches=8)


def test_nothing_runs_again_where_all_fits() -> None:
    profile = layers(8, weight_bytes=100, saved_bytes=1000)
    assert calls_to_run_again(profile, STARTS, SCHEDULE, 10**6) == frozenset()


def test_the_rank_with_most_in_flight_runs_just_enough_again() -> None:
    profile = layers(8, weight_bytes=100, saved_bytes=1000)
    plain = make_ledger(profile, STARTS, SCHEDULE, headroom_fraction=0.0)
    first, last = plain.rank_peak_bytes
    assert first > last  # two micro-batches in flight against one
    # one unit that runs again frees 1000 of each micro-batch in flight, keeps its input (8) of
    # each, and needs 1000 while it runs
    for count, cap_bytes in [(1, first - 984), (2, first - 985), (2, first - 2968), (4, 1)]:
        again = calls_to_run_again(profile, STARTS, SCHEDULE, cap_bytes, headroom_fraction=0.0)
        assert len(again & set(range(4))) == count, cap_bytes
        assert cap_bytes == 1 or not again & set(range(4, 8))


def test_most_bytes_for_least_work_first_and_only_what_may() -> None:
    profile = layers(8, weight_bytes=100, saved_bytes=1000)
    units = list(profile.units)
    units[2] = replace(units[2], flops=1)
    units[1] = replace(units[1], saved=((1, 4),))  # less than its input
    profile = replace(profile, units=tuple(units))
    peak = make_ledger(profile, STARTS, SCHEDULE, headroom_fraction=0.0).rank_peak_bytes[0]
    cut = {"headroom_fraction": 0.0}
    assert calls_to_run_again(profile, STARTS, SCHEDULE, peak - 1, **cut) == {2}
    assert calls_to_run_again(profile, STARTS, SCHEDULE, 1, **cut) == {0, 2, 3, 4, 5, 6, 7}
    only = calls_to_run_again(profile, STARTS, SCHEDULE, 1, allowed={0, 1, 6}, **cut)
    assert only == {0, 6}
