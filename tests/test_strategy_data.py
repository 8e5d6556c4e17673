"""One batch for all stages, whatever the loader; short, changing and nested batches."""

from __future__ import annotations

import random
import sys
from collections import UserDict

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from tests import lit
from tests.helpers import spawn_ranks
from tests.lit import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pipe import BatchError, cutting


def _short(strategy, count):
    module = lit.seeded(lit.Lit)
    trainer = lit.trainer(strategy, lit.world(), max_epochs=2)
    trainer.fit(module, DataLoader(lit.rows(count), batch_size=4))
    return lit.outcome(module, trainer)


@pytest.mark.parametrize("count", [10, 9], ids=["2 rows at the end", "1 row at the end"])
def test_a_short_last_batch_trains_exactly(count):
    expected = run_ranks(1, _short, None, count)[0]
    assert expected["steps"] == 6
    lit.assert_equal(run_ranks(2, _short, {"num_microbatches": 4}, count), expected)


class _Identity(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        for layer in self.net:
            nn.init.eye_(layer.weight)
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.net(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class _Random(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        x = torch.rand(4) + random.random() + float(np.random.rand())
        return x, x.clone()


def _random(num_workers):
    warnings_free = DataLoader(_Random(), batch_size=4, shuffle=True, num_workers=num_workers)
    torch.manual_seed(torch.distributed.get_rank())
    module = _Identity()
    trainer = lit.trainer({}, lit.world(), precision="32-true", max_epochs=2)
    trainer.fit(module, warnings_free)
    return module.losses


def test_stages_see_the_same_random_batch():
    assert run_ranks(2, _random, 0) == [[0.0] * 8] * 2


def _random_from_workers():
    sys.stdout.write(f"losses {_random(2)}\n")


def test_stages_see_the_same_random_batch_of_worker_processes():
    for ended in spawn_ranks(2, _random_from_workers, timeout=150):
        assert f"losses {[0.0] * 8}" in ended.stdout, ended.stderr


class _Transformed(lit.Lit):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        scale = random.random() + float(np.random.rand())
        return x + scale * torch.randn_like(x), y


def _transformed(strategy):
    module = lit.seeded(_Transformed)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(lit.rows(), batch_size=8, shuffle=True))
    return lit.outcome(module, trainer)


def test_random_transforms_draw_the_same_on_every_stage():
    expected = run_ranks(1, _transformed, None)[0]
    lit.assert_equal(run_ranks(2, _transformed, {}), expected)


class _Counting(pl.LightningDataModule):
    """Its hooks count, write into the batch and draw."""

    def __init__(self):
        super().__init__()
        self.count, self.seen = 0, {"rows": []}

    def train_dataloader(self):
        return DataLoader(lit.rows(), batch_size=8)

    def val_dataloader(self):
        return DataLoader(lit.rows(), batch_size=8)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.count += 1
        self.seen["rows"].append(len(batch[0]))
        batch[0] = batch[0].mul_(0.5) + float(np.random.rand())
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        batch[0].add_(torch.randn(()))
        return batch


def _counting(strategy):
    module, data = lit.seeded(lit.Lit), _Counting()
    trainer = lit.trainer(strategy, lit.world(), num_sanity_val_steps=1)
    trainer.fit(module, data)
    return lit.outcome(module, trainer), data.count, data.seen


def test_the_look_at_the_first_batch_leaves_nothing_in_the_data_module():
    expected, *left = run_ranks(1, _counting, None)[0]
    for result, *found in run_ranks(2, _counting, {}):
        lit.assert_equal([result], expected)
        assert found == left


class _Ids(pl.Callback):
    def __init__(self):
        self.ids = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ids += batch[0][:, 0].tolist()


def _all_ids():
    x = torch.zeros(64, 8, dtype=torch.float64)
    x[:, 0] = torch.arange(64)
    module, ids = lit.seeded(lit.Lit), _Ids()
    trainer = lit.trainer({}, lit.world(), callbacks=[ids])
    dataset = torch.utils.data.TensorDataset(x, torch.zeros(64, dtype=torch.int64))
    trainer.fit(module, DataLoader(dataset, batch_size=8, shuffle=True))
    return trainer.num_training_batches, int(trainer.estimated_stepping_batches), ids.ids


def test_the_data_is_not_sharded_over_stages():
    results = run_ranks(4, _all_ids)
    for num_batches, num_steps, ids in results:
        assert (num_batches, num_steps) == (8, 8)
        assert sorted(ids) == list(range(64))
        assert ids == results[0][2]


class _Stream(IterableDataset):
    def __init__(self, count):
        self.count = count
        self.reads = 0

    def __iter__(self):
        x, y = lit.rows(self.count).tensors
        for row in zip(x, y, strict=True):
            self.reads += 1
            yield row


class _OneShot:
    """A loader that can be gone through once and has no length."""

    def __init__(self, count):
        x, y = lit.rows(count).tensors
        self.batches = iter([(x[i : i + 8], y[i : i + 8]) for i in range(0, count, 8)])

    def __iter__(self):
        return self.batches


def _streamed(strategy, kind, arguments):
    module = lit.seeded(lit.Lit)
    loader = DataLoader(_Stream(44), batch_size=8) if kind == "iterable" else _OneShot(44)
    trainer = lit.trainer(strategy, lit.world(), **arguments)
    trainer.fit(module, loader, DataLoader(_Stream(20), batch_size=8))
    reads = loader.dataset.reads if kind == "iterable" else 0
    return lit.outcome(module, trainer), reads


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("iterable", {}),
        ("iterable", {"limit_train_batches": 3, "max_epochs": 2, "limit_val_batches": 1}),
        ("iterable", {"max_steps": 4, "max_epochs": -1, "val_check_interval": 2}),
        ("once", {}),
    ],
)
def test_streams_lose_no_batch_and_end_everywhere(kind, arguments):
    expected, reads = run_ranks(1, _streamed, None, kind, arguments)[0]
    results = run_ranks(2, _streamed, {}, kind, arguments)
    lit.assert_equal([result for result, _ in results], expected)
    assert [count for _, count in results] == [reads, 0]


