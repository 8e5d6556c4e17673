"""What people write by hand is read right or refused with a reason, by the thousand.

Files of schedules, plans and costs that were edited, cut off or are no such files at all; sizes,
costs and limits of any kind for the planner. Nothing else than an error of ours may come out, and
what is accepted has to be right.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.planning.test_properties import assert_sound

from lightning_pipe.errors import PipelineError, PlanError, ScheduleError
from lightning_pipe.planfile import read_costs, read_plan, with_plan
from lightning_pipe.planning.attribution import attribute_bubble
from lightning_pipe.planning.balance import loads, partition
from lightning_pipe.planning.costs import CostTable, LinkCosts, StageCosts, UnitCosts
from lightning_pipe.planning.doctor import Run, examine
from lightning_pipe.planning.estimate import parse_bytes
from lightning_pipe.planning.evidence import FILE_NAME, read_evidence, to_text
from lightning_pipe.planning.ir import Action, Schedule
from lightning_pipe.planning.plan import Plan, Prediction, StagePlan
from lightning_pipe.planning.render import chrome_trace
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.planning.simulate import peak_activation_bytes, simulate

many = settings(max_examples=400, deadline=None, derandomize=True, database=None)
small = st.integers(1, 4)
junk = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**12), st.text(max_size=6),
    st.floats(allow_nan=True, allow_infinity=True),
    st.lists(st.integers(-1, 3), max_size=3), st.dictionaries(st.text(max_size=3), st.integers()),
)  # fmt: skip


def tried(call: Callable[[], Any]) -> tuple[Any, str]:
    """What a call returns, or what an error of ours says; others are not to be raised."""
    try:
        return call(), ""
    except PipelineError as error:
        return None, str(error)


def a_schedule(source: random.Random) -> Schedule:
    while True:
        name = source.choice(sorted(SCHEDULES))
        sizes = {"num_ranks": source.randint(1, 4), "num_microbatches": source.randint(1, 6)}
        try:
            return make_schedule(name, virtual_stages=source.randint(1, 3), strict=False, **sizes)
        except ScheduleError:
            continue


def mangled(cells: list[list[str]], source: random.Random) -> list[list[str]]:
    """A table after a few edits of the kinds that people make."""
    for _ in range(source.choice((0, 1, 1, 2, 4))):
        rows = [i for i, row in enumerate(cells) if row]
        if not rows:
            break
        row = source.choice(rows)
        place = source.randrange(len(cells[row]))
        other_row = source.choice(rows)
        other = source.randrange(len(cells[other_row]))
        kind = source.randrange(8)
        if kind == 0:
            del cells[row][place]
        elif kind == 1:
            cells[row][place], cells[other_row][other] = cells[other_row][other], cells[row][place]
        elif kind == 2:
            cells[row].insert(place, cells[other_row][other])
        elif kind == 3:
            cells[row][place] = source.choice(("", " ", "0F", "F0", "999999999F1", "0F999999999"))
        elif kind == 4:
            cells[row][place] = cells[row][place].replace("B", source.choice("IWFX"))
        elif kind == 5:
            cells.pop(row)
        elif kind == 6:
            cells.insert(row, list(cells[other_row]))
        else:
            cells[row][place] = f" {cells[row][place]} "
    return cells


@given(seed=st.integers(0, 2**32))
@settings(many, max_examples=1500)
def test_an_edited_schedule_runs_or_is_refused(seed: int) -> None:
    source = random.Random(seed)
    schedule = a_schedule(source)
    cells = [[str(action or "") for action in order] for order in schedule.aligned().orders]
    text = "\n".join(",".join(row) for row in mangled(cells, source))
    read, said = tried(lambda: Schedule.from_csv(text))
    if read is None:
        assert said
        return
    assert_sound(read)
    assert Schedule.from_csv(read.to_csv()).orders == read.orders
    assert str(read)


@given(text=st.one_of(st.text(), st.text(alphabet='0123FBIW,\n"# ', max_size=60)))
@many
def test_any_text_as_a_schedule(text: str) -> None:
    schedule, said = tried(lambda: Schedule.from_csv(text))
    if schedule is None:
        assert said
    else:
        assert_sound(schedule)
    action, said = tried(lambda: Action.parse(text))
    assert said if action is None else Action.parse(str(action)) == action


def test_a_schedule_of_another_kind_of_file(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    for content in (b"\xff\xfe\x00", b'"' + b"0" * 200_000, b"0F0\x00,0B0", b"\r\r,,\n"):
        path.write_bytes(content)
        with pytest.raises(ScheduleError, match=r"s\.csv"):
            make_schedule(str(path), num_ranks=1, num_microbatches=1)


@given(
    name=st.one_of(st.sampled_from(sorted(SCHEDULES)), st.text(max_size=5)),
    ranks=st.integers(-1, 9), pieces=st.integers(-1, 20), chunks=st.integers(-1, 5),
    strict=st.booleans(),
)  # fmt: skip
@settings(many, max_examples=1000)
def test_any_size_of_schedule(
    name: str, ranks: int, pieces: int, chunks: int, strict: bool
) -> None:
    sizes = {"num_ranks": ranks, "num_microbatches": pieces, "virtual_stages": chunks}
    made, said = tried(lambda: make_schedule(name, strict=strict, **sizes))
    if made is None:
        assert said
        return
    assert (made.num_ranks, made.num_microbatches) == (ranks, pieces)
    assert_sound(made)


@given(seed=st.integers(0, 2**32))
@settings(many, max_examples=1000)
def test_simulated_times_are_possible(seed: int) -> None:
    """No rank does two things at a time, nothing starts before what it needs is there, and the
    step is no longer than everything one after the other."""
    source = random.Random(seed)
    schedule = a_schedule(source)
    costs = [
        StageCosts(*(source.choice((0.0, 1e-9, source.random(), 1e6)) for _ in range(3)),
                   source.randrange(100), source.randrange(100), source.choice((None, 7)))
        for _ in range(schedule.num_stages)
    ]  # fmt: skip
    link = LinkCosts(source.choice((0.0, 0.5)), source.choice((math.inf, 10.0)))
    timeline = simulate(schedule, costs, link)
    ends = {span.action: span.end_s for span in timeline.spans}
    assert len(ends) == sum(len(schedule.actions(rank)) for rank in range(schedule.num_ranks))
    made_by = {schedule.makes(action): action for action in ends}
    longest = 1 + 1e-9
    for rank in range(schedule.num_ranks):
        own = [span for span in timeline.spans if span.rank == rank]
        for one, other in itertools.pairwise(own):
            assert one.end_s <= other.start_s * longest
        for span in own:
            needed = schedule.needs(span.action)
            if needed is not None and span.action.op.value != "W":
                assert ends[made_by[needed]] <= span.start_s * longest
    sent = sum(2 * link.transfer_s(100) for _ in range(len(ends)))
    work = sum(span.duration_s for span in timeline.spans)
    busiest = max(timeline.busy_s(rank) for rank in range(schedule.num_ranks))
    assert busiest <= timeline.step_s * longest
    assert timeline.step_s <= (work + sent) * longest
    peaks = peak_activation_bytes(schedule, costs)
    each = [cost.activation_bytes for cost in costs]
    for rank, peak in enumerate(peaks):
        whole = sum(each[stage] for stage in schedule.stages(rank)) * schedule.num_microbatches
        assert 0 <= peak <= whole


def _plan(ranks: int, chunks: int) -> Plan:
    stages = tuple(
        StagePlan(s, s % ranks, f"blocks.{s}", f"blocks.{s}", 1, 10, 40, 100, 8, 4, ("tied",))
        for s in range(ranks * chunks)
    )
    name = "1f1b" if chunks == 1 else "interleaved_1f1b"
    prediction = Prediction(0.1, 0.2, 0.1, 0.05, 0.05, (100,) * ranks, "from FLOPs")
    return Plan(stages, name, ranks, chunks, 8, "flops", 0.1, ("a note",), False, prediction)


def mutated(value: Any, source: random.Random, other: Callable[[], Any]) -> Any:
    """The same nest with one thing in it removed, renamed, doubled or replaced."""
    if isinstance(value, dict) and value:
        found = dict(value)
        key = source.choice(sorted(found, key=str))
        kind = source.randrange(6)
        if kind == 0:
            del found[key]
        elif kind == 1:
            found[source.choice(("extra", 3, None))] = found.pop(key)
        elif kind == 2:
            found[key] = other()
        else:
            found[key] = mutated(found[key], source, other)
        return found
    if isinstance(value, list) and value:
        items = list(value)
        place = source.randrange(len(items))
        kind = source.randrange(5)
        if kind == 0:
            del items[place]
        elif kind == 1:
            items.insert(place, items[place])
        else:
            items[place] = mutated(items[place], source, other)
        return items
    return other()


@given(seed=st.integers(0, 2**32), ranks=small, chunks=small, data=st.data())
@settings(many, max_examples=800)
def test_an_edited_plan_is_right_or_refused(
    seed: int, ranks: int, chunks: int, data: st.DataObject
) -> None:
    source = random.Random(seed)
    values = mutated(_plan(ranks, chunks).to_dict(), source, lambda: data.draw(junk))
    plan, said = tried(lambda: read_plan(values))
    if plan is None:
        assert "plan cannot be read" in said
        return
    assert read_plan(json.loads(json.dumps(plan.to_dict()))) == plan
    assert len(plan.stages) == plan.num_ranks * plan.virtual_stages
    assert plan.describe()
    free = {"num_microbatches": None, "schedule": "auto", "virtual_stages": 1, "balance": "auto",
            "activation_checkpointing": "auto"}  # fmt: skip
    number, arguments = with_plan(plan, None, free)
    assert number == plan.num_ranks
    assert sum(arguments["balance"]) >= len(plan.stages)


@given(text=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
@settings(many, max_examples=300)
def test_any_file_as_a_plan(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text)
    with pytest.raises(PlanError, match="cannot be read"):
        read_plan(path)
    with pytest.raises(PlanError, match="cannot be read"):
        read_costs(path)


def test_a_cut_off_plan_is_refused(tmp_path: Path) -> None:
    """A plan may be half written when a disk is full: at whatever byte it ends."""
    text, path = yaml.safe_dump(_plan(2, 1).to_dict(), sort_keys=False), tmp_path / "plan.yaml"
    whole = read_plan(_plan(2, 1))
    for end in range(0, len(text) - 1, 7):
        path.write_text(text[:end])
        read, said = tried(lambda: read_plan(path))
        if read is None:
            assert "cannot be read" in said
        else:  # what is left out is what need not be there
            assert replace(read, notes=(), prediction=whole.prediction) == replace(whole, notes=())


@given(seed=st.integers(0, 2**32), data=st.data())
@settings(many, max_examples=500)
def test_edited_costs_are_right_or_refused(seed: int, data: st.DataObject) -> None:
    units = tuple(UnitCosts(f"u{i}", 0.1, 0.2, 0.3, 4, 5, 6) for i in range(3))
    table = CostTable(units, LinkCosts(1e-5, 1e9), "cpu", 4, 1e-4, LinkCosts(1e-4, 1e8))
    values = mutated(json.loads(table.to_json()), random.Random(seed), lambda: data.draw(junk))
    read, said = tried(lambda: CostTable.from_json(json.dumps(values)))
    if read is None:
        assert "cost table cannot be read" in said
        return
    assert CostTable.from_json(read.to_json()) == read
    times = [unit.forward_s for unit in read.units]
    assert all(math.isfinite(time) and time >= 0 for time in times)
    if len(times) >= 2:
        partition(times, 2)


@given(
    costs=st.lists(st.one_of(st.integers(0, 9), st.floats()), max_size=8),
    parts=st.integers(-1, 5), least=st.integers(0, 3),
)  # fmt: skip
@settings(many, max_examples=600)
def test_any_costs_are_balanced_exactly_or_refused(
    costs: list[float], parts: int, least: int
) -> None:
    starts, said = tried(lambda: partition(costs, parts, min_per_part=least))
    if starts is None:
        assert said
        legal = all(math.isfinite(cost) and cost >= 0 for cost in costs)
        assert not (legal and parts >= 1 and least >= 1 and len(costs) >= parts * least)
        return
    edges = [*starts, len(costs)]
    assert all(b - a >= least for a, b in itertools.pairwise(edges))
    best = min(
        max(loads(costs, (0, *cuts)))
        for cuts in itertools.combinations(range(1, len(costs)), parts - 1)
        if all(b - a >= least for a, b in itertools.pairwise((0, *cuts, len(costs))))
    )
    assert max(loads(costs, starts)) <= best * (1 + 1e-12)


@given(text=st.one_of(st.text(max_size=12), st.from_regex(r"[0-9.e+-]{1,6} ?[KMGT]?i?B?")))
@settings(many, max_examples=500)
def test_any_amount_of_memory(text: str) -> None:
    found, said = tried(lambda: parse_bytes(text))
    assert "give a number with a unit" in said if found is None else found >= 0


@pytest.mark.parametrize("kind", ["trace", "monitor"])
@given(seed=st.integers(0, 2**32), data=st.data())
@settings(many, max_examples=300)
def test_an_edited_record_of_a_run_is_read_or_refused(
    seed: int, data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What the doctor reads is one it can judge, or no record of a run."""
    folder = tmp_path_factory.getbasetemp()
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    timeline = simulate(schedule, [StageCosts(1.0, 1.0, 2.0), StageCosts(1.0, 1.0, 1.0)])
    run = Run.of(schedule)
    if kind == "trace":
        values, path = chrome_trace(timeline, run.to_dict()), folder / "step.json"
    else:
        values = json.loads(to_text(run, attribute_bubble(timeline, schedule)))
        path = folder / FILE_NAME
    source = random.Random(seed)
    for _ in range(source.choice((1, 1, 3))):
        values = mutated(values, source, lambda: data.draw(junk))
    path.write_text(json.dumps(values))
    evidence, said = tried(lambda: read_evidence(path))
    if evidence is None:
        assert str(path) in said
    else:
        verdicts = examine(evidence.found, evidence.run, evidence.losses)
        assert all(str(verdict) for verdict in verdicts)
