"""Stages whose tensors several processes share: what `parallelize_module` makes of a model.

It trains as one device. Weights are compared whole, whoever holds their parts.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from tests import lit
from tests.lit import run_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PipelineStrategy
from lightning_pipe.cli import consolidate
from lightning_pipe.errors import CutError, GuardError
from lightning_pipe.replicas import sizes_of
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.parted import part_of

_VOCABULARY = 12


class _Block(nn.Module):
    """Attention of any number of heads, and an MLP."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # no bias: that of keys has a gradient of nothing but rounding
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        given = self.norm1(x)
        heads = [f(given).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _LM(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Columns(lit.Lit):
    """Column- and row-parallel linear layers; activations between them are whole."""

    def make_net(self, width, depth):
        return _LM(width, depth)

    def configure_model(self):
        if self.device_mesh is None or isinstance(self.net.blocks[0].up.weight, DTensor):
            return
        mesh = self.device_mesh["tensor_parallel"]
        for block in self.net.blocks:
            parallelize_module(block, mesh, self.plan_of_block())
        self.parallelize_ends(mesh)

    def plan_of_block(self):
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        return {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()}

    def parallelize_ends(self, mesh):
        pass

    def loss(self, batch):
        (tokens,) = batch
        logits = self.net(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)


class _Single(_Columns):
    """In fp32."""


class _Sequence(_Columns):
    """Sequence-parallel: what crosses a boundary is a `DTensor` of a part of each sequence."""

    def plan_of_block(self):
        columns = {n: ColwiseParallel(input_layouts=Shard(1)) for n in ("q", "k", "v", "up")}
        rows = {
            name: RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
            for name in ("out", "down")
        }
        return {**columns, **rows, "norm1": SequenceParallel(), "norm2": SequenceParallel()}

    def parallelize_ends(self, mesh):
        ends = {
            "embed": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            ),
            "norm": SequenceParallel(),
            "head": self.head(),
        }
        parallelize_module(self.net, mesh, ends)

    def head(self):
        return ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())


