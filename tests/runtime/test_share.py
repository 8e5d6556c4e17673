"""Batches and objects arrive as they were sent; errors arrive everywhere."""

import enum
import threading
from collections import namedtuple
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from tests.helpers import run_ranks

from lightning_pipe.data import SharedLoader
from lightning_pipe.errors import BatchError, CheckpointError, ConfigError, CutError, PeerError
from lightning_pipe.runtime import share
from lightning_pipe.runtime.checkpoint import gather_state
from lightning_pipe.runtime.packing import pack, unpack
from lightning_pipe.runtime.ranks import make_ranks

Pair = namedtuple("Pair", ["left", "right"])


class Color(enum.Enum):
    RED = 1


@dataclass
class Custom:
    x: torch.Tensor
    inner: dict = field(default_factory=dict)


class Forgetful(Exception):
    """Can be pickled, and not be put together again."""

    def __init__(self, first, second):
        super().__init__(first)


class Raising:
    """A loader that gives one batch and fails."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        yield "x"
        raise self.error


class Unpicklable(Exception):
    def __init__(self, lock):
        super().__init__("with a lock")
        self.lock = lock


def batch():
    torch.manual_seed(3)
    x = torch.randn(4, 3)
    big = torch.randn(400, 300)  # travels by itself
    return {
        "pair": Pair(x, x),
        "custom": Custom(big.t(), {"ids": torch.arange(5), "text": "é", "color": Color.RED}),
        "odd": [torch.tensor(2.5), torch.empty(0, 3), torch.tensor([True]), None, 3],
        "more": (torch.tensor([1 + 2j]).conj(), torch.arange(3, dtype=torch.int16)),
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "bfloat": torch.ones(3, dtype=torch.bfloat16),
    }


def check_batch(actual):
    expected = batch()
    assert list(actual) == list(expected)
    assert isinstance(actual["pair"], Pair)
    assert actual["pair"].left is actual["pair"].right, "one object stays one"
    assert torch.equal(actual["pair"].left, expected["pair"].left)
    assert torch.equal(actual["custom"].x, expected["custom"].x)
    assert torch.equal(actual["custom"].inner["ids"], torch.arange(5))
    assert actual["custom"].inner["text"] == "é"
    assert actual["custom"].inner["color"] is Color.RED
    for mine, theirs in zip(actual["odd"][:3], expected["odd"][:3], strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert actual["odd"][3:] == [None, 3]
    assert torch.equal(actual["more"][0], torch.tensor([1 - 2j]))
    assert torch.equal(actual["more"][1], torch.arange(3, dtype=torch.int16))
    assert actual["leaf"].requires_grad
    assert isinstance(actual["parameter"], torch.nn.Parameter)
    assert torch.equal(actual["bfloat"], expected["bfloat"])


def test_packing_gives_back_what_it_got():
    check_batch(unpack(pack(batch())))
    assert len(pack(batch()).specs) == 11


def broadcasts():
    ranks = make_ranks([0, 1], 2)
    check_batch(share.broadcast_read(ranks, batch() if ranks.is_first else None, repr))
    for _ in range(20):  # many small ones in a row stay in step
        assert share.broadcast_read(ranks, 7 if ranks.is_first else None, repr) == 7
    lock = threading.Lock()
    for value in (Unpicklable(lock), {"lock": lock}, Forgetful("a", "b")):
        given = value if ranks.is_first else None
        assert "Error" in share.broadcast_read(ranks, given, lambda error: type(error).__name__)
    for loader, error, match in (
        (["x", {"lock": lock}], BatchError, "of type dict cannot be given to the other stages"),
        (Raising(KeyError("gone")), KeyError, "gone"),
        (Raising(Unpicklable(lock)), PeerError, "with a lock"),
    ):
        read = iter(SharedLoader(loader, ranks, torch.device("cpu")))
        assert next(read) == "x"
        with pytest.raises(error, match=match):
            next(read)
    first = ranks.first_position
    with pytest.raises(BatchError, match=r"the batch cannot be given .*: \['a'\]\[1\], a lock,"):
        share.broadcast_object(ranks, {"a": [1, lock]}, first, what="the batch", error=BatchError)
    hand_out = share.Handing(ranks, "what a step returns")
    for number in range(3):
        given = [number, torch.full((100_000,), number)] if ranks.position == 1 else None
        found = hand_out(given, 1)
        assert (found[0], found[1].sum().item()) == (number, number * 100_000)
    with pytest.raises(CutError, match=r"what a step returns cannot be given .*: \[0\], a lock,"):
        hand_out([lock], 1)
    assert hand_out(7 if ranks.position == 1 else None, 1) == 7
    assert share.broadcast_object(ranks, ranks.position, 1) == 1
    assert share.gather_objects(ranks, f"p{ranks.position}") == ["p0", "p1"]
    gathered = share.gather_objects(ranks, ranks.position * 10, 0)
    assert gathered == ([0, 10] if ranks.position == 0 else None)


def test_broadcasts_and_gathers():
    run_ranks(2, broadcasts)


def test_one_rank_shares_with_nobody():
    ranks = make_ranks([0], 1)
    assert share.broadcast_read(ranks, "x", repr) == "x"
    assert share.broadcast_object(ranks, 3, 0) == 3
    assert share.gather_objects(ranks, 3) == [3]
    grads = {"w": torch.ones(2)}
    assert share.sum_replicated(ranks, grads, {"w": (0,)}) == grads
    assert gather_state(ranks, {"w": 1, "v": 2}, {"w": 0}) == {"w": 1}


OWNERS = {"b": (0, 3), "a": (0, 1, 2, 3), "c": (2, 1), "none": (0, 2), "alone": (1,)}


def grad(name, position):
    generator = torch.Generator().manual_seed(100 * position + ord(name[0]))
    return torch.randn(3, 4, generator=generator)


def sums():
    ranks = make_ranks(range(4), 4)
    own = {name: grad(name, ranks.position) for name, p in OWNERS.items() if ranks.position in p}
    if "none" in own:
        own["none"] = None
    if ranks.position == 0:
        own["b"] = None  # only the other owner has one
    if ranks.position == 1:
        own["c"] = own["c"].t().contiguous().t()  # strided
    return ranks.position, share.sum_replicated(ranks, own, OWNERS)


def test_replicated_gradients_are_summed_in_the_order_of_the_owners():
    results = dict(run_ranks(4, sums))
    expected = {
        "a": ((grad("a", 0) + grad("a", 1)) + grad("a", 2)) + grad("a", 3),
        "b": grad("b", 3),
        "c": grad("c", 2) + grad("c", 1),
    }
    for name, value in expected.items():
        for position in OWNERS[name]:
            assert torch.equal(results[position][name], value), (name, position)
    assert results[0]["none"] is None
    assert results[2]["none"] is None
    assert torch.equal(results[1]["alone"], grad("alone", 1))
    assert set(results[3]) == {"a", "b"}


def sparse():
    ranks = make_ranks([0, 1], 2)
    value = torch.eye(2).to_sparse()
    with pytest.raises(ConfigError, match=r"w: .*sparse_coo and it is used on ranks \[0, 1\]"):
        share.sum_replicated(ranks, {"w": value}, {"w": (0, 1)})


def test_sparse_gradients_are_refused():
    run_ranks(2, sparse)


def gathers():
    ranks = make_ranks(range(2), 2)
    owner_of = {"x": 0, "y": 1, "step": 1}
    local = {"x": torch.full((2,), float(ranks.position)), "y": torch.ones(400, 300), "step": 5}
    if ranks.position == 0:
        del local["step"]
    state = gather_state(ranks, local, owner_of)
    if not ranks.is_first:
        assert state is None
    else:
        assert list(state) == ["x", "y", "step"]
        assert torch.equal(state["x"], torch.zeros(2))
        assert torch.equal(state["y"], torch.ones(400, 300))
        assert state["step"] == 5
    optimizer = {ranks.position: {"exp_avg": torch.ones(3) * ranks.position, "step": 1}}
    state = gather_state(ranks, optimizer, {0: 0, 1: 1})
    if ranks.is_first:
        assert torch.equal(state[1]["exp_avg"], torch.ones(3))
    with pytest.raises(CheckpointError, match=r"rank 1 lacks \['z'\]"):
        gather_state(ranks, {}, {"z": 1})
    dist.barrier()


def test_state_is_gathered_on_the_first_process():
    run_ranks(2, gathers)
