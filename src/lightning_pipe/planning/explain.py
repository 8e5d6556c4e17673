"""Says in a few lines why a plan was chosen: what was tried, why the rest lost, what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from lightning_pipe.planning.choose import (
    GOOD,
    NEED_TIMES,
    Candidate,
    Outcome,
    Search,
    try_one,
)
from lightning_pipe.planning.plan import format_bytes, format_seconds
from lightning_pipe.planning.profile import ranges
from lightning_pipe.planning.request import Request
from lightning_pipe.planning.simulate import BubbleParts, bubble_parts

__all__ = ["explain", "parts_of"]


def explain(found: Search) -> tuple[str, ...]:
    """The reasons, a sentence each."""
    chosen, request = found.chosen, found.request
    lines = [_what_was_tried(found), *_losers(found)]
    lines += _microbatches(found)
    if chosen.candidate.checkpointing:
        lines.append(_price_of_checkpointing(found))
    lines += _more_memory(found)
    crossings = request.topology.crossings(chosen.schedule.stage_to_rank)
    if crossings:
        borders = ", ".join(f"{stage}|{stage + 1}" for stage in crossings)
        lines.append(
            f"stage borders between machines: {borders}; priced with the slower link, so thin "
            "boundaries are put there where that costs nothing else"
        )
    return tuple(lines)


def parts_of(outcome: Outcome, request: Request) -> BubbleParts:
    """Where the idle time of an outcome is from."""
    again = outcome.candidate.checkpointing
    costs = outcome.profile.stage_costs(outcome.starts, checkpointing=again)
    return bubble_parts(outcome.schedule, costs, request.topology.between)


def _what_was_tried(found: Search) -> str:
    fitting = sum(outcome.ledger.fits for outcome in found.outcomes)
    count = len(found.outcomes)
    cap = "" if found.request.cap_bytes is None else f", {fitting} of them fit"
    return f"{count} combination{'s' if count > 1 else ''} simulated{cap}; chosen: " + (
        f"{found.chosen.candidate}"
    )


def _losers(found: Search) -> Iterable[str]:
    """The best of each other schedule and of each other P, with the reason."""
    chosen = found.chosen
    seen: set[tuple[str, int, int]] = set()
    for outcome in sorted(found.outcomes, key=_order):
        candidate = outcome.candidate
        kind = (candidate.schedule_name, candidate.num_ranks, candidate.virtual_stages)
        same = candidate.num_ranks == chosen.candidate.num_ranks
        if kind in seen or (
            kind[:1] == (chosen.candidate.schedule_name,)
            and same
            and (candidate.virtual_stages == chosen.candidate.virtual_stages)
        ):
            continue
        if not same and candidate.schedule_name != chosen.candidate.schedule_name:
            continue  # other sizes are compared at the chosen schedule only
        seen.add(kind)
        yield f"{candidate}: {_why_not(outcome, found)}"


def _order(outcome: Outcome) -> tuple[bool, float]:
    return not outcome.ledger.fits, outcome.seconds_per_row


def _why_not(outcome: Outcome, found: Search) -> str:
    if not outcome.ledger.fits:
        return f"does not fit, by {format_bytes(outcome.ledger.excess_bytes)} on rank " + (
            f"{outcome.ledger.fullest}"
        )
    ratio = outcome.seconds_per_row / found.chosen.seconds_per_row - 1
    parts = parts_of(outcome, found.request)
    idle = (
        f"idle {outcome.bubble_fraction:.1%}, of which communication "
        f"{parts.communication_fraction:.1%}"
    )
    if ratio >= 0:
        return f"{ratio:.1%} slower ({idle})"
    if outcome.candidate.schedule_name in NEED_TIMES and not (found.profile.measured_on):
        return (
            f"{-ratio:.1%} faster if W takes as long as I, which FLOPs do not tell; measure the "
            f"costs (--measure), or pin the schedule ({idle})"
        )
    return f"{-ratio:.1%} faster, which does not pay for what it adds ({idle})"


_MOSTLY = 0.5  # communication above which more micro-batches are no advice


def _microbatches(found: Search) -> Iterable[str]:
    """M >= 4P first: what M is, and what a larger batch would gain."""
    chosen, request = found.chosen, found.request
    now = chosen.candidate
    if now.num_ranks == 1:
        return
    waits = parts_of(chosen, request).communication_fraction
    if waits > _MOSTLY:
        yield (
            f"{waits:.0%} of the time is communication: at these speeds "
            f"({found.profile.basis}) sending a micro-batch takes longer than computing it. Give "
            "larger micro-batches, fewer stages or a larger model, or measure: --measure times the "
            "units on your device, `lightning-pipe link` what is between two"
        )
        return
    ratio = now.num_microbatches / now.num_ranks
    rule = f"M={now.num_microbatches} is {ratio:.3g} x P"
    wanted = GOOD * now.num_ranks
    if now.num_microbatches >= wanted:
        wanted = 2 * now.num_microbatches
        rule += f" (the rule is {GOOD} x P or more)"
    else:
        rule += f", less than the {GOOD} x P that keep ranks busy"
    rows = chosen.profile.rows * wanted
    larger = try_one(
        found.profile, replace(request, rows=rows), replace(now, num_microbatches=wanted)
    )
    yield (
        f"{rule}: idle {chosen.bubble_fraction:.1%}; a batch of {rows} rows as M={wanted} "
        f"micro-batches of the same size would be idle {larger.bubble_fraction:.1%}, "
        f"{_gain(larger, chosen)} per row"
    )
    others = [
        o
        for o in found.outcomes
        if _same_but_m(o.candidate, now) and o.candidate != now and o.ledger.fits
    ]
    for other in sorted(others, key=lambda o: o.candidate.num_microbatches):
        yield (
            f"M={other.candidate.num_microbatches} of the same batch: idle "
            f"{other.bubble_fraction:.1%}, {_gain(other, chosen)}{_unless(other, found)}"
        )


def _unless(other: Outcome, found: Search) -> str:
    if found.profile.measured_on:
        return ""
    return ", if pieces of that size keep a device as busy, which FLOPs do not tell"


def _same_but_m(one: Candidate, other: Candidate) -> bool:
    return replace(one, num_microbatches=other.num_microbatches) == other


def _gain(outcome: Outcome, chosen: Outcome) -> str:
    change = 1 - outcome.seconds_per_row / chosen.seconds_per_row
    return f"{abs(change):.1%} {'faster' if change >= 0 else 'slower'}"


def _price_of_checkpointing(found: Search) -> str:
    chosen = found.chosen
    starts = ranges(chosen.starts, len(chosen.profile.units))
    same_cut = replace(
        found.request, balance=tuple(end - start for start, end in starts), split_points=None
    )  # for memory alone it would be cut elsewhere, and that is another price
    without = try_one(found.profile, same_cut, replace(chosen.candidate, checkpointing=False))
    longer = chosen.step_s / without.step_s - 1
    if without.ledger.fits:
        return f"checkpointing was asked for and makes a step {longer:.0%} longer"
    return (
        f"checkpointing only because memory is short: without it rank {without.ledger.fullest} is "
        f"over by {format_bytes(without.ledger.excess_bytes)}; a step is {longer:.0%} longer for it"
    )


def _more_memory(found: Search) -> Iterable[str]:
    """The fastest combination that does not fit, if it is faster than what was chosen."""
    misses = [
        outcome
        for outcome in found.outcomes
        if not outcome.ledger.fits and outcome.seconds_per_row < found.chosen.seconds_per_row * 0.98
    ]
    if not misses:
        return
    best = min(misses, key=lambda outcome: outcome.seconds_per_row)
    share = 1 - found.request.headroom_fraction
    missing = math.ceil(best.ledger.excess_bytes / share)
    yield (
        f"with {format_bytes(missing)} more per device, {best.candidate} would fit: "
        f"{_gain(best, found.chosen)}"
    )


def summary(found: Search) -> str:
    """One line: what was chosen, and how long a step takes."""
    chosen: Outcome = found.chosen
    seconds = f", step {format_seconds(chosen.step_s)}" if found.profile.has_times else ""
    return f"{chosen.candidate}{seconds}, idle {chosen.bubble_fraction:.1%}"


def rows_of(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """All that was tried as a table: a header row, then the fastest first."""
    rows = [["combination", "fits", "fullest rank", "step", "idle"]]
    for outcome in sorted(outcomes, key=_order):
        rows.append(
            [
                str(outcome.candidate),
                "yes" if outcome.ledger.fits else "no",
                format_bytes(max(outcome.ledger.rank_peak_bytes)),
                format_seconds(outcome.step_s),
                f"{outcome.bubble_fraction:.1%}",
            ]
        )
    return rows
