"""Gradients and values over the copies of a pipeline."""

import pytest
import torch
import torch.distributed as dist
from tests.helpers import run_ranks

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime import meeting, reduce, share
from lightning_pipe.runtime.ranks import make_ranks

SHAPES = {
    "a": (3, 4),
    "b": (5,),
    "c": (2, 2),
    "none": (2,),
    "one": (4,),
    "rows": (6, 2),
    "mix": (3,),
}


def gradients(copy):
    generator = torch.Generator().manual_seed(copy)
    found = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}
    found["c"] = found["c"].t()  # strided
    found["b"] = found["b"].float()
    found["rows"] = found["rows"] * (torch.arange(6) % 3 == copy)[:, None]
    return found


def given(copy):
    found = {name: value.clone() for name, value in gradients(copy).items()}
    found["c"] = gradients(copy)["c"]
    found["none"] = None
    found["rows"] = found["rows"].to_sparse(1)
    if copy == 0:
        found["one"] = None
        found["mix"] = found["mix"].to_sparse()
    return found


def means(bucket_bytes, dtype):
    copies = make_ranks([0], 1, data_parallel_size=2).copies
    sent = []
    own = dist.all_reduce

    def counted(tensor, *args, **kwargs):
        sent.append((tensor.dtype, tensor.numel()))
        return own(tensor, *args, **kwargs)

    reduce.dist.all_reduce = counted
    try:
        parameters = gradients(0)
        found = reduce.mean_gradients(
            copies, given(copies.position), parameters, bucket_bytes=bucket_bytes, dtype=dtype
        )
    finally:
        reduce.dist.all_reduce = own
    return found, sent


def check(found, tolerance=0.0):
    a, b = gradients(0), gradients(1)
    a["one"] = torch.zeros(4, dtype=torch.float64)
    assert set(found) == set(SHAPES) - {"none"}
    for name, mean in found.items():
        assert mean.is_sparse == (name == "rows"), name
        expected = (a[name] + b[name]) / 2
        torch.testing.assert_close(
            mean.to_dense(), expected, rtol=tolerance, atol=tolerance, msg=name
        )


def several_means():
    found, sent = means(2**20, None)
    check(found)
    assert len(sent) == 2  # one for each type
    assert sorted(sent, key=str) == [(torch.float32, 5), (torch.float64, 12 + 4 + 4 + 3)]
    found, sent = means(100, None)  # the first is of 96 bytes
    check(found)
    assert sorted(sent, key=str) == [
        (torch.float32, 5),
        (torch.float64, 11),
        (torch.float64, 12),
    ]
    found, sent = means(2**20, torch.bfloat16)
    check(found, 2e-2)
    assert {dtype for dtype, _ in sent} == {torch.bfloat16}


def test_gradients_are_averaged_in_buckets():
    run_ranks(2, several_means)


def values():
    ranks = make_ranks([0, 1], 2, data_parallel_size=2)
    copies = ranks.copies
    copy = copies.position
    value = torch.tensor([1.0 + copy, 3.0])
    assert reduce.reduce_value(copies, value, "mean").tolist() == [1.5, 3.0]
    assert reduce.reduce_value(copies, value, "sum").tolist() == [3.0, 6.0]
    assert reduce.reduce_value(copies, value, "max").tolist() == [2.0, 3.0]
    assert reduce.reduce_value(copies, torch.tensor(copy), "mean").item() == 0.5
    assert value.tolist() == [1.0 + copy, 3.0]
    with pytest.raises(ConfigError, match="reduce_op='median'"):
        reduce.reduce_value(copies, value, "median")
    assert [v.tolist() for v in reduce.gather_values(copies, torch.full((1 + copy,), copy))] == [
        [0],
        [1, 1],
    ]
    # everybody, in both directions
    for source in range(4):
        assert share.broadcast_everywhere(ranks, ranks.global_rank, source) == source
    assert share.gather_everywhere(ranks, ranks.global_rank) == [1, 0, 3, 2]
    alone = int(ranks.global_rank == 2)
    flags = meeting.meet_everywhere(ranks, "meets", alone)
    assert (any(flags), all(flags)) == (True, False)
    assert all(meeting.meet_everywhere(ranks, "meets", 1))
    assert not any(meeting.meet_everywhere(ranks, "meets", 0))
    with pytest.raises(meeting.MeetingError, match=r"copies .* copy 1 \(global rank .* elsewhere"):
        meeting.meet_everywhere(ranks, "elsewhere" if copy else "somewhere")
    return str(copies)


def test_values_go_over_the_copies_and_decisions_over_all():
    assert run_ranks(4, values) == [
        "copy 0 (global rank 0)",
        "copy 0 (global rank 1)",
        "copy 1 (global rank 2)",
        "copy 1 (global rank 3)",
    ]
