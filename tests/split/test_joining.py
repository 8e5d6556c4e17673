"""Batches of a loader, joined: what splitting takes apart comes together again."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_pipe import BatchError, ConfigError
from lightning_pipe.grouping import Grouped
from lightning_pipe.layout import Layout
from lightning_pipe.split.joining import join_batches
from lightning_pipe.split.rows import split_batch


def _batch(rows=6, start=0):
    x = torch.arange(start, start + rows * 4.0).view(rows, 4)
    return UserDict(
        {
            "x": x,
            "m": {"mask": x > 3, "array": x.numpy()},
            "time": x.t().contiguous(),
            "ids": [f"row {i}" for i in range(rows)],
            "size": (224, 224),
            "flag": True,
            "none": None,
            "classes": torch.ones(3),
            "packed": pack_sequence(list(x)),
        }
    )


_RULES = {"time": 1, "classes": "replicate"}


@pytest.mark.parametrize("num_pieces", [1, 2, 4, 6])
def test_joining_is_the_opposite_of_splitting(num_pieces):
    batch = _batch()
    joined = join_batches(split_batch(batch, num_pieces, _RULES).batches, _RULES)
    assert type(joined) is UserDict
    for key in ("x", "time", "classes"):
        assert torch.equal(joined[key], batch[key])
    assert torch.equal(joined["packed"].data, batch["packed"].data)
    assert torch.equal(joined["m"]["mask"], batch["m"]["mask"])
    assert np.array_equal(joined["m"]["array"], batch["m"]["array"])
    for key in ("ids", "size", "flag", "none"):
        assert joined[key] == batch[key]


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ([torch.ones(2, 5), "a"], r"'0' is a tensor of shape \(2, 4\) and .*\(2, 5\)"),
        ([torch.ones(2, 4), "b"], "'1' is str"),
        ([torch.ones(2, 4), {"c": 1}], "'1' is str and dict"),
        ({"x": torch.ones(2, 4)}, "the batch is list"),
    ],
)
def test_what_cannot_be_joined_is_named(other, match):
    with pytest.raises(BatchError, match=match):
        join_batches([[torch.ones(2, 4), "a"], other], {})


def _steps(count, batch_size, drop_last=False, **layout):
    loader = DataLoader(torch.arange(count), batch_size=batch_size, drop_last=drop_last)
    grouped = Layout(2, num_microbatches=4, **layout).grouped(loader)
    steps = [batch.tolist() for batch in grouped]
    assert len(grouped) == len(steps)
    return steps


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [16, 20, 21])
def test_steps_are_those_of_a_loader_of_whole_steps(batch_size, drop_last, count):
    expected = [
        b.tolist() for b in DataLoader(torch.arange(count), batch_size=8, drop_last=drop_last)
    ]
    assert _steps(count, batch_size, drop_last, microbatch_size=2) == expected


def test_a_loader_without_a_batch_size_gives_micro_batches():
    batches = [torch.ones(2, 3)] * 5
    grouped = Grouped(batches, 4, 2, {})
    assert [len(step) for step in grouped] == [8, 2]
    assert len(grouped) == 2
    assert sized_len(Grouped(iter(batches), 4, 2, {})) is None
    with pytest.raises(BatchError, match=r"a batch of 8 rows, and 2 were expected"):
        list(Grouped([torch.ones(8, 3)], 4, 2, {}))


@pytest.mark.parametrize("batch_size", [3, 16])
def test_a_loader_whose_batches_make_no_step_is_refused(batch_size):
    with pytest.raises(ConfigError, match=f"batches of {batch_size} rows, and steps of 8"):
        _steps(32, batch_size, microbatch_size=2)


def test_a_size_without_a_number_is_refused():
    with pytest.raises(ConfigError, match="microbatch_size=2 without num_microbatches"):
        Layout(2, microbatch_size=2)
    with pytest.raises(ConfigError, match="microbatch_size=0: give a whole number"):
        Layout(2, num_microbatches=2, microbatch_size=0)


def test_other_batches_are_split_into_pieces_of_that_size():
    layout = Layout(2, num_microbatches=4, microbatch_size=2)
    assert [layout.microbatches_for(rows) for rows in (8, 5, 1, 32)] == [4, 3, 1, 16]
    assert layout.rows_per_step == 8
