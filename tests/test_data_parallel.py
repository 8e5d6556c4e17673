"""Copies of the pipeline: D of them with batches of B train as one device with batches of D x B."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tests import lit
from tests.lit import run_ranks
from tests.test_strategy_life import _Overflowing, _Scaled
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import CatMetric, MeanMetric, SumMetric

from lightning_pipe import ConfigError, PipelineStrategy
from lightning_pipe.replicas import Reduction, sizes_of
from lightning_pipe.runtime import reduce

ROWS = 48


class _Synced(lit.Lit):
    """Logs what is equal to one device: means over all copies."""

    optimizer = "sgd"

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class _SyncedTied(_Synced, lit.LitTied):
    optimizer = "adamw"


class _SyncedAdam(_Synced):
    optimizer = "adamw"


class _Weighted(_SyncedTied):
    """A mean over valid tokens, of which batches have other numbers; one has none."""

    def loss(self, batch):
        (tokens,) = batch
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] > tokens[:, :1], -100)
        logits = self.net(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), (targets != -100).sum()

    def training_step(self, batch, batch_idx):
        loss, count = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss, "loss_weight": count}

    def validation_step(self, batch, batch_idx):
        pass


class _Single(_SyncedAdam):
    def loss(self, batch):
        return super().loss((batch[0].float(), batch[1]))


def _valid_tokens(count):
    """The first token says what is valid: per sentence, and so the same for any batch."""
    (tokens,) = lit.tokens(count).tensors
    tokens[1] = torch.where(torch.arange(9) > 0, 10, 0)  # a sentence without any
    return TensorDataset(tokens)


_MODELS = {
    "fp32": (_Single, lit.rows),
    "sgd": (_Synced, lit.rows),
    "adamw": (_SyncedAdam, lit.rows),
    "tied": (_SyncedTied, lit.tokens),
    "weighted": (_Weighted, _valid_tokens),
}


def _loader(dataset, batch_size, num_ranks=None):
    """Rows in their order; Lightning's own sampler of training shuffles them."""
    if num_ranks is None:
        return DataLoader(dataset, batch_size=batch_size)
    copies, copy = lit.world() // num_ranks, torch.distributed.get_rank() // num_ranks
    sampler = DistributedSampler(dataset, copies, copy, shuffle=False)
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def _fit(strategy, model, batch_size, **arguments):
    cls, dataset = _MODELS[model]
    module = lit.seeded(cls)
    if cls is _Single:
        module.float()
    used = lit.trainer(strategy, lit.world(), **arguments)
    loader = lit.loader_for(used, dataset(ROWS), batch_size)
    used.fit(module, loader, DataLoader(dataset(ROWS), batch_size=batch_size))
    return lit.outcome(module, used)


