"""A whole `Trainer.fit` over ranks gives what one device gives."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PipelineStrategy, PlanError, ScheduleError

_REFERENCES = {}


def reference(model, **arguments):
    """The run on one device, made once per kind of run."""
    key = (model, *sorted(arguments.items()))
    if key not in _REFERENCES:
        _REFERENCES[key] = run_ranks(1, _fit, None, 1, model, arguments)[0]
    return _REFERENCES[key]


def _fit(strategy, devices, model, arguments):
    return lit.fit(strategy, devices, model, **arguments)


@pytest.mark.parametrize(
    ("num_ranks", "arguments"),
    [
        (1, {"num_microbatches": 3}),
        (2, {}),
        (2, {"virtual_stages": 2, "num_microbatches": 4}),
        (4, {}),
    ],
)
def test_twenty_adamw_steps_equal_one_device(num_ranks, arguments):
    """With the defaults; every schedule on every kind of model is in `test_transparency.py`."""
    epochs = {"max_epochs": 4}
    results = run_ranks(num_ranks, _fit, arguments, num_ranks, "mlp", epochs)
    assert reference("mlp", **epochs)["steps"] == 20
    lit.assert_equal(results, reference("mlp", **epochs))


def test_one_rank_without_arguments_is_plain_lightning():
    results = run_ranks(1, _fit, {}, 1, "mlp", {"max_epochs": 2})
    expected = reference("mlp", max_epochs=2)
    for name, value in expected["weights"].items():
        assert torch.equal(results[0]["weights"][name], value)
    assert results[0]["metrics"] == expected["metrics"]


def _planned():
    module = lit.seeded(lit.LitTied)
    trainer = lit.trainer({"num_microbatches": 4}, 2)
    trainer.fit(module, DataLoader(lit.tokens(), batch_size=8))
    plan = trainer.strategy.plan
    less = lit.trainer({"num_microbatches": 8}, 2, limit_train_batches=1)
    less.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=4))
    notes = [*plan.notes, *less.strategy.plan.notes]
    return plan.to_dict(), [s.replicated_parameters for s in plan.stages], notes


def test_the_plan_is_known_on_all_ranks_and_names_tied_weights():
    plans = run_ranks(2, _planned)
    assert plans[0] == plans[1]
    plan, replicated, notes = plans[0]
    idle = "1f1b leaves 2 ranks idle for 20% of a step; 8 micro-batches or more are good"
    assert notes == [
        f"4 micro-batches: {idle}: give num_microbatches=8",
        "4 micro-batches, 8 were asked for, and the batch has rows for no more: "
        f"{idle}: it takes 8 rows or more",
    ]
    assert plan["num_microbatches"] == 4
    assert [stage["rank"] for stage in plan["stages"]] == [0, 1]
    assert replicated == [("net.embed.weight",), ("net.embed.weight",)]


def _all_steps():
    module = lit.seeded(lit.Lit)
    loader = DataLoader(lit.rows(), batch_size=8)
    trainer = lit.trainer({} if lit.world() > 1 else None, lit.world())
    found = [trainer.validate(module, loader, verbose=False)]
    trainer.fit(module, loader, loader)
    found.append(trainer.test(module, loader, verbose=False))
    predictions = trainer.predict(module, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    found.append(trainer.validate(module, loader, verbose=False))
    return found, predictions, lit.outcome(module, trainer)


def test_all_steps_in_any_order():
    expected, predictions, end = run_ranks(1, _all_steps)[0]
    results = run_ranks(2, _all_steps)
    for found, _, result in results:
        for got, want in zip(found, expected, strict=True):
            assert got[0].keys() == want[0].keys()
            for name, value in want[0].items():
                assert got[0][name] == pytest.approx(value, rel=1e-9)
        lit.assert_equal([result], end)
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], predictions, strict=True))


def _objects_survive():
    module = lit.seeded(lit.LitTied)
    before = list(module.parameters())
    trainer = lit.trainer({}, 2)
    trainer.fit(module, DataLoader(lit.tokens(), batch_size=8))
    same = all(a is b for a, b in zip(before, module.parameters(), strict=True))
    held = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    tied = module.net.head.weight is module.net.embed.weight
    return same and tied and all(a is b for a, b in zip(held, before, strict=True))


def test_parameter_objects_are_the_same_after_fit():
    assert run_ranks(2, _objects_survive) == [True, True]


def test_wrong_arguments_are_refused_before_anything_starts():
    with pytest.raises(ScheduleError, match="1f2b"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(schedule="1f2b"))
    with pytest.raises(ConfigError, match="num_microbatches=0"):
        pl.Trainer(accelerator="cpu", devices=1, strategy=PipelineStrategy(num_microbatches=0))
    with pytest.raises(ConfigError, match="restore_model='some'"):
        PipelineStrategy(restore_model="some")
    with pytest.raises(ConfigError, match="pipeline_parallel_size=3 on 2 devices"):
        pl.Trainer(
            accelerator="cpu", devices=2, strategy=PipelineStrategy(pipeline_parallel_size=3)
        )
    with pytest.raises(ConfigError, match="3 counts for 2 stages"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(balance=[1, 1, 1]))


def test_fewer_microbatches_than_ranks_is_one_clear_error_for_1f1b():
    strategy = PipelineStrategy(schedule="1f1b", num_microbatches=2)
    with pytest.raises(ScheduleError, match="P=4, M=2"):
        pl.Trainer(accelerator="cpu", devices=4, strategy=strategy)


def test_gpipe_runs_with_fewer_microbatches_than_ranks():
    arguments = {"schedule": "gpipe", "num_microbatches": 2}
    results = run_ranks(4, _fit, arguments, 4, "mlp", {})
    lit.assert_equal(results, reference("mlp"))


@pytest.mark.parametrize("num_microbatches", [3, 4, 6])
def test_interleaved_runs_with_even_groups(num_microbatches):
    arguments = {"virtual_stages": 2, "num_microbatches": num_microbatches}
    results = run_ranks(2, _fit, arguments, 2, "mlp", {})
    lit.assert_equal(results, reference("mlp"))


def test_interleaved_names_the_legal_values():
    strategy = PipelineStrategy(virtual_stages=2, num_microbatches=5)
    with pytest.raises(ScheduleError, match="num_microbatches=4 or 6"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=strategy)


class _TwoUnits(lit.Lit):
    def make_net(self, width, depth):
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4))


def _more_stages_than_units():
    module = lit.seeded(_TwoUnits)
    with pytest.raises(PlanError, match=r"4 stages \(4 ranks x 1\): the step makes 2 calls"):
        lit.trainer({}, 4).fit(module, DataLoader(lit.rows(), batch_size=8))
    return True


def test_more_stages_than_units_names_both_numbers():
    assert run_ranks(4, _more_stages_than_units) == [True] * 4


def _explicit(arguments):
    module = lit.seeded(lit.Lit)
    trainer = lit.trainer(arguments, 2)
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    return [(s.first_unit, s.num_units) for s in trainer.strategy.plan.stages]


def test_the_user_says_where_to_cut():
    assert run_ranks(2, _explicit, {"balance": [2, 5]})[0] == [("net.0.0", 2), ("net.2.0", 5)]
    assert run_ranks(2, _explicit, {"split_points": ["net.4"]})[0] == [
        ("net.0.0", 5),
        ("net.5.0", 2),
    ]


def _wrong_sum():
    with pytest.raises(PlanError, match="sum to 4, but the model has 7"):
        _explicit({"balance": [2, 2]})
    return True


def test_counts_that_do_not_sum_to_the_model_are_refused():
    assert run_ranks(2, _wrong_sum) == [True, True]
