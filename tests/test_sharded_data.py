"""Copies of the pipeline that hold a part of the weights each: the numbers of one device."""

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from tests.test_data_parallel import _CASES, _fit, _loader, _references, _SyncedTied

from lightning_pipe.cli import consolidate

_MORE = {
    "zero bubble": (
        {"schedule": "zero_bubble", "num_microbatches": 4},
        "adamw",
        {"gradient_clip_val": 0.05},
    ),
    "recomputed": ({"num_microbatches": 2, "activation_checkpointing": "all"}, "adamw", {}),
}
_ALL = {**_CASES, **_MORE}


def _sharded(num_ranks, names):
    results = {}
    for name in names:
        strategy, model, arguments = _ALL[name]
        if num_ranks == 1:
            strategy = {
                k: v for k, v in strategy.items() if k not in ("schedule", "virtual_stages")
            }
        given = {
            **strategy,
            "pipeline_parallel_size": num_ranks,
            "data_parallel_size": "auto",
            "data_parallel_sharding": True,
        }
        results[name] = _fit(given, model, 4, **arguments)
    return results


def _more_references(copies):
    return {name: _fit(None, model, 4 * copies, **kw) for name, (_, model, kw) in _MORE.items()}


def test_sharded_copies_of_two_ranks_train_as_one_device():
    expected = run_ranks(1, _references, 2, list(_CASES))[0]
    expected |= run_ranks(1, _more_references, 2)[0]
    for result in run_ranks(4, _sharded, 2, list(_ALL)):
        for name, found in result.items():
            tolerance = 1e-5 if name == "fp32" else 1e-9
            lit.assert_equal([found], expected[name], tolerance)


def test_sharded_copies_of_one_rank_train_as_one_device():
    names = ["sgd", "tied, small buckets"]
    expected = run_ranks(1, _references, 2, names)[0]
    for result in run_ranks(2, _sharded, 1, names):
        for name in names:
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