# strategy, model, arguments of the Trainer
_CASES = {
    "sgd": ({"schedule": "1f1b", "num_microbatches": 4}, "sgd", {"max_epochs": 2}),
    "accumulated, clipped by norm": (
        {"schedule": "gpipe", "num_microbatches": 2},
        "adamw",
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.05},
    ),
    "clipped by value": (
        {"schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
        "adamw",
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "tied, small buckets": (
        {"num_microbatches": 2, "bucket_cap_mb": 1e-3},
        "tied",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    ),
    "interleaved": (
        {"schedule": "interleaved_1f1b", "virtual_stages": 2, "num_microbatches": 4},
        "sgd",
        {},
    ),
    "weighted": ({"num_microbatches": 2}, "weighted", {"gradient_clip_val": 0.2}),
    "fp32": ({"num_microbatches": 2}, "fp32", {"precision": "32-true"}),
}


def _references(copies, cases):
    return {
        name: _fit(None, model, 4 * copies, **arguments)
        for name, (_, model, arguments) in cases.items()
    }


def _copies(num_ranks, cases, **more):
    results = {}
    for name, (strategy, model, arguments) in cases.items():
        if num_ranks == 1:
            strategy = {
                k: v for k, v in strategy.items() if k not in ("schedule", "virtual_stages")
            }
        sizes = {"pipeline_parallel_size": num_ranks, "data_parallel_size": "auto"}
        results[name] = _fit({**strategy, **sizes, **more}, model, 4, **arguments)
    return results


def test_two_copies_of_two_ranks_train_as_one_device():
    expected = run_ranks(1, _references, 2, _CASES)[0]
    assert expected["accumulated, clipped by norm"]["steps"] == 2  # the last one is of 2 batches
    for result in run_ranks(4, _copies, 2, _CASES):
        for name, found in result.items():
            tolerance = 1e-5 if name == "fp32" else 1e-9
            lit.assert_equal([found], expected[name], tolerance)


def test_copies_of_one_rank_are_data_parallel():
    cases = {name: _CASES[name] for name in ("sgd", "tied, small buckets")}
    expected = run_ranks(1, _references, 2, cases)[0]
    for result in run_ranks(2, _copies, 1, cases):
        for name in cases:
            lit.assert_equal([result[name]], expected[name])


class _Counts(_Synced):
    def on_train_start(self):
        self.sent = []
        own = reduce.dist.all_reduce

        def counted(tensor, *args, **kwargs):
            if kwargs.get("async_op"):
                self.sent.append((self.trainer.global_step, tensor.numel()))
            return own(tensor, *args, **kwargs)

        self.put_back = own
        reduce.dist.all_reduce = counted

    def on_train_end(self):
        reduce.dist.all_reduce = self.put_back


def _counted(bucket_cap_mb):
    module = lit.seeded(_Counts)
    strategy = {"data_parallel_size": 2, "num_microbatches": 2, "bucket_cap_mb": bucket_cap_mb}
    used = lit.trainer(strategy, 4, accumulate_grad_batches=2)
    used.fit(module, DataLoader(lit.rows(ROWS), batch_size=4))
    return module.sent, sum(stage.parameters for stage in used.strategy.plan.stages)


def test_a_stage_reduces_each_bucket_once_in_a_step():
    results = run_ranks(4, _counted, 25)
    for sent, _ in results:
        assert [step for step, _ in sent] == [0, 1, 2]  # 6 batches, 2 of them for a step
    assert results[0][0] == results[2][0]
    per_step = [sum(n for step, n in sent if step == 0) for sent, _ in results]
    assert sum(per_step) == 2 * results[0][1]
    for sent, _ in run_ranks(4, _counted, 500 / 2**20):
        assert len(sent) > 3
        assert max(n for _, n in sent) <= 64


_SEEN: list[bool] = []  # what a stage leaves in the module is that of the last one


class _Patient(torch.autograd.Function):
    """The identity, whose backward waits for what it is given."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


class _PatientBlock(nn.Sequential):
    def forward(self, x):
        return _Patient.apply(super().forward(x), self.wait)


class _Drains(_Synced):
    """The first stage ends its backward once the last one has begun to reduce."""

    def __init__(self, folder):
        self.folder = folder
        super().__init__()

    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        net[0] = _PatientBlock(*net[0])
        net[0].wait = self.wait
        return net

    @property
    def sign(self):
        return Path(self.folder) / f"{self.global_rank // 2} {self.trainer.global_step}"

    def wait(self):
        if self.trainer.global_step == 0:  # its cut is not proven yet
            return
        end_s = time.monotonic() + 30
        while not self.sign.exists() and time.monotonic() < end_s:
            time.sleep(0.01)
        _SEEN.append(self.sign.exists())

    def on_train_start(self):
        self.put_back = own = reduce.dist.all_reduce

        def noted(tensor, *args, **kwargs):
            if kwargs.get("async_op") and self.global_rank % 2 == 0:
                self.sign.touch()
            return own(tensor, *args, **kwargs)

        reduce.dist.all_reduce = noted

    def on_train_end(self):
        reduce.dist.all_reduce = self.put_back


def _drained(folder):
    module = lit.seeded(_Drains, folder)
    strategy = {"data_parallel_size": 2, "num_microbatches": 1}
    used = lit.trainer(strategy, 4, max_steps=3)
    used.fit(module, DataLoader(lit.rows(ROWS), batch_size=4))
    seen = list(_SEEN)
    _SEEN.clear()
    return seen


def test_later_stages_reduce_while_the_first_still_runs(tmp_path):
    assert run_ranks(4, _drained, str(tmp_path)) == [[], [True, True], [], [True, True]]


class _Watches(_Synced):
    """Keeps what each rank was given, drew, and saw of gradients."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.rows, self.masks, self.norms, self.meshes = [], [], [], []

    def configure_model(self):
        mesh = self.device_mesh
        self.meshes = [mesh.mesh_dim_names, tuple(mesh.shape), mesh.mesh.flatten().tolist()]
        self.places = [mesh[name].get_local_rank() for name in mesh.mesh_dim_names]
        self.made = nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        (x, numbers) = batch
        mask = self.drop(torch.ones_like(x))
        self.rows.append(numbers)
        self.masks.append(mask.detach())
        return self.net(self.made(x * mask)).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in self.net.parameters()]))


