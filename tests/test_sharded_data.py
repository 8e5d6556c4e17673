"""Copies of the pipeline that hold a part of the weights each: the numbers of one device."""

import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from tests.test_data_parallel import _CASES, ROWS, _fit, _references, _SyncedAdam, _SyncedTied
from torch.utils.data import DataLoader

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
