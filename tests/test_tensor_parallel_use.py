"""Shared tensors in daily use: torch's other plans, averages of weights, one run after another."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from tests import lit
from tests.lit import run_ranks
from tests.test_tensor_parallel import _LM, _ROWS, _Columns, _outcome, _Sequence, _whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import sharded

_SHARED = {"num_microbatches": 2, "tensor_parallel_size": 2}


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x):
        heads = [f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = _Attention(width), _Gated(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class _Llama(_Columns):
    """Plans for whole modules: their inputs are gathered once, for all projections in them."""

    def make_net(self, width, depth):
        net = _LM(width, 0)
        net.blocks = nn.ModuleList(_Layer(width) for _ in range(depth))
        return net

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net.embed.weight, DTensor):
            return
        mesh, parts = self.device_mesh["tensor_parallel"], Shard(1)
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=parts),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=parts, output_layouts=Replicate()),
        }
        parallelize_module(self.net, mesh, ends)
        gathers = {"input_layouts": (parts,), "desired_input_layouts": (Replicate(),)}
        columns = ("attention.q", "attention.k", "attention.v", "mlp.up", "mlp.gate")
        plan = {
            **{name: SequenceParallel() for name in ("norm1", "norm2")},
            **{name: PrepareModuleInput(**gathers) for name in ("attention", "mlp")},
            **{name: ColwiseParallel() for name in columns},
            **{n: RowwiseParallel(output_layouts=parts) for n in ("attention.out", "mlp.down")},
        }
        for block in self.net.blocks:
            parallelize_module(block, mesh, plan)


class _Odd(_Sequence):
    """A vocabulary that cannot be halved."""

    def make_net(self, width, depth):
        net = _LM(width, depth)
        net.embed, net.head = nn.Embedding(11, width), nn.Linear(width, 11, bias=False)
        return net


class _Dropped(_Columns):
    """Dropout between blocks, on whole activations."""

    def loss(self, batch):
        (tokens,) = batch
        x = self.net.embed(tokens[:, :-1])
        for block in self.net.blocks:
            x = F.dropout(block(x), 0.3, self.training)
        return F.cross_entropy(self.net.head(self.net.norm(x)).mT, tokens[:, 1:])


class _ByHand(_Columns):
    """Weights that are laid out with `distribute_tensor`, and hooks that go with them."""

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net.blocks[0].up.weight, DTensor):
            return
        mesh = self.device_mesh["tensor_parallel"]
        for block in self.net.blocks:
            places = {block.up: (Shard(0), Shard(0)), block.down: (Shard(1), Replicate())}
            for linear, (weight, bias) in places.items():
                for name, place in (("weight", weight), ("bias", bias)):
                    value = distribute_tensor(getattr(linear, name).data, mesh, [place])
                    setattr(linear, name, nn.Parameter(value))
            block.up.register_forward_pre_hook(
                lambda _, given: (DTensor.from_local(given[0], mesh, [Replicate()]),)
            )
            block.down.register_forward_hook(lambda _, given, made: made.full_tensor())


class _Average(pl.Callback):
    """An average that is copied before the cut; the model is validated with it.

    Args:
        lists: Whether it is brought up to date with one operation for all weights.
    """

    def __init__(self, *, lists: bool) -> None:
        self._lists = lists
        self._kept: dict[str, torch.Tensor] = {}

    def on_fit_start(self, trainer, module):
        self.net = copy.deepcopy(module.net).requires_grad_(False)
        self.plain = torch.zeros(module.net.blocks[0].q.weight.shape, dtype=torch.float64)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *rest):
        ours, theirs = list(self.net.parameters()), list(module.net.parameters())
        if self._lists:
            torch._foreach_mul_([*ours, self.plain], 0.9)  # nothing of the model is in it
            torch._foreach_add_(
                [*ours, self.plain], [*theirs, torch.ones_like(self.plain)], alpha=0.1
            )
        else:
            for average, parameter in zip(ours, theirs, strict=True):
                average.lerp_(parameter, 0.1)
        distances = [(a - p).norm() for a, p in zip(ours, theirs, strict=True)]
        module.log("distance", torch.stack(distances).sum() + self.plain.sum())

    @torch.no_grad()
    def on_validation_start(self, trainer, module):
        if trainer.sanity_checking:
            return
        self._kept = {n: p.detach().clone() for n, p in module.net.named_parameters()}
        for average, parameter in zip(self.net.parameters(), module.net.parameters(), strict=True):
            parameter.copy_(average)

    def on_validation_end(self, trainer, module):
        for name, value in self._kept.items():
            module.net.get_parameter(name).data = value


def _loader(batch_size=8):
    return DataLoader(lit.tokens(_ROWS), batch_size=batch_size)


def _fit(strategy, model, *callbacks, runs=1, **arguments):
    module = lit.seeded(model, depth=3)
    for _ in range(runs):
        used = lit.trainer(strategy, lit.world(), callbacks=list(callbacks), **arguments)
        used.fit(module, _loader(), _loader())
    found = _outcome(module, used)
    for callback in callbacks:
        if isinstance(callback, _Average):
            found["weights"] |= {
                f"average.{n}": _whole(p) for n, p in callback.net.named_parameters()
            }
    return found


def _evaluated(strategy):
    """Validates without a fit, in the Trainer of a fit, and in another one; then predicts."""
    module, metrics = lit.seeded(_Predicting, depth=3), {}
    used = [lit.trainer(strategy, lit.world()) for _ in range(3)]
    metrics["before"] = used[0].validate(module, _loader(), verbose=False)[0]["val_loss"]
    used[1].fit(module, _loader())
    for name, one in (("same", used[1]), ("other", used[2])):
        metrics[name] = one.validate(module, _loader(), verbose=False)[0]["val_loss"]
    predicted = torch.cat(used[2].predict(module, _loader()))
    return {"weights": {"predicted": predicted}, "metrics": metrics, "steps": 3}


class _Predicting(_Sequence):
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0][:, :-1]).log_softmax(-1)


_CASES: dict[str, Any] = {
    "gathered once": lambda s: _fit(s, _Llama, gradient_clip_val=0.05),
    "gathered once, zbv": lambda s: _fit(
        s and {**s, "schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
        _Llama,
        accumulate_grad_batches=2,
    ),
    "odd vocabulary": lambda s: _fit(s, _Odd, gradient_clip_val=0.05),
    "by hand": lambda s: _fit(s, _ByHand, gradient_clip_val=0.05),
    "average": lambda s: _fit(s, _Sequence, _Average(lists=False)),
    "average of lists": lambda s: _fit(s, _Columns, _Average(lists=True)),
    "Lightning's average": lambda s: _fit(s, _Sequence, EMAWeightAveraging(decay=0.9)),
    "run after run": lambda s: _fit(s, _Sequence, runs=2),
    "evaluated": _evaluated,
}


def _cases(strategy):
    return {name: case(strategy) for name, case in _CASES.items()}


def test_plans_averages_and_runs_on_shared_tensors_are_those_of_one_device():
    expected = run_ranks(1, _cases, None)[0]
    for result in run_ranks(4, _cases, _SHARED):
        assert result.keys() == expected.keys()
        for name, found in result.items():
            assert found["weights"].keys() == expected[name]["weights"].keys(), name
            lit.assert_equal([found], expected[name], 1e-9)


def _dropped(strategy):
    return _fit({"num_microbatches": 2, **strategy}, _Dropped)


def test_masks_of_dropout_are_those_of_processes_that_share_nothing():
    expected = run_ranks(1, _dropped, {})[0]
    for found in run_ranks(4, _dropped, {"tensor_parallel_size": 2}):
        lit.assert_equal([found], expected, 1e-9)


def _saved_after(strategy, folder):
    """Saves when the run is over; another module goes on from there."""
    path = f"{folder}/after.ckpt"
    module = lit.seeded(_Columns)
    used = lit.trainer(strategy, lit.world())
    used.fit(module, _loader())
    used.save_checkpoint(path)
    went_on = lit.seeded(_Columns)
    other = lit.trainer(strategy, lit.world(), max_epochs=2)
    other.fit(went_on, _loader(), ckpt_path=path)
    return _outcome(module, used), _outcome(went_on, other)


@pytest.mark.parametrize("stored", [False, True])
def test_a_checkpoint_that_is_saved_after_the_run_is_whole(tmp_path: Path, *, stored: bool):
    for name in ("one", "shared"):
        (tmp_path / name).mkdir()
    ended, went_on = run_ranks(1, _saved_after, None, str(tmp_path / "one"))[0]
    strategy = {**_SHARED, "save_distributed_checkpoint": stored}
    for found in run_ranks(4, _saved_after, strategy, str(tmp_path / "shared")):
        lit.assert_equal([found[0]], ended, 1e-9)
        lit.assert_equal([found[1]], went_on, 1e-9)
    if not stored:
        files = [tmp_path / name / "after.ckpt" for name in ("one", "shared")]
        one, shared = (torch.load(file, weights_only=False)["state_dict"] for file in files)
        assert shared._metadata == one._metadata
        loaded = _Columns.load_from_checkpoint(files[1]).state_dict()
        assert {type(value) for value in loaded.values()} == {torch.Tensor}
        for name, value in ended["weights"].items():
            torch.testing.assert_close(loaded[name].double(), value, rtol=1e-5, atol=1e-6)


def _converted():
    module = lit.seeded(_Columns)
    lit.trainer(_SHARED, lit.world()).fit(module, _loader())
    used = lit.trainer(_SHARED, lit.world(), precision="bf16-true")
    try:
        used.fit(module, _loader())
    except Exception as error:
        return type(error).__name__, str(error)
    return "", str({p.dtype for p in module.parameters()})


def test_another_precision_for_weights_in_use_is_an_error_that_says_what_to_do():
    for name, text in run_ranks(2, _converted):
        assert name == "ConfigError"
        assert "Build the module anew" in text


def _begun_late(strategy, folder):
    """The rank that makes the folder takes its time."""
    discard = sharded.discard

    def slow(part):
        discard(part)
        time.sleep(0.5)

    sharded.discard = slow
    try:
        module = lit.seeded(_Columns, depth=3)
        used = lit.trainer(strategy, lit.world())
        used.fit(module, lit.loader_for(used, lit.tokens(_ROWS), 4))
        used.save_checkpoint(f"{folder}/late.ckpt")
        used.strategy._close_checkpoints()
    finally:
        sharded.discard = discard
    return _outcome(module, used)


@pytest.mark.parametrize("wanted", [True, "async"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"pipeline_parallel_size": 1, "tensor_parallel_size": 2},
        {"pipeline_parallel_size": 1, "data_parallel_size": 2, "data_parallel_sharding": True},
        {"pipeline_parallel_size": 1, "data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
    ],
    ids=["shared tensors", "sharded copies", "copies", "stages"],
)
def test_no_rank_writes_before_the_folder_is_made(tmp_path: Path, strategy: Any, wanted: Any):
    given = {**strategy, "num_microbatches": 2, "save_distributed_checkpoint": wanted}
    expected = run_ranks(2, _begun_late, given, str(tmp_path))[0]["weights"]
    stored = sharded.read_sharded(tmp_path / "late.ckpt", False)["state_dict"]
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in expected.items()
    }
    for name, value in expected.items():
        assert torch.equal(stored[name].clone(), value), name
