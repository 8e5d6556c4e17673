"""The engine is invisible: loss and every gradient are those of the model in one piece."""

import pytest
import torch
from tests.helpers import run_ranks
from tests.runtime.models import MODELS, Stage, cut, make_batch, make_model, run_whole

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.ranks import make_ranks

CPU = torch.device("cpu")
NUM_MICROBATCHES = (1, 2, 3, 4, 5, 8)


def rows(num_microbatches, seed=0):
    """Uneven micro-batches: 3, 2, 4, 3, 2, ... rows."""
    return [2 + (seed + 1 + m * 2) % 3 for m in range(num_microbatches)]


def schedules(num_ranks, num_microbatches):
    for name in SCHEDULES:
        for virtual_stages in (1, 2):
            try:
                yield make_schedule(
                    name,
                    num_ranks=num_ranks,
                    num_microbatches=num_microbatches,
                    virtual_stages=virtual_stages,
                    strict=False,
                )
            except ScheduleError:
                continue


def run(engine, schedule, model, batch, *, training=True):
    starts = cut(model, schedule.num_stages)
    stages = {
        stage: Stage(model, stage, starts, batch)
        for stage in schedule.stages(engine.ranks.position)
    }
    spans = engine.run(schedule, stages, training=training)
    assert [span.action for span in spans] == list(schedule.actions(engine.ranks.position))
    return stages


def check_step(engine, schedule, name, *, steps=1):
    """Runs steps with the pipeline and with the whole model and compares losses and gradients."""
    model, reference = make_model(name), make_model(name)
    for step in range(steps):
        batch = make_batch(rows(schedule.num_microbatches, step), seed=step)
        losses = run_whole(reference, batch)
        stages = run(engine, schedule, model, batch)
        where = f"{schedule.name}, P={schedule.num_ranks}, S={schedule.num_stages}, {name}"
        last = stages.get(schedule.num_stages - 1)
        if last is not None:
            actual = [last.losses[m] for m in range(schedule.num_microbatches)]
            torch.testing.assert_close(actual, losses, rtol=1e-10, atol=1e-12, msg=where)
        compare_gradients(model, reference, schedule, stages, where)


def compare_gradients(model, reference, schedule, stages, where):
    starts = [*cut(model, schedule.num_stages), len(model)]
    for stage in stages:
        for index in range(starts[stage], starts[stage + 1]):
            for (key, mine), theirs in zip(
                model[index].named_parameters(), reference[index].parameters(), strict=True
            ):
                torch.testing.assert_close(
                    mine.grad,
                    theirs.grad,
                    rtol=1e-9,
                    atol=1e-11,
                    msg=lambda text, i=index, k=key: f"{where}: block {i} {k}: {text}",
                )


def transparency(num_ranks, num_microbatches, names):
    engine = None
    for schedule in schedules(num_ranks, num_microbatches):
        order = schedule.stage_to_rank[-1]
        if engine is None or engine.order != order:
            engine = Engine(make_ranks(schedule.stage_to_rank, num_ranks), CPU)
            engine.order = order
        for name in names:
            check_step(engine, schedule, name)


@pytest.mark.parametrize("num_microbatches", NUM_MICROBATCHES)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_schedule_gives_the_gradients_of_the_whole_model(num_ranks, num_microbatches):
    names = list(MODELS)
    if num_ranks == 1:
        transparency(1, num_microbatches, names)
    else:
        run_ranks(num_ranks, transparency, num_ranks, num_microbatches, names, timeout=100)
