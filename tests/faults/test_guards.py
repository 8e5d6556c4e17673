"""Numbers that would be wrong without a word are errors, or warnings that say where."""

from __future__ import annotations

import warnings

import pytest
import torch
from tests import lit
from tests.faults.harness import Fault, in_step
from tests.runtime.models import Stage, cut, make_batch, make_model
from torch.utils.data import DataLoader

from lightning_pipe import guards
from lightning_pipe.errors import CutError, GuardError
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.ranks import make_ranks


class _Noise(lit.Lit):
    """Draws from a generator of its own, which is not the same on all ranks."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        generator = torch.Generator().manual_seed(self.global_rank)
        x, y = batch
        return x + torch.randn(x.shape, generator=generator, dtype=x.dtype), y


class _Drifts(lit.LitTied):
    """One rank changes its copy of a tied weight."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            self.net.embed.weight.data.add_(1)


class _NaNInUnit(lit.Lit):
    """The first unit gives NaN in the second step, for the rows of micro-batch 1."""

    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        net[0].register_forward_hook(self.spoil)
        return net

    def spoil(self, module, args, output):
        if getattr(self, "_trainer", None) is not None and self.trainer.global_step == 1:
            return output * (torch.nan if bool((args[0].sum() == self.bad).item()) else 1.0)
        return output


class _NaNInTail(lit.Lit):
    def loss(self, batch):
        loss = super().loss(batch)
        return loss * torch.nan if self.trainer.global_step == 1 else loss


class _NaNInWeight(lit.Lit):
    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                self.net[0][0].weight.fill_(torch.nan)


