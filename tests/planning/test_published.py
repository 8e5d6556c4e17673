"""Published ratios against simulated ones: what docs/validation.md says, computed."""

from __future__ import annotations

import pytest

from lightning_pipe.planning.costs import StageCosts
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate


def throughput(
    name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1, rows: float = 1.0
) -> float:
    """Rows per second of a model that takes 3 s per row on one device, equally cut."""
    schedule = make_schedule(
        name,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        virtual_stages=virtual_stages,
    )
    each_s = rows / num_microbatches / schedule.num_stages
    costs = [StageCosts(each_s, each_s, each_s)] * schedule.num_stages
    return rows / simulate(schedule, costs).step_s


# AmoebaNet-D (18, 256) with torchgpipe: rows per second by partitions and micro-batches.
MEASURED = {
    (2, 4): 41.133, (2, 32): 47.386, (4, 4): 44.543, (4, 32): 72.412, (8, 4): 70.065,
    (8, 32): 132.413,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fast", "slow", "published", "simulated", "agrees"),
    [
        ((2, 32), (2, 4), 1.152, 1.212, True),
        ((4, 32), (4, 4), 1.626, 1.600, True),
        ((8, 32), (8, 4), 1.890, 2.256, False),
        ((8, 32), (4, 32), 1.829, 1.795, True),
    ],
)
def test_gpipe_on_amoebanet(
    fast: tuple[int, int], slow: tuple[int, int], published: float, simulated: float, agrees: bool
) -> None:
    assert MEASURED[fast] / MEASURED[slow] == pytest.approx(published, abs=1e-3)
    ratio = throughput("gpipe", *fast) / throughput("gpipe", *slow)
    assert ratio == pytest.approx(simulated, abs=1e-3)
    assert (abs(ratio / published - 1) < 0.06) == agrees


def test_zero_bubble_over_1f1b() -> None:
    """Published: up to 23% at the memory of 1F1B, up to 31% with twice that; P <= 32, M >= 3P."""
    h1, zbv = [], []
    for num_ranks in (8, 16, 32):
        for num_microbatches in (3 * num_ranks, 4 * num_ranks, 8 * num_ranks):
            base = throughput("1f1b", num_ranks, num_microbatches)
            h1.append(throughput("zero_bubble", num_ranks, num_microbatches) / base)
            zbv.append(throughput("zbv", num_ranks, num_microbatches, 2) / base)
    assert 1.15 < max(h1) < 1.23 < max(zbv) < 1.27
    no_bubble = (96 + 31) / 96  # what 1F1B would gain at P = 32, M = 96 if it never waited
    assert no_bubble == pytest.approx(1.31, abs=0.02)
    assert min(h1) > 1.05


def test_interleaving_over_1f1b() -> None:
    """Published: 10% and more, less with a growing batch; 175B, P = 12, batches of 12 to 60."""
    gains = [
        throughput("interleaved_1f1b", 12, batch, 2) / throughput("1f1b", 12, batch)
        for batch in (12, 24, 36, 48, 60)
    ]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.25
    assert gains[-1] == pytest.approx(1.084, abs=2e-3)
