"""The choice of P, V, M, schedule and checkpointing: what is taken, why, and what is refused."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace

import pytest

from lightning_pipe.errors import PlanError, ScheduleError
from lightning_pipe.planning.balance import uniform
from lightning_pipe.planning.choose import Candidate, search, try_one
from lightning_pipe.planning.costs import CostTable, LinkCosts, UnitCosts
from lightning_pipe.planning.explain import explain, rows_of
from lightning_pipe.planning.profile import (
    Profile,
    UnitProfile,
    Weight,
    all_reduce_s,
    tensor_parallel,
)
from lightning_pipe.planning.request import BALANCES, Request, starts_for, unit_work
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate
from lightning_pipe.planning.topology import Topology

GIB, MIB = 2**30, 2**20


def llm(
    blocks: int, *, vocabulary: int = 1000, width: int = 256, rows: int = 1, length: int = 128
) -> Profile:
    """A language model by its arithmetic: embedding, blocks of 12 width^2, and a head."""
    tokens = rows * length
    hidden = tokens * width * 4

    def unit(name: str, elements: int, saved: int, glue: int = 0) -> UnitProfile:
        number = len(name) * 1000 + int(name.rpartition(".")[2] or 0) if "." in name else len(name)
        return UnitProfile(
            unit=name,
            flops=0 if name == "embed" else 2 * tokens * elements,
            weights=(f"{name}.weight",),
            saved=((number, saved),),
            glue_saved=((number + 500, glue),) if glue else (),
            input_bytes=hidden,
            output_bytes=hidden,
            gradient_bytes=hidden,
        )

    units = [unit("embed", vocabulary * width, 0)]
    units += [unit(f"blocks.{i}", 12 * width**2, 16 * hidden) for i in range(blocks)]
    units.append(unit("head", vocabulary * width, hidden, tokens * vocabulary * 4))
    sizes = [vocabulary * width, *[12 * width**2] * blocks, vocabulary * width]
    weights = {
        u.weights[0]: Weight(n, 4 * n, 4 * n, 8 * n) for u, n in zip(units, sizes, strict=True)
    }
    return Profile(tuple(units), weights, rows).with_flops_per_s(1e12)


HEAVY = llm(12, vocabulary=32_000)


def step_s(profile: Profile, starts: tuple[int, ...], name: str = "1f1b") -> float:
    schedule = make_schedule(name, num_ranks=len(starts), num_microbatches=4 * len(starts))
    return simulate(schedule, profile.stage_costs(starts)).step_s


def test_a_heavy_head_gets_fewer_blocks_beside_it() -> None:
    """At least 1.25 times as fast as the uniform cut at P = 4, and faster at P = 2."""
    request = Request(rows=16, devices=4, num_ranks=4, schedule="1f1b")
    chosen = search(HEAVY, request).chosen
    gain = step_s(HEAVY, uniform(14, 4)) / step_s(HEAVY, chosen.starts)
    assert gain >= 1.25
    counts = [b - a for a, b in itertools.pairwise([*chosen.starts, 14])]
    assert counts[-1] == min(counts) == 1
    two = search(HEAVY, replace(request, devices=2, num_ranks=2)).chosen
    assert step_s(HEAVY, two.starts) < step_s(HEAVY, uniform(14, 2))


def test_four_microbatches_per_rank_first() -> None:
    found = search(HEAVY, Request(rows=64, devices=4))
    assert str(found.chosen.candidate) == "1f1b, P=4, M=16"
    lines = "\n".join(explain(found))
    assert "chosen: 1f1b, P=4, M=16" in lines
    assert "M=16 is 4 x P (the rule is 4 x P or more): idle" in lines
    assert "a batch of 128 rows as M=32" in lines
    assert "zero_bubble, P=4, M=16:" in lines
    assert "measure the costs" in lines


def test_a_small_batch_is_said() -> None:
    found = search(HEAVY, Request(rows=6, devices=4))
    assert found.chosen.candidate.num_microbatches == 6
    assert "M=6 is 1.5 x P, less than the 4 x P that keep ranks busy" in "\n".join(explain(found))


def test_a_model_too_small_for_its_link_is_said_and_not_told_to_take_more() -> None:
    link = LinkCosts(latency_s=1.0, bytes_per_s=1e9)
    found = search(HEAVY, Request(rows=8, devices=2, num_ranks=2, topology=Topology(None, link)))
    lines = "\n".join(explain(found))
    assert "of the time is communication: at these speeds (guessed from FLOPs" in lines
    assert "4 x P" not in lines


def test_interleaving_must_pay_for_its_communication() -> None:
    even = llm(64, vocabulary=1)
    request = Request(rows=8, devices=8, num_ranks=8, num_microbatches=8)
    fast = search(even, request).chosen
    assert fast.candidate.schedule_name == "interleaved_1f1b"
    assert fast.candidate.virtual_stages == 4
    slow = Topology(link=LinkCosts(latency_s=0.0, bytes_per_s=2e7))
    found = search(even, replace(request, topology=slow))
    assert found.chosen.candidate.schedule_name == "1f1b"
    assert "interleaved_1f1b, P=8, V=2, M=8:" in "\n".join(explain(found))


def test_measured_times_admit_zero_bubble() -> None:
    even = llm(16, vocabulary=1)
    units = tuple(UnitCosts(u.unit, u.forward_s, u.input_s, u.weight_s) for u in even.units)
    measured = even.with_costs(CostTable(units, device="a card", rows=1, overhead_s=1e-6))
    assert measured.overhead_s == 1e-6
    request = Request(rows=4, devices=4, num_ranks=4, virtual_stages=1)
    assert search(even, request).chosen.candidate.schedule_name == "1f1b"
    assert search(measured, request).chosen.candidate.schedule_name == "zero_bubble"
    with pytest.raises(PlanError, match=r"call 0 is 'embed' here and 'head' there"):
        even.with_costs(CostTable(units[::-1]))
    with pytest.raises(PlanError, match="call 17 is 'head' here and nothing more there"):
        even.with_costs(CostTable(units[:-1]))
    with pytest.raises(PlanError, match="'head' is not called here"):
        even.with_costs(CostTable((*units, units[-1])))


def test_costs_of_pieces_are_added_up() -> None:
    """A measurement of finer units serves a coarser cut, and another micro-batch size."""
    profile = Profile((UnitProfile("a"), UnitProfile("b")), {}, rows=4)
    table = CostTable(
        (UnitCosts("a", 1.0, 2.0, 3.0), UnitCosts("b.x", 1.0, 1.0, 1.0), UnitCosts("b.y", 2, 2, 2)),
        rows=2,
    )
    timed = profile.with_costs(table)
    assert [(u.forward_s, u.input_s, u.weight_s) for u in timed.units] == [(2, 4, 6), (6, 6, 6)]


def test_checkpointing_only_when_memory_is_short() -> None:
    profile = llm(16, rows=8, length=512)
    roomy = Request(rows=32, devices=2, num_ranks=2, num_microbatches=4, cap_bytes=2 * GIB,
                    schedule="1f1b")  # fmt: skip
    assert not search(profile, roomy).chosen.candidate.checkpointing
    tight = search(profile, replace(roomy, cap_bytes=400 * MIB))
    assert tight.chosen.candidate.checkpointing
    assert tight.chosen.ledger.fits
    lines = "\n".join(explain(tight))
    assert "checkpointing only because memory is short: without it rank 0 is over by" in lines
    found = re.search(r"a step is (-?\d+)% longer for it", lines)
    assert found is not None
    assert 0 < int(found[1]) <= 34  # a second forward, where F, I and W take equally long
    assert "more per device, 1f1b, P=2, M=4 would fit: " in lines
    costs = profile.stage_costs((0, 9)), profile.stage_costs((0, 9), checkpointing=True)
    assert costs[1][0].total_s == pytest.approx(costs[0][0].total_s * 4 / 3)
    rows = rows_of(tight.outcomes)
    assert all(len(row) == 5 for row in rows)


def test_the_cap_moves_the_cut() -> None:
    """Early stages hold more micro-batches: under a tight cap they get fewer blocks."""
    profile = llm(16, vocabulary=1, rows=8, length=512)
    request = Request(rows=64, devices=4, num_ranks=4, num_microbatches=8, schedule="1f1b")
    free = search(profile, request).chosen
    cap_bytes = int(max(free.ledger.rank_peak_bytes) * 0.9 / 0.9)
    tight = search(profile, replace(request, cap_bytes=cap_bytes, checkpointing=False)).chosen
    assert tight.ledger.fits
    assert tight.starts[1] < free.starts[1]


def test_free_p_takes_what_fits_and_pays() -> None:
    profile = llm(16, vocabulary=1)
    found = search(profile, Request(rows=32, devices=8))
    assert found.chosen.candidate.num_ranks == 8
    assert {o.candidate.num_ranks for o in found.outcomes} == {1, 2, 4, 8}


def test_copies_compete_with_stages() -> None:
    """Where the model fits on one card, data parallelism needs no bubble; if sums are dear, it
    loses."""
    profile = llm(16, vocabulary=1)
    request = Request(rows=32, devices=8, copies=True)
    assert search(profile, request).chosen.candidate.num_ranks == 1
    dear = Topology(link=LinkCosts(0.0, 1e7))
    assert search(profile, replace(request, topology=dear)).chosen.candidate.num_ranks > 1
    small = replace(request, cap_bytes=int(profile.state_bytes / 2), headroom_fraction=0.0)
    assert search(profile, small).chosen.candidate.num_ranks >= 4


def test_nothing_fits_says_what_would() -> None:
    profile = llm(16, vocabulary=1)
    request = Request(
        rows=8, devices=2, num_ranks=2, num_microbatches=2, cap_bytes=150 * MIB, checkpointing=False
    )
    with pytest.raises(PlanError) as caught:
        search(profile, request)
    text = str(caught.value)
    assert text.startswith("nothing fits in 150.0 MiB less 10% head-room. Nearest is 1f1b, P=2, ")
    assert "stage 0 (embed .. blocks." in text
    assert "is over by " in text
    assert text.endswith(
        "What would make it fit: P=3 (devices) with num_microbatches=3; or activation "
        "checkpointing; or micro-batches of 1 rows (num_microbatches=8)"
    )
    for change in (
        {"num_ranks": 3, "devices": 3, "num_microbatches": 3},
        {"checkpointing": True},
        {"num_microbatches": 8},
    ):
        assert search(profile, replace(request, **change)).chosen.ledger.fits
    with pytest.raises(PlanError, match="nothing fits"):
        search(profile, replace(request, num_microbatches=4))


def test_a_unit_larger_than_a_card_is_named() -> None:
    profile = llm(4, vocabulary=1_000_000)
    with pytest.raises(PlanError, match=r"'embed' alone holds 3\.8 GiB of weights, gradients and"):
        search(profile, Request(rows=4, devices=4, cap_bytes=3 * GIB))


def test_pinned_values_are_kept() -> None:
    request = Request(
        rows=24, devices=3, num_ranks=3, virtual_stages=2, num_microbatches=6, schedule="looped_bfs"
    )
    found = search(HEAVY, request)
    assert [o.candidate for o in found.outcomes] == [Candidate(3, 2, 6, "looped_bfs")]
    with pytest.raises(ScheduleError, match="use num_microbatches=4 or"):
        search(HEAVY, replace(request, schedule="1f1b", virtual_stages=1, num_ranks=4,
                              num_microbatches=2))  # fmt: skip
    with pytest.raises(PlanError, match="20 stages out of 14 units"):
        search(HEAVY, Request(rows=80, devices=20, num_ranks=20))


@pytest.mark.parametrize("balance", [*BALANCES, (2, 5, 6, 1)], ids=str)
def test_every_balance_cuts(balance: str | tuple[int, ...]) -> None:
    request = Request(rows=16, devices=4, num_ranks=4, schedule="1f1b", balance=balance)
    starts = search(HEAVY, request).chosen.starts
    expected = {
        "uniform": uniform(14, 4), (2, 5, 6, 1): (0, 2, 7, 13),
        "time": (0, 5, 9, 13), "auto": (0, 5, 9, 13), "flops": (0, 5, 9, 13),
        "parameters": (0, 1, 7, 13),
    }  # fmt: skip
    if balance in expected:
        assert starts == expected[balance]
    else:
        ledgers = [search(HEAVY, replace(request, balance=b)).chosen.ledger
                   for b in ("memory", "flops", "uniform")]  # fmt: skip
        peaks = [max(ledger.rank_peak_bytes) for ledger in ledgers]
        assert peaks[0] == min(peaks)
    named = replace(request, split_points=("embed", "blocks.3", "blocks.11"))
    assert search(HEAVY, named).chosen.starts == (0, 1, 5, 13)


def test_time_needs_times() -> None:
    untimed = Profile(HEAVY.units[:2], HEAVY.weights)
    untimed = replace(untimed, units=tuple(replace(u, forward_s=0.0, input_s=0.0, weight_s=0.0)
                                           for u in untimed.units))  # fmt: skip
    with pytest.raises(PlanError, match="balance='time' needs measured costs"):
        unit_work(untimed, "time")
    assert unit_work(untimed, "auto") == [0.0, untimed.units[1].flops]
    still = replace(untimed, units=tuple(replace(u, flops=0) for u in untimed.units))
    assert unit_work(still, "auto") == [32_000 * 256, 12 * 256**2]


def test_the_thin_boundary_is_put_between_machines() -> None:
    """Two machines of two: the border in the middle goes where the model is narrow."""
    units = tuple(
        UnitProfile(
            str(i), forward_s=1.0, input_s=1.0, weight_s=1.0,
            output_bytes=10 if i == 4 else 10**6, gradient_bytes=10 if i == 4 else 10**6,
        )
        for i in range(8)
    )  # fmt: skip
    profile = Profile(units, {})
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    slow = LinkCosts(0.0, 1e5)
    request = Request(rows=16, devices=4, topology=Topology(2, LinkCosts(0.0, 1e9), slow))
    assert starts_for(profile, request, schedule)[2] == 5
    assert starts_for(profile, replace(request, topology=Topology()), schedule)[2] == 4
    found = search(profile, replace(request, num_ranks=4, schedule="1f1b"))
    assert "stage borders between machines: 1|2" in "\n".join(explain(found))


def test_no_stage_ends_where_nothing_can_be_sent() -> None:
    units = tuple(replace(u, can_cut_after=i != 6) for i, u in enumerate(llm(12).units))
    request = Request(rows=8, devices=2, num_ranks=2, schedule="1f1b")
    assert search(llm(12), request).chosen.starts == (0, 7)
    assert search(replace(llm(12), units=units), request).chosen.starts in ((0, 6), (0, 8))


def test_collectives() -> None:
    link = LinkCosts(1.0, 100.0)
    assert all_reduce_s(400, 4, link) == 6 * (1.0 + 1.0)
    assert all_reduce_s(400, 1, link) == 0.0
    halved = tensor_parallel(HEAVY, 2, LinkCosts())
    assert halved.num_parameters == HEAVY.num_parameters / 2
    assert step_s(halved, (0, 7)) == pytest.approx(step_s(HEAVY, (0, 7)) / 2)
    assert step_s(tensor_parallel(HEAVY, 2, LinkCosts(1.0)), (0, 7)) > step_s(HEAVY, (0, 7))
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    costs = HEAVY.stage_costs((0, 7))
    plain = simulate(schedule, costs).step_s
    assert simulate(schedule, costs, after_s=[0.5, 0.0]).step_s == pytest.approx(plain + 0.5)


def test_a_plan_of_a_very_large_model_is_quick() -> None:
    """126 layers on 64 ranks; benchmarks/plan_large_model.py does it for every P, traced."""
    layers = llm(126, vocabulary=128_000, width=1024)
    request = Request(rows=256, devices=64, num_ranks=64, schedule="1f1b", cap_bytes=80 * GIB)
    begin_s = time.process_time()
    found = search(layers, request)
    assert time.process_time() - begin_s < 10
    assert found.chosen.ledger.fits


def test_simulation_of_many_ranks_is_quick() -> None:
    """A quarter of what benchmarks/plan_large_model.py does with 512 micro-batches."""
    profile = llm(254, vocabulary=10)
    schedule = make_schedule("interleaved_1f1b", num_ranks=64, num_microbatches=128,
                             virtual_stages=4)  # fmt: skip
    costs = profile.stage_costs(tuple(range(256)))
    begin_s = time.process_time()
    timeline = simulate(schedule, costs)
    assert time.process_time() - begin_s < 5
    assert timeline.step_s > 0


def test_one_combination_by_hand() -> None:
    outcome = try_one(HEAVY, Request(rows=8, devices=2), Candidate(2, 1, 8, "1f1b"))
    assert outcome.profile.rows == 1
    assert outcome.step_s == pytest.approx(step_s(HEAVY, outcome.starts))
    assert outcome.seconds_per_row == outcome.step_s / 8