class _TwoLoaders(lit.Lit):
    def training_step(self, batch, batch_idx):
        loss = super().loss(batch["a"])
        if batch["b"] is not None:
            loss = loss + super().loss(batch["b"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch))


def _combined(strategy, mode, reload):
    module = lit.seeded(_TwoLoaders)
    loaders = {
        "a": DataLoader(lit.rows(24), batch_size=8, shuffle=True),
        "b": DataLoader(lit.rows(16), batch_size=8),
    }
    arguments = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": reload}
    trainer = lit.trainer(strategy, lit.world(), **arguments)
    trainer.fit(module, CombinedLoader(loaders, mode), list(loaders.values()))
    return lit.outcome(module, trainer)


@pytest.mark.parametrize(("mode", "reload"), [("min_size", 1), ("max_size_cycle", 0)])
def test_combined_loaders(mode, reload):
    expected = run_ranks(1, _combined, None, mode, reload)[0]
    lit.assert_equal(run_ranks(2, _combined, {}, mode, reload), expected)


class _Lengths(lit.LitTied):
    def __init__(self):
        super().__init__()
        self.lengths = []

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.lengths.append((tuple(batch[0].shape), outputs["loss"].item()))


def _lengths(strategy):
    module = lit.seeded(_Lengths)
    batches = [(lit.tokens(4, length).tensors[0],) for length in (5, 9, 3, 5)]
    trainer = lit.trainer(strategy, lit.world(), val_check_interval=1, num_sanity_val_steps=0)
    trainer.fit(
        module, DataLoader(batches, batch_size=None), DataLoader(lit.tokens(8, 7), batch_size=8)
    )
    return lit.outcome(module, trainer), module.lengths


def test_sequence_lengths_and_batch_sizes_may_change():
    expected, lengths = run_ranks(1, _lengths, None)[0]
    for result, found in run_ranks(2, _lengths, {"num_microbatches": 2}):
        lit.assert_equal([result], expected)
        assert [shape for shape, _ in found] == [shape for shape, _ in lengths]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in lengths])


class _Short(nn.Module):
    """A block that looks at the first 6 of many places only, and counts its calls."""

    def __init__(self, width, longest):
        super().__init__()
        self.linear, self.longest = nn.Linear(width, width), longest
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.linear(x[:, :6] if x.shape[1] > self.longest else x).tanh()


