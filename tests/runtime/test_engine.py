"""The engine is invisible: loss and every gradient are those of the model in one piece."""

import gc
import weakref

import pytest
import torch
from tests.helpers import run_ranks
from tests.runtime.models import (
    MODELS,
    Stage,
    cut,
    legal,
    make_batch,
    make_model,
    make_specs,
    run_whole,
)

from lightning_pipe.errors import ConfigError, PeerError, StageMismatchError
from lightning_pipe.planning.schedules import forward_only, make_schedule
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.overhead import action_overhead_s
from lightning_pipe.runtime.ranks import make_ranks, rank_order
from lightning_pipe.runtime.transfer import Links
from lightning_pipe.split.spec import ValueSpec

CPU = torch.device("cpu")
NUM_MICROBATCHES = (1, 2, 3, 4, 5, 8)


def rows(num_microbatches, seed=0):
    """Uneven micro-batches: 3, 2, 4, 3, 2, ... rows."""
    return [2 + (seed + 1 + m * 2) % 3 for m in range(num_microbatches)]


class Case:
    """A model, its batch, and what the model in one piece makes of it."""

    def __init__(self, name, num_microbatches, seed=0):
        self.name = name
        self.model, reference = make_model(name), make_model(name)
        self.batch = make_batch(rows(num_microbatches, seed), seed=seed)
        self.specs = make_specs(reference, self.batch)
        self.losses = run_whole(reference, self.batch)
        self.grads = [[p.grad for p in block.parameters()] for block in reference]


def run(engine, schedule, case, *, training=True):
    starts = cut(case.model, schedule.num_stages)
    stages = {
        stage: Stage(case.model, stage, starts, case.batch, case.specs)
        for stage in schedule.stages(engine.ranks.position)
    }
    spans = engine.run(schedule, stages, training=training)
    assert [span.action for span in spans] == list(schedule.actions(engine.ranks.position))
    return stages


def check(engine, schedule, case):
    """Runs a step and compares what this rank has of it, losses and gradients, with the case."""
    case.model.zero_grad()
    stages = run(engine, schedule, case)
    where = f"{schedule.name}, P={schedule.num_ranks}, S={schedule.num_stages}, {case.name}"
    last = stages.get(schedule.num_stages - 1)
    if last is not None:
        close([last.losses[m] for m in range(len(case.batch))], case.losses, where)
    starts = [*cut(case.model, schedule.num_stages), len(case.model)]
    for stage in stages:
        for index in range(starts[stage], starts[stage + 1]):
            grads = [p.grad for p in case.model[index].parameters()]
            close(grads, case.grads[index], f"{where}: gradient of block {index}")


def close(actual, expected, where):
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine is None) == (theirs is None), where
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11, msg=where)


def transparency(num_ranks, num_microbatches, names, at_once):
    """Checks every schedule on the next `at_once` models."""
    cases = [Case(name, num_microbatches) for name in names]
    engines = {}
    for schedule in legal(num_ranks, num_microbatches):
        order = rank_order(schedule.stage_to_rank, num_ranks)
        if order not in engines:
            engines[order] = Engine(make_ranks(schedule.stage_to_rank, num_ranks), CPU)
        for case in cases[:at_once]:
            check(engines[order], schedule, case)
        cases = cases[at_once:] + cases[:at_once]


