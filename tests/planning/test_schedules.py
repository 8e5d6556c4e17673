"""The orders themselves: pictures, golden files, closed forms, and what a user is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.ir import Op, Schedule
from lightning_pipe.planning.render import schedule_text
from lightning_pipe.planning.schedules import (
    SCHEDULES,
    forward_only,
    make_schedule,
    validate_user,
)
from lightning_pipe.planning.simulate import ideal_bubble_fraction

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.csv"))
V_SHAPED = ("zbv", "dualpipev")


def build(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    return make_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=chunks,
        strict=False,
    )


def picture(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> list[str]:
    drawn = schedule_text(build(name, num_ranks, num_microbatches, chunks), legend=False)
    return [re.sub(r"^rank +\d+ \| ", "", line) for line in drawn.splitlines()]


def test_naive() -> None:
    assert picture("naive", 2, 2) == [
        "F1 .  .  B1 F2 .  .  B2",
        ".  F1 B1 .  .  F2 B2 .",
    ]


def test_gpipe() -> None:
    assert picture("gpipe", 3, 2) == [
        "F1 F2 .  .  .  .  B1 B2",
        ".  F1 F2 .  .  B1 B2 .",
        ".  .  F1 F2 B1 B2 .  .",
    ]


def test_1f1b() -> None:
    assert picture("1f1b", 3, 4) == [
        "F1 F2 F3 .  .  B1 F4 B2 .  B3 .  B4",
        ".  F1 F2 .  B1 F3 B2 F4 B3 .  B4 .",
        ".  .  F1 B1 F2 B2 F3 B3 F4 B4 .  .",
    ]


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    assert picture("1f1b", 3, 1) == [
        "F1 .  .  .  .  B1",
        ".  F1 .  .  B1 .",
        ".  .  F1 B1 .  .",
    ]


def test_interleaved() -> None:
    assert picture("interleaved_1f1b", 2, 2, 2) == [
        "F1a F2a F1b F2b .   B1b .   B2b B1a B2a",
        ".   F1a F2a F1b B1b F2b B2b B1a B2a .",
    ]


def test_looped_bfs() -> None:
    assert picture("looped_bfs", 2, 2, 2) == [
        "F1a F2a F1b F2b .   .   B1b B2b B1a B2a",
        ".   F1a F2a F1b F2b B1b B2b B1a B2a .",
    ]


def test_zero_bubble() -> None:
    assert picture("zero_bubble", 2, 3) == [
        "F1 F2 .  I1 W1 F3 I2 W2 I3 W3",
        ".  F1 I1 F2 I2 W1 F3 I3 W2 W3",
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_orders(path: Path) -> None:
    match = re.fullmatch(r"(.+)_p(\d+)_v(\d+)_m(\d+)", path.stem)
    assert match is not None
    name, *sizes = match.groups()
    num_ranks, chunks, num_microbatches = map(int, sizes)
    built = build(name, num_ranks, num_microbatches, chunks)
    assert built.aligned().to_csv() == path.read_text()


def test_there_is_a_golden_file_for_each_schedule() -> None:
    names = {path.stem.rsplit("_p", 1)[0] for path in GOLDEN}
    assert names == set(SCHEDULES) - {"interleaved"}


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "percent"),
    [(2, 4, "20.0"), (4, 8, "27.3"), (4, 32, "8.6"), (8, 32, "17.9"), (2, 1, "50.0")],
)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_check_values_of_the_bubble(
    name: str, num_ranks: int, num_microbatches: int, percent: str
) -> None:
    bubble = ideal_bubble_fraction(build(name, num_ranks, num_microbatches))
    assert f"{100 * bubble:.1f}" == percent


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 5, 8, 16, 31])
def test_closed_forms(num_ranks: int, num_microbatches: int) -> None:
    p, m = num_ranks, num_microbatches
    for name in ("gpipe", "1f1b"):
        assert ideal_bubble_fraction(build(name, p, m)) == (p - 1) / (m + p - 1)
    assert ideal_bubble_fraction(build("naive", p, m)) == (p - 1) / p
    assert build("gpipe", p, m).in_flight() == (m,) * p
    assert build("1f1b", p, m).in_flight() == tuple(min(m, p - s) for s in range(p))
    if m >= 2 * p - 1:  # ZB-H1: idle P-1 slots of 3M, where 1F1B is idle 3(P-1)
        assert ideal_bubble_fraction(build("zero_bubble", p, m)) == (p - 1) / (3 * m + p - 1)
        assert build("zero_bubble", p, m).in_flight() == (p,) * p


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_closed_form_of_the_looped(num_ranks: int, rounds: int, chunks: int) -> None:
    m = num_ranks * rounds
    ideal = (num_ranks - 1) / (chunks * m + num_ranks - 1)
    for name in ("interleaved_1f1b", "looped_bfs"):
        assert ideal_bubble_fraction(build(name, num_ranks, m, chunks)) == ideal
    if num_ranks > 1:
        most = [(chunks - 1) * num_ranks + 2 * (num_ranks - 1 - r) + 1 for r in range(num_ranks)]
        held = build("interleaved_1f1b", num_ranks, m, chunks).in_flight()
        assert held == tuple(min(chunks * m, bound) for bound in most)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("name", V_SHAPED)
def test_v_shapes_idle_only_while_filling(name: str, num_ranks: int) -> None:
    for m in (2 * num_ranks, 4 * num_ranks, 64):
        schedule = build(name, num_ranks, m, 2)
        last = 2 * num_ranks - 1
        assert schedule.stage_to_rank == tuple(min(s, last - s) for s in range(2 * num_ranks))
        assert ideal_bubble_fraction(schedule) == (num_ranks - 1) / (6 * m + num_ranks - 1)
        assert max(schedule.in_flight()) == 2 * num_ranks + (name == "dualpipev")


def test_interleaved_groups_of_any_size_keep_the_ideal() -> None:
    for num_ranks, m in ((2, 3), (2, 5), (4, 7), (4, 9), (8, 13)):
        schedule = build("interleaved_1f1b", num_ranks, m, 2)
        assert ideal_bubble_fraction(schedule) == (num_ranks - 1) / (2 * m + num_ranks - 1)


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n not in V_SHAPED])
@pytest.mark.parametrize("chunks", [1, 3])
def test_one_rank_never_waits(name: str, chunks: int) -> None:
    schedule = build(name, 1, 5, chunks)
    assert schedule.num_stages == chunks
    assert ideal_bubble_fraction(schedule) == 0.0


def test_1f1b_is_too_few_microbatches_for_the_user() -> None:
    with pytest.raises(ScheduleError, match=r"P=4, M=2.*num_microbatches=4 or more"):
        make_schedule("1f1b", num_ranks=4, num_microbatches=2)
    make_schedule("1f1b", num_ranks=4, num_microbatches=4)
    make_schedule("gpipe", num_ranks=4, num_microbatches=2)
    with pytest.raises(ScheduleError, match="2 < 4"):  # which is what one chunk means
        make_schedule("interleaved", num_ranks=4, num_microbatches=2)


def test_interleaved_suggests_the_nearest_microbatches() -> None:
    with pytest.raises(ScheduleError, match=r"M=5.*num_microbatches=4 or 6"):
        validate_user("interleaved_1f1b", 2, 5, 2)
    for m in (3, 4, 6):
        validate_user("interleaved_1f1b", 2, m, 2)


def test_chunks_that_a_schedule_cannot_have() -> None:
    for name in V_SHAPED:
        with pytest.raises(ScheduleError, match=f"{name} with V=1.*virtual_stages=2"):
            build(name, 2, 4, 1)
    for name in ("naive", "gpipe", "1f1b", "zero_bubble"):
        with pytest.raises(ScheduleError, match=f"{name} with P=2, V=2.*interleaved_1f1b"):
            build(name, 2, 4, 2)


def test_unknown_names_are_answered_with_the_legal_ones() -> None:
    with pytest.raises(ScheduleError, match=r"did you mean 'gpipe'.*naive, gpipe, 1f1b"):
        make_schedule("gpip", num_ranks=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="'qqq' is unknown; legal are naive"):
        validate_user("qqq", 2, 2)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_start_at_one(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ScheduleError, match="must be 1 at least"):
        validate_user("gpipe", *sizes)


def test_the_short_name_is_the_same_schedule() -> None:
    assert build("interleaved", 2, 4, 2) == build("interleaved_1f1b", 2, 4, 2)


def test_a_csv_file_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build("zero_bubble", 2, 4).to_csv())
    read = make_schedule(path, num_ranks=2, num_microbatches=4)
    assert read.orders == build("zero_bubble", 2, 4).orders
    assert read.name == "mine.csv"
    short = make_schedule(str(path), num_ranks=2, num_microbatches=3, strict=False)
    assert short.num_microbatches == 3


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 4, 1), "2 ranks .* pipeline has 3"),
        ((2, 3, 1), "4 micro-batches, but 3"),
        ((2, 5, 1), "use num_microbatches=4"),
        ((2, 4, 2), "2 stages on 2 ranks"),
    ],
)
def test_a_csv_file_must_fit_the_run(
    tmp_path: Path, sizes: tuple[int, int, int], message: str
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build("1f1b", 2, 4).to_csv())
    p, m, v = sizes
    with pytest.raises(ScheduleError, match=message):
        make_schedule(path, num_ranks=p, num_microbatches=m, virtual_stages=v)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.csv.*cannot be read"):
        make_schedule(tmp_path / "none.csv", num_ranks=1, num_microbatches=1)


def test_evaluation_visits_every_segment_once() -> None:
    schedule = forward_only([0, 1, 2, 0, 2], 3)
    assert schedule.stage_to_rank == (0, 1, 2, 0, 2)
    assert {action.op for rank in range(3) for action in schedule.actions(rank)} == {Op.FORWARD}
    assert forward_only([0], 2, num_ranks=3).num_ranks == 3


def test_evaluation_takes_no_longer_than_the_ideal() -> None:
    for num_ranks in range(1, 6):
        for m in (num_ranks, num_ranks + 1, 3 * num_ranks):
            for chunks in (1, 2, 3):
                schedule = forward_only(list(range(num_ranks)) * chunks, m)
                slots = max(len(row) for row in schedule.aligned().orders)
                assert slots == chunks * m + num_ranks - 1


@pytest.mark.parametrize(
    ("placement", "num_microbatches", "num_ranks"),
    [([], 1, None), ([0], 0, None), ([-1], 1, None), ([0, 2], 1, 2)],
)
def test_evaluation_needs_segments_ranks_and_microbatches(
    placement: list[int], num_microbatches: int, num_ranks: int | None
) -> None:
    with pytest.raises(ScheduleError, match=f"with {num_microbatches} micro-batches"):
        forward_only(placement, num_microbatches, num_ranks=num_ranks)
