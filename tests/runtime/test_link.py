"""A link is measured as it is: equal on all ranks, and slower for more bytes."""

from __future__ import annotations

import torch
from tests.helpers import run_ranks

from lightning_pipe.planning.costs import LinkCosts
from lightning_pipe.runtime.link import measure_link
from lightning_pipe.runtime.ranks import make_ranks


def body() -> LinkCosts:
    ranks = make_ranks((0, 1), 2)
    return measure_link(ranks, torch.device("cpu"), repeats=5)


def test_latency_and_bandwidth() -> None:
    first, second = run_ranks(2, body)
    assert first == second
    assert 0 <= first.latency_s < 1
    assert 1e6 < first.bytes_per_s < 1e12
    assert first.transfer_s(2**30) > first.transfer_s(2**10)
