"""Copies of the pipeline that hold a part of the weights each: the numbers of one device."""

import warnings

import pytest
import torch
import torch.distributed as dist
from tests import lit
from tests import test_data_parallel as data_parallel
from tests.lit import run_ranks
from tests.test_data_parallel import _copies, _loader, _references, _Synced, _SyncedTied
from tests.test_strategy_between import _ClippingSGD
from tests.test_strategy_life import _Overflowing, _Scaled
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PipelineStrategy
from lightning_pipe.cli import consolidate
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.parted import part_of

_CASES = {
    **data_parallel._CASES,
    "zero bubble": (
        {"schedule": "zero_bubble", "num_microbatches": 4},
        "adamw",
        {"gradient_clip_val": 0.05},
    ),
    "recomputed": ({"num_microbatches": 2, "activation_checkpointing": "all"}, "adamw", {}),
    "compiled": ({"num_microbatches": 2, "compile": {"backend": "aot_eager"}}, "sgd", {}),
}


def _sharded(num_ranks, cases):
    return _copies(num_ranks, cases, data_parallel_sharding=True)


def test_sharded_copies_of_two_ranks_train_as_one_device():
    expected = run_ranks(1, _references, 2, _CASES)[0]
    for result in run_ranks(4, _sharded, 2, _CASES):
        for name, found in result.items():
            tolerance = 1e-5 if name == "fp32" else 1e-9
            lit.assert_equal([found], expected[name], tolerance)


def test_sharded_copies_of_one_rank_train_as_one_device():
    cases = {name: _CASES[name] for name in ("sgd", "tied, small buckets")}
    expected = run_ranks(1, _references, 2, cases)[0]
    for result in run_ranks(2, _sharded, 1, cases):
        for name in cases:
            lit.assert_equal([result[name]], expected[name])


_SHARDED = {"data_parallel_size": 2, "num_microbatches": 2, "data_parallel_sharding": True}


def _go_on(strategy, folder, max_steps, path=None):
    module = lit.seeded(_SyncedTied, depth=3)
    copies = (strategy or {}).get("data_parallel_size")
    ranks = None if copies is None else lit.world() // copies
    loader = _loader(lit.tokens(24), 8 // (copies or 1), ranks)
    return lit.fit_and_keep(strategy, module, loader, folder, max_steps, path)


def test_a_plain_checkpoint_goes_from_parts_to_any_layout_and_back(tmp_path):
    expected = run_ranks(1, _go_on, None, str(tmp_path / "whole"), 6)[0]
    run_ranks(4, _go_on, _SHARDED, str(tmp_path / "parts"), 3)
    path = str(tmp_path / "parts" / "step=3.ckpt")
    one, found = (torch.load(tmp_path / n / "step=3.ckpt") for n in ("whole", "parts"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], one[key], rtol=1e-9, atol=1e-9)
    for ranks, strategy in ((1, None), (4, {})):
        results = run_ranks(ranks, _go_on, strategy, str(tmp_path / f"b{ranks}"), 6, path)
        lit.assert_equal(results, expected)
    path = str(tmp_path / "whole" / "step=3.ckpt")
    lit.assert_equal(run_ranks(4, _go_on, _SHARDED, str(tmp_path / "c"), 6, path), expected)


@pytest.mark.parametrize(
    ("ranks", "first", "mode", "others", "second"),
    [
        (4, _SHARDED, True, 4, {}),
        (2, _SHARDED, "async", 4, _SHARDED),
        (2, {}, True, 2, _SHARDED),
    ],
)
def test_a_sharded_checkpoint_goes_from_parts_to_any_layout_and_back(
    tmp_path, ranks, first, mode, others, second
):
    expected = run_ranks(1, _go_on, None, str(tmp_path / "whole"), 6)[0]
    first = {**first, "save_distributed_checkpoint": mode}
    run_ranks(ranks, _go_on, first, str(tmp_path), 3)
    folder = tmp_path / "step=3.ckpt"
    assert [p.name for p in tmp_path.iterdir() if "step" in p.name] == [folder.name]
    parts = {p.name.split("_")[2] for p in folder.glob("*.distcp")}
    assert len(parts) == ranks, "every rank writes its part"
    results = run_ranks(others, _go_on, second, str(tmp_path / "b"), 6, str(folder))
    lit.assert_equal(results, expected)
    consolidate([str(folder), str(tmp_path / "one.ckpt")])
    one, found = (torch.load(tmp_path / n) for n in ("whole/step=3.ckpt", "one.ckpt"))
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(found[key], one[key], rtol=1e-9, atol=1e-9)


class _Optimizers(_Synced):
    """A weight that cannot be sharded beside those that are; one that is unused."""

    def __init__(self, kind):
        self.kind = kind
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x) * self.scale, y)

    def configure_optimizers(self):
        if self.kind == "rprop":
            return torch.optim.Rprop(self.parameters(), lr=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-2, **{self.kind: True})

    def on_train_batch_end(self, *args):
        parameters = list(self.parameters())
        held = [p for p in parameters if not is_fake(p)]
        state = [s for s in self.trainer.optimizers[0].state.values() if s]
        found = [t for entry in state for t in entry.values() if t.ndim]
        self.shares = [
            sum(part_of(t).nbytes for t in part) / (n * sum(p.nbytes for p in parameters))
            for part, n in ((held, 1), (found, 2))
        ]