@pytest.mark.parametrize("num_microbatches", NUM_MICROBATCHES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_schedule_gives_the_gradients_of_the_whole_model(num_ranks, num_microbatches):
    arguments = num_ranks, num_microbatches, list(MODELS), {1: 7, 2: 4, 4: 2}[num_ranks]
    if num_ranks == 1:
        transparency(*arguments)
    else:
        run_ranks(num_ranks, transparency, *arguments, timeout=150)


def shapes_change_and_evaluations_interleave():
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    engine = Engine(make_ranks(schedule.stage_to_rank, 2), CPU)
    for step, name in enumerate(["skips", "skips", "encoder_decoder", "skips"]):
        check(engine, schedule, Case(name, 3, seed=step))
        evaluate(engine, Case(name, 4, seed=step + 10), placement=schedule.stage_to_rank)


def evaluate(engine, case, placement):
    """Runs a forward-only schedule and compares its losses; nothing with a graph may be left."""
    schedule = forward_only(placement, len(case.batch), num_ranks=engine.ranks.num_positions)
    case.model.zero_grad()
    stages = run(engine, schedule, case, training=False)
    if schedule.num_stages - 1 in stages:
        losses = stages[schedule.num_stages - 1].losses
        close([losses[m] for m in range(len(case.batch))], case.losses, case.name)
    assert all(p.grad is None for p in case.model.parameters())


def test_shapes_change_between_steps_and_evaluations_interleave():
    run_ranks(2, shapes_change_and_evaluations_interleave)


def evaluate_laps(num_ranks, placements):
    engine = Engine(make_ranks(range(num_ranks), num_ranks), CPU)
    for placement in placements:
        for name in ("skips", "encoder_decoder", "awkward"):
            evaluate(engine, Case(name, 3), placement)


def test_evaluation_goes_where_the_units_are():
    """Laps over the ranks, neighbours on one rank, a rank without work."""
    run_ranks(2, evaluate_laps, 2, [(0, 1, 0, 1), (0, 0, 1), (1, 1, 0, 0, 1), (0, 0), (1,)])
    evaluate_laps(1, [(0,), (0, 0, 0)])


def repeat(num_ranks, name, virtual_stages, num_microbatches):
    schedule = make_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    engine = Engine(make_ranks(schedule.stage_to_rank, num_ranks), CPU)
    case = Case("skips", num_microbatches)
    for _ in range(20):
        check(engine, schedule, case)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zbv"])
def test_twenty_steps_do_not_deadlock(name):
    """With more messages under way than are kept: a send was once waited for twice, for ever."""
    run_ranks(2, repeat, 2, name, 2, 8)


class Counting(Stage):
    """Counts the micro-batches whose graph is alive, by what autograd saved for them."""

    def __init__(self, *args):
        super().__init__(*args)
        self.alive, self.peak = weakref.WeakSet(), 0

    def forward(self, microbatch, received):
        with self.watched():
            result = super().forward(microbatch, received)
        self.peak = max(self.peak, len(self.alive))
        return result

    def watched(self):
        token = Token()
        self.alive.add(token)
        return torch.autograd.graph.saved_tensors_hooks(lambda t: (token, t), lambda kept: kept[1])


class Token:
    """Lives as long as something that autograd saved."""


def peaks(name, num_microbatches):
    schedule = make_schedule(name, num_ranks=4, num_microbatches=num_microbatches)
    engine = Engine(make_ranks(schedule.stage_to_rank, 4), CPU)
    case = Case("chain", num_microbatches)
    starts = cut(case.model, 4)
    stage = engine.ranks.position
    found, live = [], []
    for _ in range(4):
        case.model.zero_grad()
        work = Counting(case.model, stage, starts, case.batch, case.specs)
        engine.run(schedule, {stage: work}, training=True)
        assert not work.alive, "a graph outlived its step"
        found.append(work.peak)
        del work
        gc.collect()
        live.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    assert len(set(live[1:])) == 1, f"tensors live after each step: {live}"
    assert len(set(found)) == 1
    return stage, found[0]


@pytest.mark.parametrize(
    ("name", "expected"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8]), ("naive", [1, 1, 1, 1])]
)
def test_live_graphs_are_bounded_by_the_schedule(name, expected):
    by_stage = dict(run_ranks(4, peaks, name, 8))
    assert [by_stage[stage] for stage in range(4)] == expected