class _Writes(lit.Lit):
    """Writes to a weight in its step, which no backward needs."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.net[0][0].bias.mul_(0.9)
        return super().training_step(batch, batch_idx)


NANS = {"unit": _NaNInUnit, "tail": _NaNInTail, "weight": _NaNInWeight}


def wrong_numbers():
    """What each of these trainings raises, and what is warned of."""
    found, every = {}, guards._EVERY_STEPS
    guards._EVERY_STEPS = 1
    layouts = {"drift": {}, "copies": {"pipeline_parallel_size": 1, "data_parallel_size": 2}}
    for name, layout in layouts.items():
        trainer = lit.trainer({"num_microbatches": 2, **layout}, 2)
        try:
            trainer.fit(lit.seeded(_Drifts), DataLoader(lit.tokens(), batch_size=4))
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
    guards._EVERY_STEPS = every
    for name, cls in NANS.items():
        module = lit.seeded(cls)
        module.bad = lit.rows()[12:16][0].sum()
        trainer = lit.trainer({"num_microbatches": 2}, 2)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
        found[name] = [str(w.message) for w in said if "not finite" in str(w.message)]
    return found


def other_batch():
    trainer = lit.trainer({"num_microbatches": 2}, 2)
    try:
        trainer.fit(lit.seeded(_Noise), DataLoader(lit.rows(), batch_size=8))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_another_batch_on_one_rank_is_an_error_before_its_weights_change():
    found = lit.run_ranks(2, other_batch)
    assert {kind for kind, _ in found} == {"GuardError", "PeerError"}
    for _, text in found:
        assert "the stages were given different batches: batch[0] differs" in text


def test_what_would_be_wrong_is_said():
    first, second = lit.run_ranks(2, wrong_numbers)
    for found in (first, second):
        assert found["drift"][0] == "GuardError"
        assert "the weight net.embed.weight is on several ranks and no longer" in found["drift"][1]
        assert found["copies"][0] == "GuardError"
        assert "the weight net.embed.weight is no longer the same in all" in found["copies"][1]
    for name, where in {
        "unit": "the first such value is among what stage 0 gives the next",
        "tail": "what all stages gave is finite, so it comes from the last stage or the loss",
        "weight": "the weight net.0.0.weight has such values, so an earlier step made them",
    }.items():
        assert not second[name], "one rank says it"
        (text,) = first[name]
        assert where in text
    assert "the loss of micro-batch 1 is not finite" in first["unit"][0]
    assert "the loss of micro-batches 0, 1 is not finite" in first["tail"][0]


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("action", ["0F0", "1F2", "2F3", "3F1"])
def test_a_nan_in_any_action_is_named_with_its_stage_and_micro_batch(action, monkeypatch):
    layout = {"virtual_stages": 4, "num_microbatches": 4, "schedule": "interleaved_1f1b"}
    trainer = lit.trainer(layout, 1, max_steps=3)
    with (
        in_step(Fault("nan", action), 2, 4, monkeypatch),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        trainer.fit(lit.seeded(lit.Lit), DataLoader(lit.rows(), batch_size=8))
    (text,) = [str(w.message) for w in said if "not finite" in str(w.message)]
    stage, microbatch = action.split("F")
    assert f"the loss of micro-batch {microbatch} is not finite" in text
    if stage == "3":  # what it gives is the loss
        assert "comes from the last stage or the loss" in text
    else:
        assert f"the first such value is among what stage {stage} gives the next" in text


class _OtherWay(lit.Lit):
    """From its second batch on it reads, late, what an early unit gives: nobody sends that."""

    reader = ""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def loss(self, batch):
        x, y = batch
        early = hidden = self.net[0](x)
        for block in self.net[1:-1]:
            hidden = block(hidden)
        late = self.trainer.global_step > 0
        if late and self.reader == "glue":
            hidden = hidden + early
        logits = self.net[-1](early if late and self.reader == "unit" else hidden)
        loss = torch.nn.functional.cross_entropy(logits, y)
        if late and self.reader == "log":
            self.log("early", early.mean())
        return early.mean() if late and self.reader == "loss" else loss


POISONED = {
    "unit": r"unit 'net.6' \(stage 2\) reads a tensor of shape .* that another stage computes",
    "glue": r"unit 'net.6' \(stage 2\) reads a tensor .* that the trace did not see",
    "loss": r"stage 2: the step returns a tensor that another stage computes",
    "log": r"stage 2: self.log\('early'\) reads a tensor that another stage computes",
}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("reader", POISONED)
def test_a_value_that_nobody_sent_is_no_number(reader):
    trainer = lit.trainer({"virtual_stages": 3, "num_microbatches": 2}, 1, max_steps=3)
    module = lit.seeded(_OtherWay)
    module.reader = reader
    with pytest.raises(CutError, match=POISONED[reader]):
        trainer.fit(module, DataLoader(lit.rows(), batch_size=8))
    assert trainer.global_step == 1


class Writing(Stage):
    """Writes to a bias, which autograd does not save, and so does not watch."""

    def forward(self, microbatch, received):
        with torch.no_grad():
            self.blocks[0].linear.bias.add_(1)
        return super().forward(microbatch, received)


@pytest.mark.parametrize(("name", "virtual_stages"), [("gpipe", 2), ("zero_bubble", 1)])
def test_weights_of_a_backward_are_those_of_its_forward(name, virtual_stages):
    schedule = make_schedule(
        name, num_ranks=1, num_microbatches=3, virtual_stages=virtual_stages, strict=False
    )
    engine = Engine(make_ranks(schedule.stage_to_rank, 1), torch.device("cpu"))
    model = make_model("chain")
    starts, batch = cut(model, schedule.num_stages), make_batch([2] * 3)
    kinds = [Writing, Stage][: schedule.num_stages]
    stages = {s: kind(model, s, starts, batch) for s, kind in enumerate(kinds)}
    if name == "zero_bubble" and len({a.microbatch for a in schedule.actions(0)[:2]}) < 2:
        engine.run(schedule, stages, training=True)  # each backward follows its own forward
        return
    with pytest.raises(GuardError, match=r"a weight of stage 0 .* forward of micro-batch \d and"):
        engine.run(schedule, stages, training=True)


def test_fingerprints_tell_batches_apart_and_name_what_differs():
    x = torch.randn(3, 4)
    batch = {"x": x, "more": [x.bool(), "text", 3, None], "empty": torch.empty(0)}
    same = {"x": x.clone(), "more": [x.bool(), "text", 3, None], "empty": torch.empty(0)}
    assert guards.fingerprint(batch) == guards.fingerprint(same)
    for change in (
        lambda b: b["x"].__setitem__((2, 3), 0.0),
        lambda b: b["more"].__setitem__(1, "other"),
        lambda b: b["more"].__setitem__(2, 4),
        lambda b: b.update(x=x.t()),
    ):
        other = {**same, "x": x.clone(), "more": list(same["more"])}
        change(other)
        mine, theirs = dict(guards.fingerprint(batch)), dict(guards.fingerprint(other))
        assert len([place for place in mine if mine[place] != theirs[place]]) == 1
    large = torch.zeros(3 << 20)
    spoiled = large + torch.rand(3 << 20)
    assert guards.fingerprint(large) != guards.fingerprint(spoiled)
    for dtype in (torch.bfloat16, torch.complex64, torch.bool, torch.int8):
        assert guards.checksum(x.to(dtype)) == guards.checksum(x.to(dtype).clone())
    assert guards.checksum(x) != guards.checksum(x + 1e-6)