def _optimized(kinds, strategy, batch_size):
    results = {}
    for kind in kinds:
        module = lit.seeded(_Optimizers, kind)
        used = lit.trainer(strategy, lit.world(), gradient_clip_val=0.05)
        loader = _loader(lit.rows(48), batch_size, None if strategy is None else 2)
        # other numbers of batches in each copy, and a checkpoint within the evaluation
        count = 48 if strategy is None else 16 + 16 * (dist.get_rank() // 2)
        try:
            used.fit(module, loader, DataLoader(lit.rows(count), batch_size=4))
        except ConfigError as error:
            results[kind] = str(error)
            continue
        results[kind] = lit.outcome(module, used), module.shares
        results[kind][0]["metrics"] = {}
    return results


def test_optimizers_step_on_parts_and_a_rank_holds_a_quarter():
    kinds = ["fused", "foreach"]
    expected = run_ranks(1, _optimized, kinds, None, 8)[0]
    for results in run_ranks(4, _optimized, [*kinds, "rprop"], _SHARDED, 4):
        for kind in kinds:
            outcome, shares = results[kind]
            lit.assert_equal([outcome], {**expected[kind][0], "metrics": {}})
            assert all(0.2 < share < 0.31 for share in shares), shares
        assert "Rprop cannot step where each copy" in results["rprop"]


class _OverflowsInACopy(_Overflowing):
    """Only copy 1 looks at weights, and writes to its part of a gradient: its last row."""

    def on_after_backward(self):
        if self.global_rank >= 2 and self.trainer.global_step == 1 and not self.before:
            self.before = {name: value.clone() for name, value in self.state_dict().items()}
            self.net.blocks[0].out.weight.grad[-1, 0] = float("inf")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())


def _overflow(strategy):
    module = lit.seeded(_OverflowsInACopy)
    arguments = {"precision": None, "plugins": [_Scaled()], "gradient_clip_val": 0.3}
    used = lit.trainer({"data_parallel_size": 2, "num_microbatches": 2, **strategy}, 4, **arguments)
    used.fit(module, DataLoader(lit.tokens(), batch_size=4))
    return module.scales, lit.outcome(module, used)["weights"]


def test_an_overflow_in_one_part_is_everyones():
    expected = run_ranks(4, _overflow, {})[0]
    for scales, weights in run_ranks(4, _overflow, _SHARDED):
        assert scales == expected[0] == [2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**15]
        torch.testing.assert_close(weights, expected[1], rtol=1e-6, atol=1e-8)


class _Writes(_Synced):
    """Writes to its weights within an evaluation."""

    def on_validation_epoch_end(self):
        with torch.no_grad():
            self.net[1][0].weight.mul_(0.9)
        self.net[3][0].weight.requires_grad_(self.current_epoch > 0)


class _Clips(_Synced):
    def configure_optimizers(self):
        return _ClippingSGD(self.parameters(), lr=0.5)


def _clipped(strategy, batch_size):
    module = lit.seeded(_Clips)
    used = lit.trainer(strategy, lit.world())
    used.fit(module, _loader(lit.rows(24), batch_size, None if strategy is None else 1))
    return lit.outcome(module, used)


def test_an_optimizer_that_clips_within_its_step_takes_the_norm_of_all_parts():
    expected = run_ranks(1, _clipped, None, 8)[0]
    lit.assert_equal(run_ranks(2, _clipped, _SHARDED, 4), expected)


def test_what_is_no_choice_is_refused():
    with pytest.raises(ConfigError, match="data_parallel_sharding='yes': give True or False"):
        PipelineStrategy(pipeline_parallel_size=2, data_parallel_sharding="yes")


def _told(strategy):
    used = lit.trainer(strategy, lit.world())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        used.fit(lit.seeded(lit.Lit), _loader(lit.rows(8), 4, strategy["data_parallel_size"]))
    return [str(warning.message) for warning in caught if "data_parallel_sharding" in str(warning)]


def test_weights_that_nobody_shares_are_told():
    told = run_ranks(2, _told, {**_SHARDED, "data_parallel_size": 1})
    assert sorted(map(len, told)) == [0, 1]
    assert all("there is one copy of the pipeline" in text for texts in told for text in texts)
    assert run_ranks(2, _told, _SHARDED) == [[], []]


def _written(strategy, batch_size):
    module = lit.seeded(_Writes)
    used = lit.trainer(strategy, lit.world(), max_epochs=3, accumulate_grad_batches=2)
    loader = _loader(lit.rows(48), batch_size, None if strategy is None else 1)
    used.fit(module, loader, loader)
    return lit.outcome(module, used)


def test_what_an_evaluation_writes_to_weights_stays():
    expected = run_ranks(1, _written, None, 8)[0]
    lit.assert_equal(run_ranks(2, _written, _SHARDED, 4), expected)