class _Frozen(_Columns):
    """Layers that are shared by themselves, and give ordinary tensors to the next stage."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.net.embed.weight.requires_grad_(False)

    def parallelize_ends(self, mesh):
        embed = RowwiseParallel(input_layouts=Replicate())
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self.net, mesh, {"embed": embed, "head": head})


class _Tied(_Sequence):
    """Its head is its embedding, on the other stage."""

    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        net.head.weight = net.embed.weight
        return net

    def parallelize_ends(self, mesh):
        super().parallelize_ends(mesh)
        self.net.head.weight = self.net.embed.weight


class _Losses(_Sequence):
    """Logits are never whole: the loss is taken of parts of the vocabulary."""

    def head(self):
        return ColwiseParallel(input_layouts=Shard(1), use_local_output=False)

    def loss(self, batch):
        (tokens,) = batch
        logits = self.net(tokens[:, :-1])
        with loss_parallel():
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


_MODELS = {c.__name__: c for c in (_Columns, _Single, _Sequence, _Frozen, _Tied, _Losses)}
_ROWS = 24


def _whole(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def _outcome(module, used):
    weights = {name: _whole(value) for name, value in module.state_dict().items()}
    metrics = {name: value.item() for name, value in used.callback_metrics.items()}
    return {"weights": weights, "metrics": metrics, "steps": used.global_step}


def _fit(strategy, model, arguments, batch_size=8):
    module = lit.seeded(_MODELS[model])
    if model in ("_Single", "_Half"):
        module.float()
    used = lit.trainer(strategy, lit.world(), **arguments)
    validated = DataLoader(lit.tokens(_ROWS), batch_size=batch_size)
    used.fit(module, lit.loader_for(used, lit.tokens(_ROWS), batch_size), validated)
    return _outcome(module, used)


# strategy, model, arguments of the Trainer
_CASES = {
    "accumulated, clipped by norm": (
        {"schedule": "1f1b", "num_microbatches": 4},
        "_Columns",
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    ),
    "zbv, clipped by value": (
        {"schedule": "zbv", "virtual_stages": 2, "num_microbatches": 4},
        "_Sequence",
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "zero bubble, clipped by norm": (
        {"schedule": "zero_bubble", "num_microbatches": 4},
        "_Sequence",
        {"gradient_clip_val": 0.05},
    ),
    "recomputed": (
        {"num_microbatches": 2, "activation_checkpointing": "all"},
        "_Sequence",
        {},
    ),
    "frozen": ({"num_microbatches": 2}, "_Frozen", {"gradient_clip_val": 0.05}),
    "tied": ({"num_microbatches": 2}, "_Tied", {"gradient_clip_val": 0.05}),
    "losses of parts": ({"num_microbatches": 2}, "_Losses", {"gradient_clip_val": 0.05}),
    "fp32": ({"num_microbatches": 2}, "_Single", {"precision": "32-true"}),
}


def _references(names):
    return {name: _fit(None, *_CASES[name][1:]) for name in names}


def _parallel(names, batch_size=8, sizes=None):
    shared = {"tensor_parallel_size": 2, **(sizes or {})}
    return {
        name: _fit({**strategy, **shared}, model, arguments, batch_size)
        for name, (strategy, model, arguments) in ((name, _CASES[name]) for name in names)
    }


def test_two_stages_of_two_processes_train_as_one_device():
    expected = run_ranks(1, _references, list(_CASES))[0]
    for result in run_ranks(4, _parallel, list(_CASES)):
        for name, found in result.items():
            lit.assert_equal([found], expected[name], 1e-5 if name == "fp32" else 1e-9)


def test_copies_whose_processes_share_tensors_train_as_one_device():
    names = ["accumulated, clipped by norm", "tied"]
    expected = run_ranks(1, _references, names)[0]
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": 2, "schedule": "auto"}
    for result in run_ranks(4, _parallel, names, 4, sizes):
        for name, found in result.items():
            lit.assert_equal([found], expected[name])


def test_all_three_axes_in_any_order_train_as_one_device():
    names = ["zero bubble, clipped by norm"]
    expected = run_ranks(1, _references, names)[0]
    order = ["pipeline", "tensor_parallel", "data_parallel"]
    sizes = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "mesh_order": order}
    for result in run_ranks(8, _parallel, names, 4, sizes):
        lit.assert_equal([result[names[0]]], expected[names[0]])


# ---------------------------------------------------------------------- checkpoints

_SHARED = {"tensor_parallel_size": 2, "num_microbatches": 2}


class _Guarded(_Tied):
    """Shares nothing where there is nobody to share with."""

    def configure_model(self):
        if self.device_mesh is not None and self.device_mesh["tensor_parallel"].size() > 1:
            super().configure_model()


def _go_on(strategy, folder, max_steps, path=None):
    module = lit.seeded(_Guarded if (strategy or {}).get("data_parallel_sharding") else _Tied)
    save = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=3)
    used = lit.trainer(
        strategy,
        lit.world(),
        max_epochs=-1,
        max_steps=max_steps,
        enable_checkpointing=True,
        callbacks=[save],
    )
    copies = (strategy or {}).get("data_parallel_size", 1)
    used.fit(module, lit.loader_for(used, lit.tokens(_ROWS), 8 // copies), ckpt_path=path)
    return _outcome(module, used)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one device ends with after 6 steps, and its folder with a checkpoint of step 3."""
    folder = tmp_path_factory.mktemp("whole")
    return run_ranks(1, _go_on, None, str(folder), 6)[0], folder / "step=3.ckpt"


def _assert_same_file(one, other):
    one, other = torch.load(one), torch.load(other)
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(other[key], one[key], rtol=1e-9, atol=1e-9)


