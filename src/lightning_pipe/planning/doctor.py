"""What limits the speed of a pipeline, in the order in which a practitioner looks.

First the schedule: with few micro-batches the ranks wait for the pipeline to fill. Then the cut:
everybody waits for the slowest stage. Then the links, then the host. One verdict, with its numbers,
and something to type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_pipe.planning.attribution import MeasuredBubble
from lightning_pipe.planning.ir import Schedule

__all__ = ["Cause", "Verdict", "diagnose"]

Cause = Literal["bubble", "imbalance", "communication", "host", "healthy"]

_IDLE = 0.05  # of the time of all ranks; less is not worth a change


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the speed.

    Attributes:
        cause: `"bubble"` (fill and drain), `"imbalance"`, `"communication"`, `"host"` or
            `"healthy"`.
        text: What was found, with numbers.
        advice: What to type; empty if healthy.
        stage: The slowest stage, where that is the cause.
        ratio: How much slower it is than the mean of the others.
    """

    cause: Cause
    text: str
    advice: str = ""
    stage: int | None = None
    ratio: float | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".strip()


def diagnose(found: MeasuredBubble, schedule: Schedule) -> Verdict:
    """Names the first thing that is worth a change.

    Args:
        found: The parts of a measured bubble.
        schedule: What was run.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> schedule = make_schedule("gpipe", num_ranks=4, num_microbatches=1)
    >>> diagnose(MeasuredBubble(0.75, 0.0, 0.0, 0.0, (0.75,) * 4, (0.25,) * 4), schedule).cause
    'bubble'
    """
    whole = found.bubble_fraction
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    few = num_microbatches < 4 * num_ranks
    if few and found.fill_drain_fraction > max(_IDLE, found.imbalance_fraction / 2):
        return _raise_microbatches(found, schedule)
    if found.imbalance_fraction > _IDLE:
        return _rebalance(found)
    waiting = max(found.communication_fraction, found.host_fraction)
    if waiting > _IDLE and found.communication_fraction >= found.host_fraction:
        return Verdict(
            "communication",
            f"The ranks are idle for {whole:.1%} of the time, {found.communication_fraction:.1%} "
            "of it waiting for values that the stage before had computed already: the links are "
            "slow, or each transfer is small.",
            "Use larger micro-batches (fewer of them, or a larger batch), fewer virtual stages, "
            'split_points where less crosses (see "sends" in the plan), or ranks of one machine.',
        )
    if waiting > _IDLE:
        return Verdict(
            "host",
            f"The ranks are idle for {whole:.1%} of the time, {found.host_fraction:.1%} of it "
            "neither computing nor waiting: Python between the actions takes longer than the work "
            "hides.",
            "Use larger micro-batches, fewer virtual stages, or less work in the step outside of "
            "layers.",
        )
    return Verdict(
        "healthy",
        f"Healthy: the ranks are idle for {whole:.1%} of the time, and {schedule.name} with "
        f"{num_microbatches} micro-batches has {found.fill_drain_fraction:.1%} of that itself.",
    )


def _raise_microbatches(found: MeasuredBubble, schedule: Schedule) -> Verdict:
    num_ranks, num_microbatches = schedule.num_ranks, schedule.num_microbatches
    better = 4 * num_ranks
    # the pipeline fills once, however many micro-batches follow
    fill = found.fill_drain_fraction / (1 - found.bubble_fraction)
    saved = 1 - (1 + fill * num_microbatches / better) / (1 + fill)
    return Verdict(
        "bubble",
        f"The ranks are idle for {found.bubble_fraction:.1%} of the time, "
        f"{found.fill_drain_fraction:.1%} of it while the pipeline fills and drains: "
        f"{num_microbatches} micro-batches are few for {num_ranks} ranks.",
        f"Give num_microbatches={better} with as many rows in a micro-batch: about {saved:.0%} "
        "less time for a sample. If the batch cannot grow, virtual_stages=2 fills in half the "
        "time.",
    )


def _rebalance(found: MeasuredBubble) -> Verdict:
    times = found.stage_utilisations
    slowest = max(range(len(times)), key=times.__getitem__)
    others = [time for stage, time in enumerate(times) if stage != slowest]
    mean = sum(others) / len(others) if others else times[slowest]
    ratio = times[slowest] / mean if mean else float("inf")
    return Verdict(
        "imbalance",
        f"The ranks are idle for {found.bubble_fraction:.1%} of the time, "
        f"{found.imbalance_fraction:.1%} of it waiting for stage {slowest}, which takes "
        f"{ratio:.2f} times as long as the others on average.",
        f"Cut so that stage {slowest} has less: balance='flops' or a list of units per stage, or "
        "split_points that end it earlier.",
        slowest,
        ratio,
    )
