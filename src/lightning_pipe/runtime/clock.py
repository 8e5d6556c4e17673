"""How far the clocks of ranks are apart: what ran when, on one clock, takes this into account."""

from __future__ import annotations

import socket
import time

from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.share import gather_objects, receive_object, send_object

_ROUNDS = 8


def clock_offset_s(ranks: Ranks, *, always: bool = False) -> float:
    """Seconds by which this rank's `time.perf_counter` is ahead of the first rank's.

    Processes of one machine read the same clock; others ask the first rank for its time and take
    the answer of the fastest of a few rounds to be from the middle of that round (Cristian, 1989).
    Called by all ranks together.

    Args:
        ranks: This rank.
        always: Ask even on one machine.
    """
    hosts = gather_objects(ranks, socket.gethostname()) or []
    if len(set(hosts)) == 1 and not always:
        return 0.0
    own_s = 0.0
    for position in range(ranks.num_positions):
        if position == ranks.first_position:
            continue
        if ranks.is_first:
            for _ in range(_ROUNDS):
                receive_object(ranks, position)
                send_object(ranks, time.perf_counter(), position)
        elif position == ranks.position:
            own_s = _ask(ranks)
    return own_s


def _ask(ranks: Ranks) -> float:
    best_s, offset_s = float("inf"), 0.0
    for _ in range(_ROUNDS):
        asked_s = time.perf_counter()
        send_object(ranks, None, ranks.first_position)
        their_s = receive_object(ranks, ranks.first_position)
        answered_s = time.perf_counter()
        if answered_s - asked_s < best_s:
            best_s = answered_s - asked_s
            offset_s = (asked_s + answered_s) / 2 - their_s
    return offset_s