def test_a_plain_checkpoint_goes_from_shared_tensors_to_any_layout_and_back(tmp_path, whole):
    expected, one = whole
    run_ranks(4, _go_on, _SHARED, str(tmp_path / "a"), 3)
    path = tmp_path / "a" / "step=3.ckpt"
    _assert_same_file(one, path)
    lit.assert_equal(run_ranks(1, _go_on, None, str(tmp_path / "b"), 6, str(path)), expected)
    lit.assert_equal(run_ranks(4, _go_on, {}, str(tmp_path / "c"), 6, str(path)), expected)
    lit.assert_equal(run_ranks(4, _go_on, _SHARED, str(tmp_path / "d"), 6, str(one)), expected)


def test_a_sharded_checkpoint_goes_from_shared_tensors_to_any_layout_and_back(tmp_path, whole):
    expected, one = whole
    stored = {"save_distributed_checkpoint": True}
    run_ranks(4, _go_on, {**_SHARED, **stored}, str(tmp_path), 3)
    folder = tmp_path / "step=3.ckpt"
    parts = {p.name.split("_")[2] for p in folder.glob("*.distcp")}
    assert len(parts) == 4, "every process writes its part"
    consolidate([str(folder), str(tmp_path / "one.ckpt")])
    _assert_same_file(one, tmp_path / "one.ckpt")
    lit.assert_equal(run_ranks(2, _go_on, {}, str(tmp_path / "a"), 6, str(folder)), expected)
    lit.assert_equal(run_ranks(4, _go_on, _SHARED, str(tmp_path / "b"), 6, str(folder)), expected)


def test_checkpoints_go_between_shared_tensors_and_sharded_copies(tmp_path, whole):
    expected, _ = whole
    copies = {"data_parallel_size": 2, "num_microbatches": 2, "data_parallel_sharding": True}
    stored = {"save_distributed_checkpoint": True}
    for first, second in ((_SHARED, copies), (copies, _SHARED)):
        folder = tmp_path / f"{len(first)}"
        run_ranks(4, _go_on, {**first, **stored}, str(folder), 3)
        path = str(folder / "step=3.ckpt")
        lit.assert_equal(run_ranks(4, _go_on, second, str(folder / "b"), 6, path), expected)


# ---------------------------------------------------------------------- hooks


class _Looks(_Sequence):
    """Reads and writes weights and gradients between steps."""

    def on_before_optimizer_step(self, optimizer):
        norms = grad_norm(self, norm_type=2)
        self.log_dict({name: norms[name] for name in sorted(norms)[::3]})
        for parameter in self.net.parameters():
            parameter.grad += 1e-3 * parameter.norm()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in self.net.blocks.parameters():
                parameter.mul_(0.999)
            self.net.embed.weight[:, 0] = self.net.head.weight.mean()
        self.log("largest", max(parameter.abs().max() for parameter in self.net.parameters()))


_MODELS["_Looks"] = _Looks
_CASES["hooks"] = ({"num_microbatches": 2}, "_Looks", {})


def _shares(names):
    """Trains, and what this process held of the model meanwhile."""
    held = []

    def note(module):
        own = [p for p in module.parameters() if not is_fake(p)]
        held.append(sum(part_of(p).nbytes for p in own))

    _Looks.on_train_end = note
    return _parallel(names), held[0]


def test_hooks_see_whole_weights_and_a_process_holds_its_share():
    expected = run_ranks(1, _references, ["hooks"])[0]["hooks"]
    num_bytes = sum(value.nbytes for value in expected["weights"].values())
    for result, held in run_ranks(4, _shares, ["hooks"]):
        lit.assert_equal([result["hooks"]], expected)
        assert held < 0.3 * num_bytes
    for result in run_ranks(2, _parallel, ["hooks"], 8, {"tensor_parallel_size": 1}):
        lit.assert_equal([result["hooks"]], expected)


