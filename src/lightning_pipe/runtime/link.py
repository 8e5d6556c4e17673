"""How long a transfer between two ranks takes, measured by sending tensors there and back."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_pipe.planning.costs import LinkCosts
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.share import broadcast_object
from lightning_pipe.runtime.transfer import Links
from lightning_pipe.split.spec import ValueSpec

_SMALL, _LARGE = 2**8, 2**22  # elements of 4 bytes
_WARM_UP = 3


def measure_link(
    ranks: Ranks, device: torch.device, *, first: int = 0, second: int = 1, repeats: int = 15
) -> LinkCosts:
    """Measures latency and bandwidth between two positions; all ranks call it.

    Args:
        ranks: This rank.
        device: Where its values live.
        first: A position, which holds the clock.
        second: Another one.
        repeats: Round trips of each size, of which the median counts.

    Returns:
        The same on all ranks: what ``lightning-pipe plan --link`` and a cost table take.
    """
    seconds = {
        size: _round_trip_s(ranks, device, (first, second), size, repeats) / 2
        for size in (_SMALL, _LARGE)
    }
    extra_s = max(seconds[_LARGE] - seconds[_SMALL], 1e-12)
    bytes_per_s = 4 * (_LARGE - _SMALL) / extra_s
    latency_s = max(seconds[_SMALL] - 4 * _SMALL / bytes_per_s, 0.0)
    measured: LinkCosts = broadcast_object(ranks, LinkCosts(latency_s, bytes_per_s), first)
    return measured


def _round_trip_s(
    ranks: Ranks, device: torch.device, pair: tuple[int, int], size: int, repeats: int
) -> float:
    if ranks.position not in pair:
        return 0.0
    other = pair[1] if ranks.position == pair[0] else pair[0]
    starts = ranks.position == pair[0]
    links = Links(ranks, device)
    spec = ValueSpec("link", (size,), torch.float32, False)
    value = torch.zeros(size, device=device)
    times = []
    for _ in range(_WARM_UP + repeats):
        start_s = time.perf_counter()
        if starts:
            links.send((value,), other)
        message, received = links.receive((spec,), other)
        links.wait(message, other)
        received[0].sum().item()  # the device has it
        if not starts:
            links.send((value,), other)
        times.append(time.perf_counter() - start_s)
    links.finish()
    return statistics.median(times[_WARM_UP:])
