"""What in a batch is split, what goes whole to every micro-batch, and how a user says otherwise."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from lightning_pipe.errors import BatchError, ConfigError
from lightning_pipe.split.batchnorm import batch_norms, least_rows
from lightning_pipe.split.rows import check_rules, count_rows, split_batch, unused_rules
from lightning_pipe.split.signature import signature
from lightning_pipe.split.tree import flatten, tensors, unflatten


def test_a_user_dict_is_split_and_keeps_its_class():
    class Encoding(UserDict):
        pass

    batch = Encoding({"ids": torch.arange(12).reshape(4, 3), "mask": torch.ones(4, 3)})
    batch.note = "kept"
    second = split_batch(batch, 2).batches[1]
    assert (type(second), second.note) == (Encoding, "kept")
    assert second["ids"].tolist() == [[6, 7, 8], [9, 10, 11]]
    assert batch["ids"].shape == (4, 3)
    assert [t.shape for t in tensors(batch)] == [(4, 3), (4, 3)]
    again = unflatten(*flatten(batch))
    assert (type(again), again.note, again["ids"] is batch["ids"]) == (Encoding, "kept", True)


def test_packed_sequences_are_split_by_sequences():
    padded = torch.arange(24.0).reshape(4, 3, 2)
    packed = pack_padded_sequence(padded, torch.tensor([2, 3, 1, 3]), True, False)
    pieces = split_batch({"x": packed, "y": torch.arange(4)}, 2)
    assert pieces.rows == (2, 2)
    second = pieces.batches[1]["x"]
    assert isinstance(second, PackedSequence)
    values, lengths = pad_packed_sequence(second, batch_first=True)
    assert lengths.tolist() == [1, 3]
    assert values[1].tolist() == padded[3].tolist()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_tensors_are_split_by_rows(layout):
    dense = torch.eye(4)[:, :3]
    pieces = split_batch((dense.to_sparse(layout=layout), torch.arange(4)), 2)
    assert pieces.batches[1][0].layout is layout
    assert pieces.batches[1][0].to_dense().tolist() == dense[2:].tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_tensors_are_split_by_rows():
    nested = torch.nested.nested_tensor(
        [torch.ones(n, 2) * n for n in (1, 2, 3)], layout=torch.jagged
    )
    pieces = split_batch((nested, torch.arange(3)), 3)
    assert pieces.batches[2][0].unbind()[0].tolist() == [[3.0, 3.0]] * 3


def _pictures(sizes, boxes):
    images = [torch.zeros(3, 8, size) for size in sizes]
    targets = [{"boxes": torch.ones(n, 4), "labels": torch.ones(n)} for n in boxes]
    return images, targets


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("boxes", [(1, 2, 0, 4), (3, 3, 3, 3)], ids=["ragged", "all the same"])
def test_lists_of_pictures_and_their_targets_are_split_by_items(kind, boxes):
    images, targets = _pictures((8, 9, 8, 8), boxes)
    pieces = split_batch((kind(images), kind(targets)), 2)
    assert pieces.rows == (2, 2)
    assert pieces.batches[1][0][0] is images[2]
    assert pieces.batches[1][1][1] is targets[3]


def test_a_list_of_samples_is_split_by_samples():
    samples = [{"x": torch.ones(3, n), "y": torch.tensor(n)} for n in range(4)]
    second = split_batch(samples, 2).batches[1]
    assert [id(sample) for sample in second] == [id(sample) for sample in samples[2:]]


def test_a_list_of_batches_is_split_inside_of_each():
    two = [
        {"x": torch.ones(4, 2), "y": torch.ones(4)},
        {"x": torch.zeros(4, 2), "y": torch.ones(4)},
    ]
    second = split_batch(two, 2).batches[1]
    assert [item["x"].shape for item in second] == [(2, 2), (2, 2)]
    x, y = split_batch([torch.ones(2, 3), torch.ones(2)], 2).batches[1]
    assert (x.shape, y.shape) == ((1, 3), (1,))


def test_plain_lists_have_one_item_per_row_and_tuples_of_numbers_are_sizes():
    batch = {"x": torch.ones(2, 3), "lengths": [5, 7], "size": (224, 224), "names": ("a", "b")}
    second = split_batch(batch, 2).batches[1]
    assert (second["lengths"], second["size"], second["names"]) == ([7], (224, 224), ("b",))


def test_a_tensor_of_the_model_does_not_outvote_the_data():
    assert count_rows({"class_weights": torch.ones(3), "x": torch.ones(6, 4)}) == 6
    assert count_rows({"bias": torch.ones(1, 4), "x": torch.ones(6)}) == 6
    assert count_rows({"a": torch.tensor(1.0), "x": torch.ones(1, 4)}) == 1


def test_a_rule_replicates_what_only_looks_like_rows():
    batch = {"x": torch.ones(3, 4), "loss": {"cw": torch.ones(3)}, "names": ["a", "b", "c"]}
    assert split_batch(batch, 3).batches[0]["loss"]["cw"].shape == (1,)
    for rules in ({"cw": "replicate"}, {"loss.cw": None}, {"loss": "replicate"}):
        assert split_batch(batch, 3, rules).batches[0]["loss"]["cw"] is batch["loss"]["cw"]
    assert split_batch(batch, 3, {"names": "replicate"}).batches[0]["names"] == ["a", "b", "c"]


def test_a_rule_names_the_dimension_of_the_rows():
    batch = (torch.arange(12).reshape(2, 6), torch.arange(6))
    pieces = split_batch(batch, 3, {"0": 1})
    assert pieces.batches[1][0].tolist() == [[2, 3], [8, 9]]
    assert split_batch(torch.ones(2, 6), 3, {"": 1}).batches[0].shape == (2, 2)
    images = _pictures((8,) * 3, (3,) * 3)[0]
    assert split_batch({"i": images}, 3, {"i": "list"}).batches[1]["i"] == [images[1]]
    with pytest.raises(BatchError, match=r"'1': 1.*6 rows.*shape \(6,\)"):
        split_batch(batch, 3, {"0": 1, "1": 1})


def test_rules_that_mean_nothing_are_refused_or_found():
    for rule in (-1, True, "rows"):
        with pytest.raises(ConfigError, match=r"mask.*give 'replicate', 'list'"):
            check_rules({"mask": rule})
    check_rules({"mask": 0, "a.b": None, "c": "list"})
    assert unused_rules({"x": {"mask": 1}}, {"mask": 1, "x.mask": 0, "m": None}) == ["m"]


def test_the_structure_and_the_sizes_of_a_batch_are_told_apart():
    def batch(rows, length, step=0, flag=True):
        x = torch.ones(rows, length)
        return {"x": x, "y": [x, x[:, 0]], "step": step, "flag": flag, "t": ["a"] * rows}

    first, other = signature(batch(2, 5, 7)), signature(batch(2, 9, 8))
    assert first.skeleton == other.skeleton
    assert (first.sizes, other.sizes) == ((2, 5, 2, 5, 2, 7, 2), (2, 9, 2, 9, 2, 8, 2))
    assert signature(batch(2, 5)).skeleton != signature(batch(2, 5, flag=False)).skeleton


def test_where_a_batch_norm_trains_a_micro_batch_has_two_rows():
    norms = batch_norms(torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.LayerNorm(3)))
    assert [name for name, _ in norms] == ["0"]
    assert least_rows(norms) == 2
    norms[0][1].eval()
    assert least_rows(norms) == 1