def _lengths(strategy):
    """Trains on batches of several lengths."""
    module = lit.seeded(_Sequence)
    used = lit.trainer(strategy, lit.world())
    (tokens,) = lit.tokens(_ROWS).tensors
    lengths = (9, 5, 7, 5, 3)
    batches = [[tokens[place : place + 8, :length]] for place, length in enumerate(lengths)]
    used.fit(module, DataLoader(batches, batch_size=None))
    return _outcome(module, used)


def test_sequences_of_several_lengths_are_divided_alike():
    expected = run_ranks(1, _lengths, None)[0]
    lit.assert_equal(run_ranks(4, _lengths, _SHARED), expected)


# ---------------------------------------------------------------------- what cannot be


def test_sizes_that_cannot_be_are_refused_with_those_that_can():
    assert sizes_of(None, None, 8, 2) == (4, 1)
    assert sizes_of(2, None, 8, 2) == (2, 2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=3 on 8 .* Give .* 1, 2, 4, 8"):
        sizes_of(None, None, 8, 3)
    with pytest.raises(ConfigError, match=r"3 x 1 x 2 = 6 processes are needed"):
        sizes_of(3, 1, 8, 2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=0"):
        PipelineStrategy(tensor_parallel_size=0)
    with pytest.raises(ConfigError, match=r"data_parallel_sharding=True.*Leave one of them out"):
        PipelineStrategy(tensor_parallel_size=2, data_parallel_sharding=True)
    with pytest.raises(ConfigError, match=r"mesh_order=.*each once"):
        PipelineStrategy(mesh_order=["pipeline", "data_parallel"])


class _Elsewhere(_Columns):
    """Shares its tensors along the wrong axis."""

    def configure_model(self):
        if self.device_mesh is not None:
            parallelize_module(
                self.net.blocks[0], self.device_mesh["pipeline"], self.plan_of_block()
            )


def _refused(model, size=1):
    module = lit.seeded(model)
    used = lit.trainer({"num_microbatches": 2, "tensor_parallel_size": size}, lit.world())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            used.fit(module, DataLoader(lit.tokens(8), batch_size=8))
        except ConfigError as error:
            return str(error)
    return [str(warning.message) for warning in caught]


def test_tensors_that_other_processes_share_are_refused():
    for told in run_ranks(2, _refused, _Elsewhere):
        assert "net.blocks.0.q.weight" in told
        assert 'self.device_mesh["tensor_parallel"]' in told


class _Seeded(_Columns):
    """Each process makes other weights."""

    def configure_model(self):
        torch.manual_seed(self.global_rank)
        self.net = self.make_net(8, 4)
        super().configure_model()


def _seeded():
    used = lit.trainer(_SHARED, lit.world())
    with pytest.raises(CutError) as caught:
        used.fit(lit.seeded(_Seeded), DataLoader(lit.tokens(8), batch_size=8))
    return str(caught.value)


def test_weights_that_differ_between_processes_of_a_stage_are_refused():
    for told in run_ranks(4, _seeded):
        assert "configure_model builds other weights on one rank than on another" in told


def _mixed():
    module = lit.seeded(_Columns)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), foreach=True)
    used = lit.trainer({**_SHARED, "pipeline_parallel_size": 1}, lit.world())
    with pytest.raises(ConfigError) as caught:
        used.fit(module, DataLoader(lit.tokens(8), batch_size=8))
    return str(caught.value)


def test_an_optimizer_that_mixes_shared_and_ordinary_weights_is_told_what_to_do():
    for told in run_ranks(2, _mixed):
        assert "AdamW cannot step where each process of a stage holds a part" in told
        assert "foreach=False" in told


class _Alone(_Columns):
    """One process writes to a weight that all processes of its stage have."""

    def on_fit_start(self):
        if self.global_rank == 0:
            with torch.no_grad():
                self.net.norm.weight.data.add_(1.0)


def _guarded():
    module = lit.seeded(_Alone)
    used = lit.trainer({**_SHARED, "pipeline_parallel_size": 1}, lit.world())
    with pytest.raises(GuardError) as caught:
        used.fit(module, lit.loader_for(used, lit.tokens(_ROWS), 8))
    return str(caught.value)


