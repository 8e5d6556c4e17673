"""Does it fit: the ledger, the smallest pipeline, and what is said of both."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.balance import uniform
from lightning_pipe.planning.estimate import does_it_fit, parse_bytes, rule_of_thumb
from lightning_pipe.planning.memory import make_ledger, smallest_pipeline, stage_in_flight
from lightning_pipe.planning.profile import Intervals, Profile, UnitProfile, Weight
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule

GIB = 2**30


def layers(count: int, *, weight_bytes: int = 4 * GIB, saved_bytes: int = 0) -> Profile:
    """Equal layers, whose weights have gradients and two moments of the same size."""
    units = tuple(
        UnitProfile(
            f"layers.{i}",
            flops=10,
            weights=(f"layers.{i}.weight",),
            saved=((i, saved_bytes),),
            input_bytes=8,
            output_bytes=8,
            gradient_bytes=8,
        )
        for i in range(count)
    )
    weight = Weight(weight_bytes // 4, weight_bytes, weight_bytes, 2 * weight_bytes)
    return Profile(units, {f"layers.{i}.weight": weight for i in range(count)})


def test_ten_billion_parameters_do_not_fit() -> None:
    assert does_it_fit(10e9, 80e9) == (
        "10.0 B parameters at 12 bytes are 120 GB and do not fit in 80 GB; 2 stages make it fit"
    )
    assert does_it_fit(405e9, 80e9, 16).endswith("6.48 TB and do not fit in 80 GB; 81 stages "
                                                 "make it fit")  # fmt: skip
    assert does_it_fit(124e6, 8e9, 16) == (
        "124.0 M parameters at 16 bytes are 1.984 GB and fit in 8 GB"
    )
    assert rule_of_thumb(10**10) == (
        "rule of thumb: 12-16 bytes per parameter with Adam, 120 GB to 160 GB for 10.0 G parameters"
    )


@pytest.mark.parametrize(("count", "on_one_card"), [(24, 4), (25, 4), (7, 1), (12, 12), (32, 5)])
def test_smallest_pipeline_of_equal_layers(count: int, on_one_card: int) -> None:
    """ceil(layers / layers that fit on one card)."""
    cap_bytes = on_one_card * 16 * GIB + GIB
    found = smallest_pipeline(layers(count), cap_bytes, headroom_fraction=0.0)
    assert found == math.ceil(count / on_one_card)


def test_activations_in_flight_ask_for_more_stages() -> None:
    light, heavy = layers(16), layers(16, saved_bytes=2 * GIB)
    cap_bytes = 80 * GIB
    alone = smallest_pipeline(light, cap_bytes)
    assert alone == 4
    more = smallest_pipeline(heavy, cap_bytes)
    assert more is not None
    assert more > alone
    assert smallest_pipeline(heavy, cap_bytes, checkpointing=True) == alone
    assert smallest_pipeline(heavy, 10 * GIB) is None


def test_ledger_of_1f1b() -> None:
    profile = layers(8, saved_bytes=GIB)
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=8)
    ledger = make_ledger(profile, uniform(8, 4), schedule, cap_bytes=48 * GIB)
    assert [stage.in_flight for stage in ledger.stages] == [4, 3, 2, 1]
    assert ledger.rank_peak_bytes == (
        40 * GIB + 40, 38 * GIB + 48, 36 * GIB + 40, 34 * GIB + 16,
    )  # fmt: skip
    assert [stage.total_bytes for stage in ledger.stages] == list(ledger.rank_peak_bytes)
    assert ledger.stages[0].bytes_per_parameter == 16
    assert (ledger.fits, ledger.fullest) == (True, 0)
    assert ledger.verdict() == (
        "the fullest rank is 0 with 40.0 GiB: fits in 48.0 GiB less 10% head-room"
    )
    tight = replace(ledger, cap_bytes=42 * GIB)
    assert tight.excess_bytes == math.ceil(40 * GIB + 40 - 42 * GIB * 0.9)
    assert tight.verdict().endswith("does not fit in 42.0 GiB less 10% head-room, by 2.2 GiB")
    rows = ledger.table_rows()
    assert all(len(row) == len(rows[0]) for row in rows)
    assert rows[1][:7] == ["0", "0", "2.1 G", "8.0 GiB", "8.0 GiB", "16.0 GiB", "16.0"]


def test_ledger_with_checkpointing() -> None:
    profile = layers(8, saved_bytes=GIB)
    schedule = make_schedule("gpipe", num_ranks=2, num_microbatches=8)
    ledger = make_ledger(profile, uniform(8, 2), schedule, checkpointing=True)
    assert ledger.rank_peak_bytes[0] == 65 * GIB + 8 * 4 * 8 + 8 * 8 + 8
    assert len(ledger.table_rows()[0]) == len(ledger.table_rows()[1])
    assert ledger.fits


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"interleaved"}))
def test_in_flight_of_stages_is_that_of_ranks(name: str) -> None:
    chunks = 2 if name in ("zbv", "dualpipev", "interleaved_1f1b", "looped_bfs") else 1
    schedule = make_schedule(name, num_ranks=3, num_microbatches=6, virtual_stages=chunks)
    flights = stage_in_flight(schedule)
    for rank, peak in enumerate(schedule.in_flight()):
        of_stages = sum(flights[stage] for stage in schedule.stages(rank))
        assert peak <= of_stages
        if chunks == 1:
            assert peak == of_stages


def test_tied_weights_count_once_per_stage() -> None:
    units = (
        UnitProfile("embed", weights=("table",)),
        UnitProfile("block", weights=("block",)),
        UnitProfile("head", weights=("table",)),
    )
    profile = Profile(
        units, {"table": Weight(5, 20), "block": Weight(1, 4), "unread": Weight(2, 8)}
    )
    one = make_ledger(profile, (0,), make_schedule("1f1b", num_ranks=1, num_microbatches=1))
    assert one.stages[0].weight_bytes == 32
    two = make_ledger(profile, (0, 2), make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert [stage.weight_bytes for stage in two.stages] == [24, 28]


saved = st.lists(st.tuples(st.integers(0, 6), st.just(3)), max_size=3).map(
    lambda pairs: tuple(dict(pairs).items())
)
calls = st.builds(
    UnitProfile,
    unit=st.just("u"),
    weights=st.lists(st.sampled_from("abc"), max_size=2).map(tuple),
    saved=saved,
    glue_saved=saved,
    sends_glue=st.booleans(),
    input_bytes=st.integers(0, 5),
)


@given(units=st.lists(calls, min_size=1, max_size=6), checkpointing=st.booleans())
@settings(max_examples=100, deadline=None, derandomize=True)
def test_bytes_of_any_run_of_calls(units: list[UnitProfile], checkpointing: bool) -> None:
    """The quick table agrees with the definition, and cutting loses no byte."""
    profile = Profile(tuple(units), {name: Weight(1, 7) for name in "abcd"})
    intervals = Intervals(profile, checkpointing=checkpointing)
    for start in range(len(units)):
        for end in range(start + 1, len(units) + 1):
            state, held, _ = intervals.bytes_of(start, end)
            assert state == 7 * len(profile.stage_weights(start, end))
            assert held == profile.held_bytes(start, end, checkpointing=checkpointing)
    whole = profile.held_bytes(0, len(units), checkpointing=checkpointing)
    for cut in range(1, len(units)):
        parts = [(0, cut), (cut, len(units))]
        assert sum(profile.held_bytes(*p, checkpointing=checkpointing) for p in parts) >= whole


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "0", "eighty", "80XB", "inf GB"])
def test_memory_that_is_none(text: str) -> None:
    with pytest.raises(PlanError, match="give a number with a unit, such as 80GiB"):
        parse_bytes(text)


def test_memory_in_words() -> None:
    assert parse_bytes("80GiB") == 80 * GIB
    assert parse_bytes(" 1.5 tb ") == 1_500_000_000_000
    assert parse_bytes(4096) == 4096
