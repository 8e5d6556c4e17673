"""Splitting batches and merging what micro-batches made."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_pipe.errors import BatchError
from lightning_pipe.split.microbatch import merge_values
from lightning_pipe.split.rows import count_rows, piece_sizes, split_batch
from lightning_pipe.split.signature import signature

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    name: str


@pytest.mark.parametrize(
    ("rows", "pieces", "sizes"),
    [(6, 4, (2, 2, 1, 1)), (8, 4, (2, 2, 2, 2)), (1, 1, (1,)), (5, 2, (3, 2))],
)
def test_the_first_pieces_take_the_remainder(rows, pieces, sizes):
    assert piece_sizes(rows, pieces) == sizes
    assert sizes == tuple(len(part) for part in torch.tensor_split(torch.ones(rows), pieces))


def test_row_wise_values_are_split_and_all_else_goes_whole():
    batch = {
        "x": torch.arange(24).reshape(6, 4),
        "m": {"mask": torch.ones(6, 4, dtype=torch.bool)},
        "bias": torch.ones(1, 4),
        "cw": torch.ones(3),
        "flag": True,
        "none": None,
        "ids": list("abcdef"),
        "array": np.arange(6),
        "pair": Pair(torch.arange(6), "y"),
        "record": Record(torch.arange(6), "name"),
    }
    pieces = split_batch(batch, 3)
    assert pieces.rows == (2, 2, 2)
    second = pieces.batches[1]
    assert torch.equal(second["x"], batch["x"][2:4])
    assert second["m"]["mask"].shape == (2, 4)
    assert second["bias"] is batch["bias"]
    assert second["cw"] is batch["cw"]
    assert (second["flag"], second["none"], second["ids"]) == (True, None, ["c", "d"])
    assert second["array"].tolist() == [2, 3]
    assert second["pair"].x.tolist() == [2, 3]
    assert second["pair"].y == "y"
    assert second["record"].x.tolist() == [2, 3]
    assert second["record"].name == "name"
    assert batch["record"].x.shape == (6,)


def test_fewer_rows_than_microbatches_are_split_into_rows():
    pieces = split_batch([torch.ones(2, 3), torch.ones(2)], 8)
    assert pieces.rows == (1, 1)
    assert pieces.weights == (0.5, 0.5)


def test_weights_are_shares_of_the_rows():
    assert split_batch(torch.ones(6), 4).weights == (2 / 6, 2 / 6, 1 / 6, 1 / 6)


def test_texts_alone_have_rows():
    assert count_rows(["a", "b", "c"]) == 3
    assert split_batch({"text": ["a", "b", "c"]}, 2).batches == (
        {"text": ["a", "b"]},
        {"text": ["c"]},
    )


def test_a_batch_without_rows_says_what_was_found():
    with pytest.raises(BatchError, match=r"dict of 1 \(x: a tensor of shape \(\)\)"):
        split_batch({"x": torch.tensor(1.0)}, 2)
    with pytest.raises(BatchError, match="0 rows"):
        split_batch(torch.ones(0, 4), 2)
    assert split_batch({"x": torch.tensor(1.0)}, 1).rows == (1,)


def test_batches_of_one_structure_share_a_signature():
    def batch(rows, flag=True):
        return {"x": torch.ones(rows, 3), "flag": flag, "text": ["a"] * 2}

    assert signature(batch(2)) == signature(batch(2))
    assert hash(signature(batch(2))) == hash(signature(batch(2)))
    assert signature(batch(2)) != signature(batch(3))


ROWS = (2, 1)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(4.0)], torch.tensor(2.0)),
        ([torch.tensor(3), torch.tensor(1)], torch.tensor(4)),
        ([torch.tensor([[1], [2]]), torch.tensor([[3]])], torch.tensor([[1], [2], [3]])),
        ([torch.arange(6), torch.arange(3)], torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2])),
        (
            [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([4.0, 0.0, 1.0])],
            torch.tensor([2.0, 0.0, 1.0]),
        ),
        (
            [torch.zeros(2, 2, 3), torch.ones(2, 1, 3)],
            torch.tensor([0.0, 0.0, 1.0])[:, None].expand(2, 3, 3),
        ),
    ],
    ids=["mean", "count", "rows", "rows x 3", "vector of means", "states of rows"],
)
def test_tensors_are_merged_as_the_whole_batch_would_have_them(values, expected):
    torch.testing.assert_close(merge_values(values, ROWS), expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 4.0], 2.0),
        ([0.3, 0.3], 0.3),
        ([2, 1], 3),
        ([7, 7], 7),
        ([5, 3], 8),
        ([True, True], True),
        (["a", "a"], "a"),
        ([None, None], None),
        ([[1, 2], [3]], [1, 2, 3]),
        ([{"a": 1.0}, {"a": 4.0}], {"a": 2.0}),
        ([Pair(1.0, "y"), Pair(4.0, "y")], Pair(2.0, "y")),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_plain_values_are_merged_by_kind(values, expected):
    assert merge_values(values, ROWS) == expected


def test_dataclasses_are_merged_item_by_item():
    merged = merge_values([Record(torch.ones(2), "n"), Record(torch.zeros(1), "n")], ROWS)
    assert merged.x.tolist() == [1.0, 1.0, 0.0]
    assert merged.name == "n"