def test_a_weight_that_one_process_of_a_stage_has_changed_is_an_error():
    for told in run_ranks(2, _guarded):
        assert "the weight net.norm.weight is no longer the same in all tensor ranks" in told


def test_processes_that_share_nothing_are_told():
    told = run_ranks(2, _refused, lit.LitTied, 2)
    assert sum("parallelize_module" in text for text in told[0]) == 1
    assert not any("parallelize_module" in text for text in told[1])


class _Weighted(_Columns):
    """A mean over valid tokens, of which rows have other numbers."""

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        targets = tokens[:, 1:].masked_fill(tokens[:, 1:] > 2 + tokens[:, :1], -100)
        logits = self.net(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "loss_weight": (targets != -100).sum()}


class _Half(_Columns):
    """In fp32, with steps large enough to show half a gradient."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class _Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class _Norms(_Half):
    """Blocks with batch norms."""

    def make_net(self, width, depth):
        net = super().make_net(width, depth)
        net.blocks = nn.ModuleList(_Normed(width) for _ in range(depth))
        return net

    def plan_of_block(self):
        return {"up": ColwiseParallel(), "down": RowwiseParallel()}

    def loss(self, batch):
        (tokens,) = batch
        x = self.net.embed(tokens[:, 1:]).mean(1)
        for block in self.net.blocks:
            x = block(x)
        return F.cross_entropy(self.net.head(self.net.norm(x)), tokens[:, 0])


_MODELS |= {c.__name__: c for c in (_Weighted, _Norms, _Half)}
# strategy, model, arguments of the Trainer, tolerance; the reference has the same micro-batches
_MORE = {
    "weighted": ({"num_microbatches": 4}, "_Weighted", {"gradient_clip_val": 0.05}, 1e-9),
    "compiled": (
        {"num_microbatches": 2, "compile": {"backend": "aot_eager"}},
        "_Columns",
        {},
        1e-9,
    ),
    "deferred": ({"num_microbatches": 2, "batchnorm": "deferred"}, "_Norms", {}, 1e-9),
    "bf16-mixed": ({"num_microbatches": 2}, "_Half", {"precision": "bf16-mixed"}, 2e-3),
    "16-mixed": ({"num_microbatches": 2}, "_Half", {"precision": "16-mixed"}, 1e-3),
    "bf16-true": ({"num_microbatches": 2}, "_Half", {"precision": "bf16-true"}, 3e-2),
}
_SYNCED = ({"num_microbatches": 1}, "_Norms", {"sync_batchnorm": True})


def _fit_more(strategy, model, arguments, batch_size=8):
    if arguments.get("precision") == "16-mixed":  # which is bf16 on a CPU
        plugin = MixedPrecision("16-mixed", "cpu")
        arguments = {**arguments, "precision": None, "plugins": [plugin]}
    return _fit(strategy, model, arguments, batch_size)


def _more(size):
    return {
        name: _fit_more({**strategy, "tensor_parallel_size": size}, model, arguments)
        for name, (strategy, model, arguments, _) in _MORE.items()
    }


def test_other_features_train_on_shared_tensors():
    expected = run_ranks(1, _more, 1)[0]
    for result in run_ranks(4, _more, 2):
        for name, (*_, tolerance) in _MORE.items():
            lit.assert_equal([result[name]], expected[name], tolerance)


def _synced(size, batch_size):
    strategy, model, arguments = _SYNCED
    sizes = {"pipeline_parallel_size": 1, "data_parallel_size": "auto"}
    if size == 1:
        arguments = {}
    given = {**strategy, **sizes, "tensor_parallel_size": size}
    return _fit(given, model, arguments, batch_size)


def test_copies_synchronise_batch_norms_on_shared_tensors():
    expected = run_ranks(1, _synced, 1, 8)[0]
    lit.assert_equal(run_ranks(4, _synced, 2, 4), expected)