def buffers(num_microbatches):
    """The most bytes that boundaries of this rank have at a time, in a step that has settled."""
    schedule = make_schedule("1f1b", num_ranks=4, num_microbatches=num_microbatches)
    engine = Engine(make_ranks(schedule.stage_to_rank, 4), CPU)
    model, batch = make_model("chain"), make_batch([64] * num_microbatches)
    stage = engine.ranks.position
    work = Stage(model, stage, cut(model, 4), batch)
    alive, peak = weakref.WeakSet(), 0

    class Tracked(Links):
        def _post(self, sends, tensors, position):
            nonlocal peak
            alive.update(tensors)
            peak = max(peak, sum(t.untyped_storage().nbytes() for t in alive))
            return super()._post(sends, tensors, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pipe.runtime.engine.Links", Tracked)
        engine.run(schedule, {stage: work}, training=True)
    return stage, peak


def test_boundary_buffers_do_not_grow_with_the_micro_batches():
    by_stage, message = dict(run_ranks(4, buffers, 64)), 64 * 6 * 8
    for stage in range(4):
        # to each neighbour eight sends are under way and one begins; receives are made just in time
        assert 0 < by_stage[stage] <= (2 * 9 + 4) * message


def test_nothing_is_kept_of_an_evaluation():
    engine = Engine(make_ranks([0], 1), CPU)
    case = Case("chain", 3)
    work = Counting(case.model, 0, [0], case.batch, case.specs)
    engine.run(forward_only([0], 3), {0: work}, training=False)
    assert work.peak == 0
    assert not any(loss.requires_grad for loss in work.losses.values())


class Raising(Stage):
    def forward(self, microbatch, received):
        if microbatch == 2:
            raise KeyError("the user's own")
        return super().forward(microbatch, received)


def test_an_exception_keeps_its_type_and_says_where(caplog):
    engine = Engine(make_ranks([0, 0], 1), CPU)
    case = Case("chain", 4)
    starts = cut(case.model, 2)
    schedule = make_schedule("gpipe", num_ranks=1, num_microbatches=4, virtual_stages=2)
    stages = {
        0: Stage(case.model, 0, starts, case.batch),
        1: Raising(case.model, 1, starts, case.batch),
    }
    with pytest.raises(KeyError, match="the user's own") as caught:
        engine.run(schedule, stages, training=True)
    if hasattr(caught.value, "__notes__"):  # Python 3.11
        rows_of_2 = len(case.batch[2])
        assert caught.value.__notes__ == [
            f"stage 1, rank 0, action 1F2, micro-batch 2, given h4 ({rows_of_2}, 6) float64"
        ]
    assert not caplog.records, "torch's own report of the whole schedule is kept quiet"
    case.model.zero_grad()
    check(engine, schedule, case)  # the engine can be used again


class WrongShape(Stage):
    def forward(self, microbatch, received):
        return tuple(value[:1] for value in super().forward(microbatch, received))


def wrong_shape():
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=2)
    engine = Engine(make_ranks(schedule.stage_to_rank, 2), CPU)
    case = Case("chain", 2)
    kind = [WrongShape, Stage][engine.ranks.position]
    work = kind(case.model, engine.ranks.position, cut(case.model, 2), case.batch)
    expected = [StageMismatchError, PeerError][engine.ranks.position]
    with pytest.raises(expected) as caught:
        engine.run(schedule, {engine.ranks.position: work}, training=True)
    if engine.ranks.position == 0:
        torch.distributed.destroy_process_group()  # as the end of the process does
    return str(caught.value)


def test_a_wrong_shape_is_an_error_before_it_is_sent():
    broken, wrong = run_ranks(2, wrong_shape)  # stage 0 is on global rank 1
    assert wrong.startswith("stage 0 gave 'h4' as (1, 6) float64; the next stage was told (3, 6) ")
    assert "the connection to rank 0 (global rank 1) broke" in broken


def test_stages_must_be_those_of_the_schedule():
    engine = Engine(make_ranks([0], 1), CPU)
    with pytest.raises(ConfigError, match=r"holds the stages \[0\]; got \[\] on rank 0 of 1"):
        engine.run(forward_only([0], 1), {}, training=False)


class Typed:
    """Stage 0 makes one value of each type, stage 1 checks it."""

    def __init__(self, stage):
        self.stage, self.last = stage, stage == 2
        self.values = [
            torch.arange(6).reshape(2, 3).to(dtype)
            for dtype in (torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.complex64)
        ]
        self.values += [torch.tensor(7.0), torch.empty(0, 4), torch.arange(6.0).reshape(2, 3).t()]
        self.values += [torch.ones(1).expand(5), torch.tensor([1 + 2j]).conj()]

    def specs(self):
        return tuple(
            ValueSpec(str(i), tuple(v.shape), v.dtype, False) for i, v in enumerate(self.values)
        )

    def inputs(self, microbatch):
        return self.specs() if self.stage else ()

    def outputs(self, microbatch):
        return () if self.last else self.specs()

    def weights(self):
        return []

    def recomputes(self, microbatch):
        return False

    def forward(self, microbatch, received):
        for mine, other in zip(self.values, received if self.stage else self.values, strict=True):
            assert torch.equal(mine, other)
        return () if self.last else tuple(self.values)


def every_type():
    engine = Engine(make_ranks([0, 1, 0], 2), CPU)
    own = [0, 2] if engine.ranks.position == 0 else [1]
    engine.run(forward_only([0, 1, 0], 2), {s: Typed(s) for s in own}, training=False)


def test_every_type_and_layout_crosses():
    run_ranks(2, every_type)


def test_spans_are_ordered_and_read_like_a_list():
    engine = Engine(make_ranks([0], 1), CPU)
    case = Case("chain", 2)
    work = Stage(case.model, 0, [0], case.batch)
    spans = engine.run(
        make_schedule("gpipe", num_ranks=1, num_microbatches=2), {0: work}, training=True
    )
    times = [time for span in spans for time in (span.start_s, span.end_s)]
    assert times == sorted(times)
    assert [str(span.action) for span in spans[:2]] == ["0F0", "0F1"]
    assert len(spans) == 4


def test_what_an_action_takes_is_measured_by_one_rank() -> None:
    assert 0 < action_overhead_s(CPU, repeats=2) < 1
