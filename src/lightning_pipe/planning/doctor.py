"""What limits the speed of a pipeline, in the order in which a practitioner looks.

First the schedule: with few micro-batches the ranks wait for the pipeline to fill. Then the cut:
everybody waits for the slowest stage. Then the links, then the host. One verdict, with its numbers,
and something to type; beside it, what else is wrong with the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from lightning_pipe.planning.attribution import LinkWait, MeasuredBubble
from lightning_pipe.planning.balance import partition
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import Plan, format_bytes, format_seconds
from lightning_pipe.planning.profile import ranges

__all__ = ["AROUND", "Cause", "Loss", "Run", "Verdict", "diagnose", "examine", "loss_jump"]

Cause = Literal[
    "bubble",
    "imbalance",
    "communication",
    "host",
    "healthy",
    "small batch",
    "recomputation",
    "loss jump",
]
Loss = tuple[int, int, float]
"""Of one step: number of micro-batches, samples of an optimizer step (0 if unknown), loss."""

AROUND = 8
"""Steps before and after a change of the sizes of a step whose losses are compared."""

_IDLE = 0.05  # of the time of all ranks; less is not worth a change
_ROOMY = 0.5  # of a device: whoever holds less at the peak has no need to recompute
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run beside its bubble.

    Attributes:
        schedule_name: Name of the schedule.
        stage_to_rank: The rank of each stage.
        num_microbatches: M, as it was run.
        asked_microbatches: M, as it was asked for; None if it was left open.
        unit_counts: Units of each stage, if known.
        boundary_bytes: What each stage sends to the next for a micro-batch, if known.
        recomputes: Whether units run again for their backward.
        memory_fraction: Peak of the fullest rank over the memory of its device, if known.
    """

    schedule_name: str
    stage_to_rank: tuple[int, ...]
    num_microbatches: int
    asked_microbatches: int | None = None
    unit_counts: tuple[int, ...] = ()
    boundary_bytes: tuple[int, ...] = ()
    recomputes: bool = False
    memory_fraction: float | None = None

    @property
    def num_ranks(self) -> int:
        """P."""
        return max(self.stage_to_rank) + 1

    @classmethod
    def of(cls, schedule: Schedule, plan: Plan | None = None, **facts: Any) -> Run:
        """What a schedule and a plan tell; `facts` are the other attributes."""
        stages = () if plan is None else plan.stages
        return cls(
            schedule.name,
            schedule.stage_to_rank,
            schedule.num_microbatches,
            unit_counts=tuple(stage.num_units for stage in stages),
            boundary_bytes=tuple(stage.boundary_bytes for stage in stages),
            **facts,
        )

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; `from_dict` reads it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Run:
        """Reads what `to_dict` made, also after JSON."""
        known: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**known)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What limits the speed, or is wrong otherwise.

    Attributes:
        cause: `"bubble"` (fill and drain), `"imbalance"`, `"communication"`, `"host"` or
            `"healthy"`; beside these `"small batch"`, `"recomputation"` and `"loss jump"`.
        text: What was found, with numbers.
        advice: What to type; empty if healthy.
        stage: The slowest stage, where that is the cause.
        ratio: How much slower it is than the mean of the others.
        link: The slowest link, where that is the cause.
    """

    cause: Cause
    text: str
    advice: str = ""
    stage: int | None = None
    ratio: float | None = None
    link: LinkWait | None = None

    def __str__(self) -> str:
        return f"{self.text} {self.advice}".strip()


def examine(
    found: MeasuredBubble | None, run: Run, losses: Sequence[Loss] = ()
) -> tuple[Verdict, ...]:
    """All that is to be said: what limits the speed, and what else is wrong.

    Args:
        found: The parts of a measured bubble, if one was measured.
        run: What else is known.
        losses: Of consecutive steps.
    """
    verdicts = [] if found is None else [diagnose(found, run)]
    small = None if found is None else _small_batch(found, run)
    if small is not None:  # in place of "more micro-batches", which it has no rows for
        verdicts = [small, *(verdict for verdict in verdicts if verdict.cause != "bubble")]
    verdicts += [v for v in (_recomputation(run), loss_jump(losses)) if v is not None]
    return tuple(verdicts)


def diagnose(found: MeasuredBubble, run: Run) -> Verdict:
    """Names the first thing that is worth a change.

    Args:
        found: The parts of a measured bubble.
        run: What was run.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> run = Run.of(make_schedule("gpipe", num_ranks=4, num_microbatches=1))
    >>> diagnose(MeasuredBubble(0.75, 0.0, 0.0, 0.0, (0.75,) * 4, (0.25,) * 4), run).cause
    'bubble'
    """
    whole = found.bubble_fraction
    few = run.num_microbatches < 4 * run.num_ranks
    if few and found.fill_drain_fraction > max(_IDLE, found.imbalance_fraction / 2):
        return _raise_microbatches(found, run)
    waiting = max(found.communication_fraction, found.host_fraction)
    if found.imbalance_fraction > max(_IDLE, waiting / 2):
        return _rebalance(found, run)
    if waiting > _IDLE and found.communication_fraction >= found.host_fraction:
        return _slow_links(found, run)
    if waiting > _IDLE:
        return Verdict(
            "host",
            f"The ranks are idle for {whole:.1%} of the time: {found.host_fraction:.1%} is "
            "neither computing nor waiting: Python between the actions takes longer than the work "
            "hides.",
            "Use larger micro-batches, fewer virtual stages, or less work in the step outside of "
            "layers.",
        )
    return Verdict(
        "healthy",
        f"Healthy: the ranks are idle for {whole:.1%} of the time: {found.fill_drain_fraction:.1%} "
        f"are those of {run.schedule_name} with {run.num_microbatches} micro-batches itself.",
    )


def loss_jump(losses: Sequence[Loss]) -> Verdict | None:
    """Whether the loss went up when the number of micro-batches or samples of a step changed."""
    keys = [(pieces, samples) for pieces, samples, _ in losses]
    for place in range(1, len(losses)):
        if keys[place] == keys[place - 1]:
            continue
        before = [loss for _, _, loss in losses[max(0, place - AROUND) : place]]
        after = [
            loss
            for key, (_, _, loss) in zip(keys[place:], losses[place:], strict=True)
            if key == keys[place]
        ][:AROUND]
        if min(len(before), len(after)) < _FEWEST:
            continue
        was, now = statistics.mean(before), statistics.mean(after)
        if now - was > max(3 * statistics.stdev(before), 0.1 * abs(was)):
            return _jumped(keys[place - 1], keys[place], was, now)
    return None


def _jumped(before: tuple[int, int], after: tuple[int, int], was: float, now: float) -> Verdict:
    pieces = f"num_microbatches went from {before[0]} to {after[0]}"
    text = f"The loss rose from {was:.4g} to {now:.4g} when {pieces}"
    if before[1] != after[1]:
        return Verdict(
            "loss jump",
            f"{text} and the samples of an optimizer step from {before[1]} to {after[1]}.",
            'Let the learning rate follow: EffectiveBatchRescaler("linear") for SGD, "sqrt" for '
            "Adam.",
        )
    return Verdict(
        "loss jump",
        f"{text}. The number of micro-batches alone changes no gradient of a loss that is a mean "
        "over rows, so this one is none, or a BatchNorm sees fewer rows at a time.",
        'Return {"loss": loss, "loss_weight": number} from training_step, use another norm, or go '
        f"back to num_microbatches={before[0]}.",
    )


def _saved_by(found: MeasuredBubble, now: int, better: int) -> float:
    """Share of the time of a sample that more micro-batches save: the pipeline fills once."""
    fill = found.fill_drain_fraction / (1 - found.bubble_fraction)
    return 1 - (1 + fill * now / better) / (1 + fill)


def _raise_microbatches(found: MeasuredBubble, run: Run) -> Verdict:
    better = 4 * run.num_ranks
    return Verdict(
        "bubble",
        f"The ranks are idle for {found.bubble_fraction:.1%} of the time: "
        f"{found.fill_drain_fraction:.1%} while the pipeline fills and drains: "
        f"{run.num_microbatches} micro-batches are few for {run.num_ranks} ranks.",
        f"Give num_microbatches={better} with as many rows in a micro-batch: about "
        f"{_saved_by(found, run.num_microbatches, better):.0%} less time for a sample. If the "
        "batch cannot grow, virtual_stages=2 fills in half the time.",
    )


def _small_batch(found: MeasuredBubble, run: Run) -> Verdict | None:
    asked = run.asked_microbatches
    if asked is None or asked <= run.num_microbatches:
        return None
    return Verdict(
        "small batch",
        f"num_microbatches={asked} was asked for, and the batch has rows for "
        f"{run.num_microbatches}: the ranks are idle for {found.bubble_fraction:.1%} of the time.",
        f"Give batches of {asked} rows or more (batch_size={asked} of the DataLoader): about "
        f"{_saved_by(found, run.num_microbatches, asked):.0%} less time for a sample.",
    )


def _recomputation(run: Run) -> Verdict | None:
    if not run.recomputes or run.memory_fraction is None or run.memory_fraction > _ROOMY:
        return None
    return Verdict(
        "recomputation",
        f"Every backward runs its forward again (activation checkpointing), about a quarter of the "
        f"computing time, and the fullest rank holds {run.memory_fraction:.0%} of its device.",
        "Switch it off: activation_checkpointing='auto', or, for some of the blocks too, "
        "gradient_checkpointing_disable() of the model.",
    )


def _rebalance(found: MeasuredBubble, run: Run) -> Verdict:
    times = found.stage_utilisations
    slowest = max(range(len(times)), key=times.__getitem__)
    others = [time for stage, time in enumerate(times) if stage != slowest]
    mean = sum(others) / len(others) if others else times[slowest]
    ratio = times[slowest] / mean if mean else float("inf")
    return Verdict(
        "imbalance",
        f"The ranks are idle for {found.bubble_fraction:.1%} of the time: "
        f"{found.imbalance_fraction:.1%} waiting for stage {slowest}, which takes "
        f"{ratio:.2f} times as long as the others on average.",
        _better_cut(times, run.unit_counts, slowest),
        slowest,
        ratio,
    )


def _better_cut(times: Sequence[float], counts: Sequence[int], slowest: int) -> str:
    """Another number of units per stage, if the units of a stage take as long as each other."""
    if len(counts) != len(times) or not all(counts):
        return (
            f"Cut so that stage {slowest} has less: balance='flops' or a list of units per stage, "
            "or split_points that end it earlier."
        )
    units = [t / n for t, n in zip(times, counts, strict=True) for _ in range(n)]
    parts = ranges(partition(units, len(counts)), len(units))
    better = [end - start for start, end in parts]
    heaviest = max(sum(units[start:end]) for start, end in parts)
    if heaviest > (1 - _IDLE) * times[slowest]:
        return (
            f"No other number of units per stage is clearly better (now {list(counts)}): make the "
            f"layers of stage {slowest} of smaller modules, or its work smaller."
        )
    return (
        f"Give balance={better} (units per stage, now {list(counts)}): about "
        f"{1 - heaviest / times[slowest]:.0%} less time for a step."
    )


def _slow_links(found: MeasuredBubble, run: Run) -> Verdict:
    return Verdict(
        "communication",
        f"The ranks are idle for {found.bubble_fraction:.1%} of the time: "
        f"{found.communication_fraction:.1%} waiting for values that the stage before had "
        f"computed already: the links are slow, or each transfer is small.{_worst(found, run)}",
        "Use larger micro-batches (fewer of them, or a larger batch), fewer virtual stages, "
        'split_points where less crosses (see "sends" in the plan), or ranks of one machine.',
        link=found.links[0] if found.links else None,
    )


def _worst(found: MeasuredBubble, run: Run) -> str:
    """The link that ranks waited for longest, as a sentence."""
    if not found.links:
        return ""
    link = found.links[0]
    rank_of = run.stage_to_rank
    what = "values" if link.target > link.source else "gradients"
    text = (
        f" Most of it is for {what} from stage {link.source} (rank {rank_of[link.source]}) to "
        f"stage {link.target} (rank {rank_of[link.target]}), which arrive "
        f"{format_seconds(link.transfer_s)} after they are ready"
    )
    if len(run.boundary_bytes) != len(rank_of) or not link.transfer_s:
        return f"{text}."
    num_bytes = run.boundary_bytes[min(link.source, link.target)]
    return (
        f"{text}: {format_bytes(num_bytes)} per micro-batch, "
        f"{format_bytes(num_bytes / link.transfer_s)} per second."
    )
