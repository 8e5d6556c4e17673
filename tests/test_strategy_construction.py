"""Models that `configure_model` builds: each rank makes its share of the weights of one device."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe.errors import PipelineError
from lightning_pipe.split import blueprint
from lightning_pipe.split.stored import StoredTensor

WIDTH, DEPTH = 128, 8


class _Late(lit.Lit):
    """Equal layers, built when `configure_model` is called; it may be called again."""

    def __init__(self, how="plain", depth=DEPTH):
        pl.LightningModule.__init__(self)
        self.how, self.depth = how, depth
        self.net, self.calls, self.initial, self.seen = None, 0, {}, 0.0
        if how == "constructor":
            with torch.device("meta"):
                self.net = self.make_net()
        elif how == "early":
            self.net = self.make_net()

    def make_net(self):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.depth)))

    def configure_model(self):
        self.calls += 1
        if self.net is not None:
            return
        if self.how == "meta":
            with torch.device("meta"):
                self.net = self.make_net()
        elif self.how == "empty":
            with self.trainer.init_module(empty_init=True):
                self.net = self.make_net()
        else:
            self.net = self.make_net()

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class _Still(_Late):
    def on_fit_start(self):
        if self.how == "early":  # elsewhere this would make all weights on all ranks
            self.initial = {name: value.clone() for name, value in self.state_dict().items()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _count(module):
    fake = torch._subclasses.FakeTensor
    return sum(p.numel() for p in module.parameters() if not isinstance(p, fake))


class _Counts(pl.Callback):
    def __init__(self):
        self.held = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.held = _count(pl_module)


def _loaders(batch_size=8):
    data = lit.rows(24, WIDTH)
    return DataLoader(data, batch_size=batch_size, shuffle=True), DataLoader(data, batch_size=8)


def _initial(strategy):
    """The weights before the first step, gathered, and how many this rank holds after it."""
    found = []
    for how in ("plain", "early"):
        pl.seed_everything(1, verbose=False)
        torch.set_default_dtype(torch.float64)
        module, counts = _Still(how), _Counts()
        torch.set_default_dtype(torch.float32)
        trainer = lit.trainer(strategy, lit.world(), callbacks=[counts], limit_train_batches=1)
        trainer.fit(module, _loaders()[0])
        weights = {name: value.clone() for name, value in module.state_dict().items()}
        found.append((module.initial, weights, counts.held, torch.rand(3)))
    return found


def test_each_of_four_ranks_makes_a_quarter_of_the_weights_of_one_device():
    expected = run_ranks(1, _initial, None)[0]
    total = DEPTH * WIDTH**2
    results = run_ranks(4, _initial, {"balance": "uniform"})
    for result in results:
        for found, reference in zip(result, expected, strict=True):
            initial, weights, held, random = found
            torch.testing.assert_close(initial, reference[0], rtol=0, atol=0)
            torch.testing.assert_close(weights, reference[1], rtol=0, atol=0)
            assert held == total // 4
            assert torch.equal(random, reference[3])
    assert sum(result[0][2] for result in results) == total


class _Hooked(_Late):
    """Looks at its weights, and changes them, before the first step."""

    def on_fit_start(self):
        self.seen = sum(p.detach().square().sum().item() for p in self.parameters())
        with torch.no_grad():
            self.net[1].weight.mul_(0.5)


def _life(strategy, how, folder):
    """Trains, saves, resumes in the middle of an epoch, evaluates and predicts."""
    lit.seeded(nn.Module)
    module, file = _Hooked(how), f"{folder}/{lit.world()}-{how}.ckpt"
    trainer = lit.trainer(strategy, lit.world(), max_steps=2)
    trainer.fit(module, *_loaders())
    trainer.save_checkpoint(file)
    results = [lit.outcome(module, trainer)]
    resumed, counts = _Late(how), _Counts()
    trainer = lit.trainer(strategy, lit.world(), max_epochs=2, callbacks=[counts])
    trainer.fit(resumed, *_loaders(), ckpt_path=file)
    results.append(lit.outcome(resumed, trainer))
    fresh = _Late(how)
    trainer = lit.trainer(strategy, lit.world())
    metrics = trainer.validate(fresh, _loaders()[1], ckpt_path=file, verbose=False)
    again = trainer.test(fresh, _loaders()[1], verbose=False)
    predicted = trainer.predict(_Late(how), _loaders()[1], ckpt_path=file)
    calls = module.calls, resumed.calls, fresh.calls
    return results, metrics, again, predicted if _rank() == 0 else None, module.seen, calls, counts


def _rank():
    return torch.distributed.get_rank()


@pytest.mark.parametrize(
    ("how", "sharded"), [("plain", False), ("meta", False), ("empty", False), ("plain", True)]
)
def test_training_resuming_and_evaluating_equal_one_device(how, sharded, tmp_path):
    expected = run_ranks(1, _life, None, "plain", str(tmp_path))[0]
    strategy = {"num_microbatches": 4, "save_distributed_checkpoint": sharded}
    results = run_ranks(2, _life, strategy, how, str(tmp_path))
    for result in results:
        for part, reference in zip(result[0], expected[0], strict=True):
            lit.assert_equal([part], reference)
        torch.testing.assert_close(result[1:3], expected[1:3], rtol=1e-9, atol=1e-9)
        assert result[4] == pytest.approx(expected[4], rel=1e-12)
        assert result[5] == expected[5]
        assert result[6].held == DEPTH // 2 * WIDTH**2
    torch.testing.assert_close(results[0][3], expected[3])


def _resumed_from_parts(folder):
    """Numbers that this rank reads of a checkpoint, and holds after a step."""
    strategy = {"balance": "uniform", "save_distributed_checkpoint": True}
    trainer = lit.trainer(strategy, lit.world(), max_steps=1)
    trainer.fit(_Late(), _loaders()[0])
    trainer.save_checkpoint(f"{folder}/parts.ckpt")
    read, original = [], StoredTensor.read

    def noted(stored):
        read.append(stored.numel())
        return original(stored)

    counts = _Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredTensor, "read", noted)
        patch.setattr(blueprint, "BUDGET_BYTES", WIDTH**2 * 4)  # one layer beside its share
        trainer = lit.trainer(strategy, lit.world(), max_epochs=2, callbacks=[counts])
        trainer.fit(_Late(), _loaders()[0], ckpt_path=f"{folder}/parts.ckpt")
    return sum(read), max(read), counts.held


def test_no_rank_reads_or_holds_more_of_a_checkpoint_than_its_share(tmp_path):
    share = DEPTH * WIDTH**2 // 4
    for read, largest, held in run_ranks(4, _resumed_from_parts, str(tmp_path)):
        assert held == share
        assert largest == WIDTH**2
        # weights, two moments, numbers of steps, and the layer that was there when it was loaded
        assert read <= 3 * share + 2 * DEPTH + WIDTH**2


class _NoWay(_Late):
    def make_net(self):
        net = super().make_net()
        net.append(_Scale())
        return net


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale


class _Different(_Late):
    def make_net(self):
        torch.manual_seed(_rank())
        return super().make_net()


class _Shifted(_Still):
    """Loads a checkpoint by hand into what it has just built."""

    def make_net(self):
        net = super().make_net()
        net.load_state_dict({name: torch.zeros_like(v) for name, v in net.state_dict().items()})
        return net


def _refused():
    texts = []
    for cls, how in ((_NoWay, "meta"), (_NoWay, "constructor"), (_Different, "plain")):
        trainer = lit.trainer({}, lit.world())
        with pytest.raises(PipelineError) as error:
            trainer.fit(cls(how), _loaders()[0])
        texts.append(str(error.value))
    return texts


def test_weights_that_nothing_can_make_are_named_on_all_ranks():
    for meta, constructor, different in run_ranks(2, _refused):
        assert "net.8.scale (_Scale)" in meta
        assert constructor == meta
        assert "configure_model builds other weights on one rank" in different


def _kinds():
    """What is built on the meta device by the constructor; a checkpoint by hand; one rank."""
    sums = []
    for cls, how in ((_Still, "constructor"), (_Shifted, "plain")):
        lit.seeded(nn.Module)
        module = cls(how)
        trainer = lit.trainer({}, lit.world(), limit_train_batches=1)
        trainer.fit(module, _loaders()[0])
        sums.append([v.clone() for v in module.state_dict().values()])
    return sums


def test_a_module_on_meta_is_initialised_on_any_number_of_ranks():
    (alone,), results = run_ranks(1, _kinds), run_ranks(2, _kinds)
    for meta, zeros in results:
        assert all(torch.equal(a, b) for a, b in zip(meta, alone[0], strict=True))
        assert meta[0].std() > 0.01
        assert not any(value.any() for value in zeros)
