"""Of the three usual causes the true one is named first, with the bytes that it gives back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.test_memory import GIB, layers

from lightning_pipe.planning.memory import make_ledger, most_held
from lightning_pipe.planning.profile import Weight
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.shortage import explain_shortage, remedies


def test_gpipe_keeps_too_many_micro_batches() -> None:
    profile, starts = layers(8, weight_bytes=GIB // 64, saved_bytes=GIB), (0, 2, 4, 6)
    gpipe = make_schedule("gpipe", num_ranks=4, num_microbatches=16)
    first, second, third = remedies(profile, starts, gpipe, rank=1)
    one_f_one_b = make_schedule("1f1b", num_ranks=4, num_microbatches=16)
    saved = (
        make_ledger(profile, starts, gpipe).rank_peak_bytes[1]
        - make_ledger(profile, starts, one_f_one_b).rank_peak_bytes[1]
    )
    # 16 in flight against 3, of two layers, and as many outputs of 8 bytes
    assert saved == 13 * (2 * GIB + 8) == first.saved_bytes
    assert "schedule='1f1b' keeps 3 and saves 26.0 GiB" in first.text
    assert second.saved_bytes == 0
    assert third.saved_bytes > 16 * GIB
    text = explain_shortage(profile, starts, gpipe, 1, stage=1, device_bytes=80 * GIB)
    assert text.startswith("stage 1 of 4, on rank 1: weights 32.0 MiB")
    assert "start with 1: 26.0 GiB less" in text
    assert "of 80.0 GiB" in text


def test_an_embedding_beside_too_many_blocks() -> None:
    profile = layers(8, saved_bytes=GIB // 64)
    table = Weight(16 * GIB // 4, 16 * GIB, 16 * GIB, 32 * GIB)
    profile = replace(profile, weights={**profile.weights, "layers.0.weight": table})
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    in_flight, uneven, _ = remedies(profile, (0, 4), schedule, rank=0)
    assert in_flight.saved_bytes == 0
    assert "layers.0 (64.0 GiB of state) beside 3 others" in uneven.text
    assert "balance=[2, 6]" in uneven.text or "balance=[1, 7]" in uneven.text
    assert uneven.saved_bytes >= 15 * GIB
    assert "start with 2" in explain_shortage(profile, (0, 4), schedule, 0)
    # the other stage is not too full, so no cut gives it anything
    assert remedies(profile, (0, 4), schedule, rank=1)[1].saved_bytes == 0


def test_activations_that_are_too_large() -> None:
    profile = replace(layers(8, weight_bytes=GIB // 64, saved_bytes=GIB), rows=4)
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    # rank 0 has two micro-batches in flight, so three layers there are as much as five
    in_flight, uneven, activations = remedies(profile, (0, 3), schedule, rank=0)
    assert in_flight.saved_bytes == uneven.saved_bytes == 0
    # recomputed: each layer keeps 8 bytes, and one layer's tensors are there at a time
    assert activations.saved_bytes == 2 * 3 * (GIB - 8) - GIB
    assert "num_microbatches=16 for the same batch saves 3.0 GiB" in activations.text
    assert "start with 3: 5.0 GiB less" in explain_shortage(profile, (0, 3), schedule, 0)


def test_state_alone_needs_more_devices() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    text = explain_shortage(layers(8, saved_bytes=8), (0, 4), schedule, 0)
    assert text.count(": no") == 3
    assert "Use more devices" in text


@pytest.mark.parametrize(("name", "chunks"), [("looped_bfs", 2), ("zbv", 2), ("zero_bubble", 1)])
def test_a_lighter_schedule_has_the_same_placement(name: str, chunks: int) -> None:
    schedule = make_schedule(name, num_ranks=2, num_microbatches=8, virtual_stages=chunks)
    starts = tuple(range(0, 8, 8 // schedule.num_stages))
    profile = layers(8, weight_bytes=GIB // 64, saved_bytes=GIB)
    saved = remedies(profile, starts, schedule, rank=0)[0].saved_bytes
    # as GPipe, looped BFS keeps all; the others keep as little as 1F1B
    assert (saved > 8 * GIB) == (name == "looped_bfs")


def test_what_was_counted_is_added_up_along_the_schedule() -> None:
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=4)
    kept = {(stage, m): (1 + m) * 10**stage for stage in range(2) for m in range(4)}
    assert most_held(schedule, kept) == (3 + 4, 40)


def test_what_is_recomputed_already_is_not_advised() -> None:
    profile = replace(layers(8, weight_bytes=GIB // 64, saved_bytes=GIB), rows=4)
    schedule = make_schedule("1f1b", num_ranks=2, num_microbatches=8)
    third = remedies(profile, (0, 3), schedule, rank=0, checkpointing=True)[2]
    assert "recomputing" not in third.text
    half = remedies(profile, (0, 3), schedule, rank=0, checkpointing={0, 1})[2]
    # of three layers of two micro-batches each, one is left; one is there at a time either way
    assert half.saved_bytes == 2 * (GIB - 8)
    text = explain_shortage(profile, (0, 3), schedule, 0, checkpointing=True)
    assert text.startswith("stage 0 of 2")
    assert "activations 24 B x 2 in flight" in text
