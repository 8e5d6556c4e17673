"""What is about to run is proved to come to an end, and ranks that differ are found before it."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from tests import lit
from tests.runtime.models import legal
from torch.utils.data import DataLoader

from lightning_pipe.errors import ScheduleError, StageMismatchError
from lightning_pipe.planning.plan import Plan, StagePlan
from lightning_pipe.planning.schedules import SCHEDULES, forward_only, make_schedule
from lightning_pipe.preflight import refuse_different
from lightning_pipe.runtime import _torch
from lightning_pipe.runtime.preflight import check_deeds


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_passes_as_it_is_lowered(name):
    checked = 0
    for num_ranks in (1, 2, 3, 4, 8):
        for num_microbatches in (1, 2, 4, 8, 9):
            for schedule in legal(num_ranks, num_microbatches, [name]):
                check_deeds(schedule, _torch.deeds(_torch.lower(schedule)))
                checked += 1
    assert checked >= 10


def test_evaluation_over_any_chain_passes():
    for placement in ((0, 1, 0, 1), (1, 1, 0, 0, 1), (0, 0), (1,), (2, 0, 1, 2)):
        schedule = forward_only(placement, 3, num_ranks=max(placement) + 1)
        check_deeds(schedule, _torch.deeds(_torch.lower(schedule)))


def lowered():
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=3)
    return schedule, _torch.deeds(_torch.lower(schedule))


def place(deeds, rank, text):
    return [str(deed) for deed in deeds[rank]].index(text)


def swap(deeds, rank, one, other):
    a, b = place(deeds, rank, one), place(deeds, rank, other)
    deeds[rank][a], deeds[rank][b] = deeds[rank][b], deeds[rank][a]


def damage(deeds, rank, *texts):
    if len(texts) == 1:
        del deeds[rank][place(deeds, rank, texts[0])]
    else:
        swap(deeds, rank, *texts)


@pytest.mark.parametrize(
    ("rank", "texts", "message"),
    [
        (0, ["0F1"], r"rank 0 would not run the actions .*: the 2\. is 0F2 and 0F1|0B0 and 0F1"),
        (1, ["1F0", "1B0"], r"rank 1 would not run .*: the 1\. is 1B0 and 1F0"),
        (1, ["receive of 1F0", "1F0"], r"rank 1, step 0: the 1F0 comes before what it needs"),
        (0, ["send of 0F0", "0F0"], r"rank 0, step 0: the send of 0F0 comes before what it needs"),
        (0, ["send of 0F2"], r"ranks 0 and 1 would not exchange the same messages .*"),
        (1, ["receive of 1F1", "receive of 1F2"], r"comes before what it needs|the same order"),
        (1, ["send of 1B2"], r"ranks 0 and 1 would not exchange .*: there are 6 and 5"),
    ],
)
def test_a_damaged_order_is_refused_with_its_place(rank, texts, message):
    schedule, deeds = lowered()
    check_deeds(schedule, deeds)
    damage(deeds, rank, *texts)
    with pytest.raises(ScheduleError, match=message):
        check_deeds(schedule, deeds)


def test_a_deadlock_of_messages_is_found():
    """Messages of every pair are in order, and yet a rank waits for what its own will bring."""
    schedule = forward_only((0, 1, 2, 0, 1, 2), 2, num_ranks=3)
    deeds = _torch.deeds(_torch.lower(schedule))
    check_deeds(schedule, deeds)
    # rank 0 waits for micro-batch 0 to come round before it has sent it on its way
    receive = deeds[0].pop(place(deeds, 0, "receive of 3F0"))
    deeds[0].insert(place(deeds, 0, "send of 0F0"), receive)
    with pytest.raises(ScheduleError, match=r"deadlock at rank \d, step \d: the .* waits for ever"):
        check_deeds(schedule, deeds)


class _Lit(lit.Lit):
    """Its code is said to be in a file that each rank has for itself."""


def differ(folder):
    """What trainings raise in which one rank is another."""
    rank, found = torch.distributed.get_rank(), {}
    file = f"{folder}/{rank}.py"
    Path(file).write_text(f"# the code of rank {rank}")
    sys.modules["the_users"] = ModuleType("the_users")
    sys.modules["the_users"].__file__ = file
    plans = [f"{folder}/plan-{r}.yaml" for r in (0, 1)]
    schedules = [f"{folder}/{r}.csv" for r in (0, 1)]
    for name, (strategy, arguments, module) in {
        "M": ({"num_microbatches": 2 + 2 * rank}, {}, ""),
        "clip": ({}, {"gradient_clip_val": 1.0 + rank}, ""),
        "code": ({}, {}, "the_users"),
        "plan": ({"plan": plans[rank]}, {}, ""),
        "cut": ({"plan": f"{folder}/cut-{rank}.yaml"}, {}, ""),
        "csv": ({"schedule": schedules[rank], "num_microbatches": 4}, {}, ""),
        "same csv": ({"schedule": schedules[rank], "num_microbatches": 2}, {}, ""),
    }.items():
        if name == "same csv":  # in another place on each machine
            text = make_schedule("1f1b", num_ranks=2, num_microbatches=2).to_csv()
            Path(schedules[rank]).write_text(text)
        _Lit.__module__ = module or __name__
        trainer = lit.trainer(strategy, 2, max_steps=1, **arguments)
        try:
            trainer.fit(lit.seeded(_Lit), DataLoader(lit.rows(), batch_size=8))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_ranks_that_do_not_run_the_same_are_told_what_differs_before_they_start(tmp_path):
    for rank, name in enumerate(("1f1b", "gpipe")):
        text = make_schedule(name, num_ranks=2, num_microbatches=4).to_csv()
        (tmp_path / f"{rank}.csv").write_text(text)
        stages = tuple(StagePlan(s, 1 - s, "net.0", "net.6", 3 + s, 1, 4, 1, 1, 1) for s in (0, 1))
        plan = Plan(stages, name, 2, 1, 4, "flops", 0.2, ())
        (tmp_path / f"plan-{rank}.yaml").write_text(yaml.safe_dump(plan.to_dict()))
        # an older version of the same plan: only its cut is another
        stages = tuple(replace(s, num_units=4 + (s.stage + rank) % 2) for s in stages)
        plan = replace(plan, stages=stages, schedule_name="1f1b")
        (tmp_path / f"cut-{rank}.yaml").write_text(yaml.safe_dump(plan.to_dict()))
    for found in lit.run_ranks(2, differ, str(tmp_path)):
        start = "ConfigError: the ranks do not run the same: "
        assert found["M"] == (
            f"{start}num_microbatches (of PipelineStrategy) is 2 on rank 0, 4 on rank 1. Start all "
            "ranks from the same files, with the same arguments and the same packages"
        )
        assert f"{start}gradient_clip_val (of Trainer) is 1.0 on rank 0, 2.0 " in found["clip"]
        assert f"{start}the file of the_users is sha256 " in found["code"]
        assert "schedule (of PipelineStrategy) is '1f1b' on rank 0, 'gpipe' on" in found["plan"]
        assert f"{start}balance (of PipelineStrategy) is (4, 5) on rank 0, (5, " in found["cut"]
        assert f"{start}schedule (of PipelineStrategy) is 'a file of sha256 " in found["csv"]
        assert "same csv" not in found


def test_cuts_that_differ_are_named_by_the_first_boundary() -> None:
    told = ("cut 0: stages on ranks [0, 1]", "cut 0: stage 0 gives stage 1 'h' (2, 3) float32")
    other = (told[0], told[1].replace("float32", "float64"))
    refuse_different([told, told])
    with pytest.raises(StageMismatchError, match=r'on rank 0 .*float32", on rank 2 .*float64"'):
        refuse_different([told, told, other])
    with pytest.raises(StageMismatchError, match=r"on rank 1 'nothing more'"):
        refuse_different([told, told[:1]])