class _Branching(nn.Module):
    """Goes other ways for long sentences: in a unit, and between units."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        longest = (99, 99, 10, 99)
        self.blocks = nn.ModuleList(_Short(width, n) for n in longest)
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x[:, : x.shape[1]] + block(x).mean(1, keepdim=True)
            if tokens.shape[1] > 8:
                x = x.relu()
        return self.head(x)


class _LitBranching(lit.LitTied):
    def make_net(self, width, depth):
        return _Branching(width)


def _branching(strategy):
    traced = []
    trace_step = cutting.trace_step

    def counting(root, step, batch, **kwargs):
        if len(batch[0]) == 2:  # a micro-batch
            traced.append(batch[0].shape[1] - 1)
        return trace_step(root, step, batch, **kwargs)

    cutting.trace_step = counting
    try:
        module = lit.seeded(_LitBranching)
        batches = [(lit.tokens(4, n + 1).tensors[0],) for n in (5, 9, 3, 10, 7, 12, 5, 8, 6, 11)]
        trainer = lit.trainer(strategy, lit.world())
        trainer.fit(module, DataLoader(batches, batch_size=None))
    finally:
        cutting.trace_step = trace_step
    # every rank has the buffers of its own stages
    counts = {float(block.calls) for block in module.net.blocks}
    return lit.outcome(module, trainer), traced, counts


def test_shapes_are_derived_and_a_wrong_one_is_found_undone_and_traced():
    expected, _, counts = run_ranks(1, _branching, None)[0]
    assert counts == {10.0}
    for result, traced, counts in run_ranks(2, _branching, {"num_microbatches": 2}):
        lit.assert_equal([result], expected)
        # 12 and 11 are cut in one unit of several that were alike; 8 is near to 9 but not long
        assert [n for n in traced if n not in (11, 12)] == [5, 9, 3, 10, 8]
        assert 6 not in traced
        assert 7 not in traced
        assert 20.0 in counts
        assert counts <= {20.0, 0.0}


class _Nested(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(4, 3)
        self.shapes = []

    def training_step(self, batch, batch_idx):
        inputs, target = batch
        x = inputs["x"].masked_fill(inputs["m"]["mask"], 0) + inputs["bias"]
        hidden = self.net(x) if inputs["flag"] else x
        assert len(inputs["ids"]) == len(x)
        logits = self.head(hidden.masked_fill(inputs["m"]["mask"], 0))
        self.shapes.append((tuple(inputs["cw"].shape), inputs["none"], inputs["ids"][0]))
        loss = F.cross_entropy(logits, target["a"], reduction="none") * inputs["cw"].sum()
        return loss.mean() + (hidden[:, :2] - target["b"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _nested(strategy):
    module = lit.seeded(_Nested)
    generator = torch.Generator().manual_seed(3)
    inputs = {
        "x": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "m": {"mask": torch.rand(6, 4, generator=generator) < 0.3},
        "bias": torch.ones(1, 4, dtype=torch.float64),
        "cw": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        "flag": True,
        "none": None,
        "ids": list("abcdef"),
    }
    target = {"a": torch.arange(6) % 3, "b": torch.ones(6, 2, dtype=torch.float64)}
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader([(inputs, target)] * 3, batch_size=None))
    return lit.outcome(module, trainer)


def test_nested_batches_are_split_by_rows_and_the_rest_goes_whole():
    expected = run_ranks(1, _nested, None)[0]
    lit.assert_equal(run_ranks(2, _nested, {"num_microbatches": 3}), expected)


class _Ruled(lit.Lit):
    """A batch whose class weights have as many entries as it has rows, and time before rows."""

    def make_net(self, width, depth):
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def loss(self, batch):
        hidden = self.net(batch["steps"]).mean(0)
        weights = batch["loss"]["cw"]
        assert weights.shape == (4,)
        error = F.cross_entropy(hidden[:, :4], batch["y"], reduction="none")
        return (error * (1 + weights.sum())).mean() + 0.0 * weights[batch["y"]].mean()

    def training_step(self, batch, batch_idx):
        assert isinstance(batch, UserDict)
        return super().training_step(batch, batch_idx)


def _ruled(strategy):
    x, y = lit.rows(24).tensors
    batches = [
        UserDict(
            steps=x[i : i + 12].view(3, 4, 8),
            y=y[i : i + 4],
            loss={"cw": torch.arange(4.0).double()},
        )
        for i in (0, 12)
    ]
    module = lit.seeded(_Ruled)
    trainer = lit.trainer(strategy, lit.world())
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return lit.outcome(module, trainer)


def test_rules_say_how_keys_of_a_batch_are_split():
    expected = run_ranks(1, _ruled, None)[0]
    arguments = {"num_microbatches": 3, "split_batch": {"steps": 1, "loss.cw": "replicate"}}
    lit.assert_equal(run_ranks(2, _ruled, arguments), expected)


class _Normed(lit.Lit):
    def make_net(self, width, depth):
        blocks = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(4)]
        return nn.Sequential(*blocks, nn.Linear(width, 4))


def _normed(strategy):
    module = lit.seeded(_Normed)
    trainer = lit.trainer(strategy, lit.world(), max_epochs=1)
    # 8, 8 and 5 rows: pieces of 2 rows, the last of 3, 2
    trainer.fit(module, DataLoader(lit.rows(21), batch_size=8), DataLoader(lit.rows(9), 8))
    counts = [b.item() for n, b in module.named_buffers() if n.endswith("num_batches_tracked")]
    return counts, torch.isfinite(trainer.callback_metrics["val_loss"]).item()


def test_no_micro_batch_leaves_a_batch_norm_one_row():
    assert run_ranks(2, _normed, {"num_microbatches": 4}) == [([4 + 4 + 2] * 4, True)] * 2


def _no_rows():
    module = lit.seeded(lit.Lit)
    x, y = lit.rows().tensors
    with pytest.raises(BatchError, match="0 rows"):
        lit.trainer({}, 2).fit(module, DataLoader([(x[:0], y[:0])], batch_size=None))
    return True


def test_an_empty_batch_is_refused_on_all_ranks():
    assert run_ranks(2, _no_rows) == [True, True]


class _Broken(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 20:
            raise FileNotFoundError("picture 20 is missing")
        return tuple(t[index] for t in lit.rows().tensors)


def _broken():
    module = lit.seeded(lit.Lit)
    with pytest.raises(FileNotFoundError, match="picture 20"):
        lit.trainer({}, 2).fit(module, DataLoader(_Broken(), batch_size=8))
    return True


def test_a_loader_that_raises_ends_all_ranks_with_its_exception():
    assert run_ranks(2, _broken) == [True, True]


class _Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, *place):
        self.written.append((prediction.tolist(), place))


class _TwoSets(lit.Lit):
    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return super().predict_step(batch, batch_idx)


def _predicted(strategy, with_writer):
    writer = _Writer()
    module = lit.seeded(_TwoSets)
    trainer = lit.trainer(strategy, lit.world(), callbacks=[writer] if with_writer else [])
    loaders = [DataLoader(lit.rows(count), batch_size=8) for count in (20, 8)]
    found = trainer.predict(module, loaders)
    return [[None if p is None else p.tolist() for p in part] for part in found], writer.written


def _predicted_in_three_ways():
    only_first = {"share_predictions": False}
    return [_predicted(*case) for case in (({}, False), (only_first, True), (only_first, False))]


def test_predictions_are_in_order_on_all_ranks_or_on_those_that_write_them():
    expected, written = run_ranks(1, _predicted, None, True)[0]
    first, second = run_ranks(2, _predicted_in_three_ways)
    assert first == [(expected, []), (expected, written), (expected, [])]
    assert second == [*first[:2], ([[None] * 3, [None]], [])]


class _Generates(lit.LitTied):
    def predict_step(self, batch, batch_idx):
        tokens = batch[0][:, :4]
        for _ in range(3):  # each round goes through all stages
            token = self.net(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, token], 1)
        return tokens


def _generated(strategy):
    loader = DataLoader(lit.tokens(12), batch_size=8)
    found = lit.trainer(strategy, lit.world()).predict(lit.seeded(_Generates), loader)
    return [tokens.tolist() for tokens in found]


def test_a_loop_that_generates_runs_over_all_stages():
    expected = run_ranks(1, _generated, None)[0]
    assert run_ranks(2, _generated, {"num_microbatches": 2}) == [expected] * 2