class _Numbered(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), index / 64, dtype=torch.float64), index


def _watched():
    module = lit.seeded(_Watches)
    used = lit.trainer({"data_parallel_size": 2, "num_microbatches": 2}, 4)
    used.fit(module, DataLoader(_Numbered(), batch_size=8, shuffle=True))
    rows = torch.cat(module.rows).tolist()
    return {
        "rows": rows,
        "masks": torch.cat(module.masks),
        "norms": torch.stack(module.norms),
        "steps": (used.global_step, used.estimated_stepping_batches, used.num_training_batches),
        "meshes": module.meshes,
        "places": module.places,
        "weights": module.state_dict(),
        "kwargs": used.strategy.distributed_sampler_kwargs,
    }


def test_copies_see_other_rows_and_masks_and_the_same_gradients():
    found = run_ranks(4, _watched)
    for a, b in ((0, 1), (2, 3)):  # of one pipeline
        assert found[a]["rows"] == found[b]["rows"]
        assert torch.equal(found[a]["masks"], found[b]["masks"])
    assert sorted(found[0]["rows"] + found[2]["rows"]) == list(range(64))
    assert found[0]["rows"] != sorted(found[0]["rows"])
    assert not torch.equal(found[0]["masks"], found[2]["masks"])
    for one in found:
        assert one["steps"] == (4, 4, 4)
        assert torch.equal(one["norms"], found[0]["norms"])
        assert all(torch.equal(v, found[0]["weights"][n]) for n, v in one["weights"].items())
        axes, shape, numbers = one["meshes"]
        assert axes == ("data_parallel", "pipeline", "tensor_parallel")
        assert (shape, numbers) == ((2, 2, 1), [0, 1, 2, 3])
    assert [one["places"] for one in found] == [[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert [one["kwargs"]["rank"] for one in found] == [0, 0, 1, 1]


class _Logs(_Synced):
    """What copies say to each other besides gradients."""

    def __init__(self):
        super().__init__()
        self.total, self.all, self.average = SumMetric(), CatMetric(), MeanMetric()
        self.found = {}

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        all_logits = self.all_gather(logits, sync_grads=True)
        assert all_logits.shape == (2, *logits.shape)
        self.total.update(torch.ones(len(x)))
        self.all.update(x[:, 0])
        self.average(loss)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("average", self.average, on_step=False, on_epoch=True)
        self.log("own", x.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("sum", x.sum(), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        self.log("most", x.max(), reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)
        return loss + all_logits.mean(0).square().mean()

    def validation_step(self, batch, batch_idx):
        # falls on copy 0 and rises on copy 1
        copy = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        self.log("scripted", 1.0 + (copy - 0.5) * self.trainer.current_epoch)

    def on_train_epoch_end(self):
        self.found = {
            "all": self.all.compute().sort().values,
            "refused": self._refused(),
            "gathered": self.all_gather(torch.tensor([float(self.global_rank)])).tolist(),
            "any": self.trainer.strategy.reduce_boolean_decision(self.global_rank == 3, all=False),
            "every": self.trainer.strategy.reduce_boolean_decision(self.global_rank == 3),
            "told": [self.trainer.strategy.broadcast(self.global_rank, src) for src in range(4)],
        }

    def _refused(self):
        neighbours = self.device_mesh["pipeline"].get_group()
        with pytest.raises(ConfigError, match=r"global ranks \[\d, \d\]: .*copies \(\["):
            self.all_gather(torch.ones(1), group=neighbours)
        return self.all_gather(torch.ones(1), group=self.device_mesh["data_parallel"].get_group())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": schedule, "monitor": "scripted"}]


def _logged(folder):
    module = lit.seeded(_Logs)
    keep = ModelCheckpoint(folder, filename="{epoch}", monitor="scripted", save_top_k=1)
    used = lit.trainer(
        {"data_parallel_size": 2, "num_microbatches": 1},
        4,
        max_epochs=5,
        enable_checkpointing=True,
        callbacks=[EarlyStopping("scripted", patience=2), keep],
    )
    loader = DataLoader(lit.rows(ROWS), batch_size=4)
    used.fit(module, loader, loader)
    rates = [group["lr"] for group in used.optimizers[0].param_groups]
    metrics = {name: value.item() for name, value in used.callback_metrics.items()}
    return module.found, metrics, rates, used.current_epoch, lit.outcome(module, used)["weights"]


def test_what_copies_tell_each_other(tmp_path):
    results = run_ranks(4, _logged, str(tmp_path))
    x = lit.rows(ROWS).tensors[0]
    for rank, (found, metrics, rates, epochs, weights) in enumerate(results):
        torch.testing.assert_close(found["all"].unique().double(), x[:, 0].sort().values)
        assert found["gathered"] == [[rank % 2], [2 + rank % 2]]
        assert found["refused"].tolist() == [[1], [1]]
        assert (found["any"], found["every"], found["told"]) == (True, False, [0, 1, 2, 3])
        assert metrics["total"] == ROWS  # each row once
        assert metrics["sum"] == pytest.approx(x.sum().item(), rel=1e-6)
        assert metrics["most"] == pytest.approx(x.max().item(), rel=1e-6)
        other = results[(rank + 2) % 4][1]["own"]
        assert metrics["own"] + other == pytest.approx(x.sum().item(), rel=1e-6)
        assert metrics["own"] != other
        assert metrics["average"] == results[0][1]["average"]
        assert epochs == 3  # on copy 1 nothing gets better, which stops all
        assert rates == [0.1]  # a scheduler follows global rank 0
        assert all(torch.equal(v, results[0][4][n]) for n, v in weights.items())
    assert [path.name for path in Path(tmp_path).iterdir()] == ["epoch=0.ckpt"]


def _go_on(strategy, batch_size, folder, max_steps, path=None):
    module = lit.seeded(_SyncedTied, depth=3)
    loader = _loader(lit.tokens(24), batch_size, None if batch_size == 8 else 2)
    return lit.fit_and_keep(strategy, module, loader, folder, max_steps, path)


_COPIES = {"data_parallel_size": 2, "num_microbatches": 2}


def test_a_checkpoint_goes_from_copies_to_any_layout_and_back(tmp_path):
    expected = run_ranks(1, _go_on, None, 8, str(tmp_path / "whole"), 6)[0]
    run_ranks(4, _go_on, _COPIES, 4, str(tmp_path / "copies"), 3)
    assert [p.name for p in (tmp_path / "copies").iterdir()] == ["step=3.ckpt"]
    path = str(tmp_path / "copies" / "step=3.ckpt")
    for ranks, strategy in ((1, None), (2, {}), (4, {})):
        results = run_ranks(ranks, _go_on, strategy, 8, str(tmp_path / f"b{ranks}"), 6, path)
        lit.assert_equal(results, expected)
    path = str(tmp_path / "whole" / "step=3.ckpt")
    lit.assert_equal(run_ranks(4, _go_on, _COPIES, 4, str(tmp_path / "c"), 6, path), expected)


class _Rows:
    """Batches of other sizes: 5 and 3 rows, of 8."""

    def __init__(self, start, stop):
        self.part = slice(start, stop)

    def __iter__(self):
        for first in range(0, ROWS, 8):
            yield list(range(first, first + 8))[self.part]

    def __len__(self):
        return ROWS // 8


def _other_rows(strategy):
    module = lit.seeded(_SyncedTied)
    used = lit.trainer(strategy, lit.world(), use_distributed_sampler=False)
    part = (0, 8) if strategy is None else [(0, 5), (5, 8)][used.global_rank // 2]
    used.fit(module, DataLoader(lit.tokens(ROWS), batch_sampler=_Rows(*part)))
    return module.state_dict()


def test_each_row_counts_the_same_whichever_copy_has_it():
    expected = run_ranks(1, _other_rows, None)[0]
    strategy = {"data_parallel_size": 2, "num_microbatches": 2}
    for weights in run_ranks(4, _other_rows, strategy):
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)


class _Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            yield torch.randn(8, generator=generator, dtype=torch.float64), torch.tensor(1)


def _uneven():
    found = []
    for sized in (True, False):
        module = lit.seeded(_Synced)
        used = lit.trainer(
            {"data_parallel_size": 2, "num_microbatches": 2},
            4,
            max_epochs=2,
            use_distributed_sampler=False,
        )
        count = 20 if used.global_rank < 2 else 13  # 5 batches, or 4 of which one is short
        data = lit.rows(count) if sized else _Stream(count)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            used.fit(module, DataLoader(data, batch_size=4))
        # what one copy has and others have not is no reason to wait in an evaluation
        used.validate(module, DataLoader(lit.rows(count), batch_size=4), verbose=False)
        said = [str(w.message) for w in caught if "of the pipeline" in str(w.message)]
        found.append((used.global_step, any("left out" in text for text in said)))
    return found


def test_an_epoch_ends_for_all_copies_with_the_first():
    results = run_ranks(4, _uneven)
    assert all(steps == 8 for result in results for steps, _ in result)
    assert [[said for _, said in result] for result in results] == [
        [True, True],
        [False, False],
        [True, False],
        [False, False],
    ]


class _Fails(_Synced):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 2:
            raise ValueError("labels of copy 1 are out of range")
        return super().training_step(batch, batch_idx)


def _failing():
    module = lit.seeded(_Fails)
    try:
        lit.trainer({"data_parallel_size": 2, "num_microbatches": 2}, 4).fit(
            module, DataLoader(lit.rows(ROWS), batch_size=4)
        )
    except Exception as error:
        return type(error).__name__, str(error)


def test_a_failure_in_one_copy_ends_all():
    results = run_ranks(4, _failing)
    assert results[2] == ("ValueError", "labels of copy 1 are out of range")
    for rank in (0, 1, 3):
        name, text = results[rank]
        assert name == "PeerError"
        assert "global rank 2 failed" in text


class _OverflowsInACopy(_Overflowing):
    def on_after_backward(self):
        if self.global_rank >= 2:
            super().on_after_backward()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _overflow():
    module = lit.seeded(_OverflowsInACopy)
    strategy = {"data_parallel_size": 2, "num_microbatches": 2}
    arguments = {"precision": None, "plugins": [_Scaled()], "gradient_clip_val": 0.3}
    used = lit.trainer(strategy, 4, **arguments)
    used.fit(module, DataLoader(lit.tokens(), batch_size=4))
    return module.scales, lit.outcome(module, used)["weights"]


def test_an_overflow_in_one_copy_is_everyones():
    results = run_ranks(4, _overflow)
    for scales, weights in results:
        assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15]
        assert all(torch.equal(v, results[0][1][n]) for n, v in weights.items())


class _Apart(_Synced):
    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == 2 and self.global_rank >= 2:
            self.trainer.strategy.barrier("noon")

    def on_train_start(self):
        self.started_s = time.monotonic()


def _apart():
    module = lit.seeded(_Apart)
    try:
        lit.trainer({"data_parallel_size": 2, "num_microbatches": 2}, 4).fit(
            module, DataLoader(lit.rows(ROWS), batch_size=4)
        )
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - module.started_s


def test_copies_at_different_places_are_an_error_that_says_who_is_where():
    results = run_ranks(4, _apart)
    for name, text, seconds in results:
        assert name in ("MeetingError", "PeerError")
        assert "waits for all at noon" in text
        assert seconds < 60
    assert any(r"copy 0 (global rank 0) " in text for _, text, _ in results)


def test_sizes_follow_from_each_other():
    assert sizes_of(None, 1, 4) == (4, 1)
    assert sizes_of(None, None, 4) == (4, 1)
    assert sizes_of(None, 2, 4) == (2, 2)
    assert sizes_of(2, None, 8) == (2, 4)
    assert sizes_of(2, 2, 4) == (2, 2)
    for given, text in {
        (None, 3, 4): r"data_parallel_size=3 on 4 devices.*of 1, 2, 4",
        (3, None, 4): r"pipeline_parallel_size=3 on 4 devices.*of 1, 2, 4",
        (2, 1, 4): r"pipeline_parallel_size=2 on 4 devices.*2 x 1 = 2.*data_parallel_size=2",
        (2, 3, 4): r"2 x 3 = 6 processes",
    }.items():
        with pytest.raises(ConfigError, match=text):
            sizes_of(*given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"data_parallel_size": 0},
        {"data_parallel_size": True},
        {"bucket_cap_mb": 0},
        {"reduce_dtype": "int8"},
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        PipelineStrategy(**wrong)
    assert Reduction(reduce_dtype="bf16").dtype is torch.bfloat16


def test_a_product_that_is_not_the_devices_is_refused_before_the_launch():
    with pytest.raises(ConfigError, match="data_parallel_size=3 on 4 devices"):
        pl.Trainer(accelerator="cpu", devices=4, strategy=PipelineStrategy(data_parallel_size=3))
