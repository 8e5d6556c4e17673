"""Chooses P, V, M, the schedule and checkpointing: enumerate, cut, simulate, take the fastest.

Every combination is cut under the memory cap for its own in-flight counts and simulated with its
own links. Of those that fit, the simplest within a hair of the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_pipe.errors import PlanError, ScheduleError
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.memory import Ledger, make_ledger, smallest_pipeline
from lightning_pipe.planning.profile import Again, Profile, all_reduce_s
from lightning_pipe.planning.refuse import a_unit_is_too_large, nothing_fits
from lightning_pipe.planning.request import Request, starts_for
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate
from lightning_pipe.planning.topology import Topology

__all__ = ["GOOD", "NEED_TIMES", "Candidate", "Outcome", "Search", "search", "try_one"]

_SIMPLEST_FIRST = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "looped_bfs")
NEED_TIMES = ("zero_bubble", "zbv", "dualpipev")  # what they gain depends on I and W, not on FLOPs
_WORTH = 0.02  # a less simple combination must be so much faster to be taken
_TRIED_MORE = 8  # ranks, when nothing fits
GOOD = 4  # micro-batches per rank that keep the ranks busy


@dataclass(frozen=True, slots=True)
class Candidate:
    """One combination."""

    num_ranks: int
    virtual_stages: int
    num_microbatches: int
    schedule_name: str
    checkpointing: Again = False

    def __str__(self) -> str:
        chunks = f", V={self.virtual_stages}" if self.virtual_stages > 1 else ""
        again = ", checkpointing" if self.checkpointing else ""
        return f"{self.schedule_name}, P={self.num_ranks}{chunks}, M={self.num_microbatches}{again}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the simulation says of a combination."""

    candidate: Candidate
    schedule: Schedule = field(repr=False)
    profile: Profile = field(repr=False)  # for the rows of its micro-batches
    starts: tuple[int, ...]
    ledger: Ledger = field(repr=False)
    step_s: float
    bubble_fraction: float
    copies: int = 1

    @property
    def seconds_per_row(self) -> float:
        """The measure of all choice: seconds of a step for each row of all copies."""
        rows = self.profile.rows * self.candidate.num_microbatches
        return self.step_s / (rows * self.copies)


@dataclass(frozen=True, slots=True)
class Search:
    """All that was tried.

    Args:
        request: What was asked.
        profile: The model.
        outcomes: Every combination that was simulated, fitting or not.
        chosen: The best of those that fit.
    """

    request: Request
    profile: Profile
    outcomes: tuple[Outcome, ...]
    chosen: Outcome


def search(profile: Profile, request: Request) -> Search:
    """Tries all combinations that the request leaves free.

    Raises:
        PlanError: Nothing fits, with the stage, the bytes and the smallest change that would; or
            there are fewer units than stages.
        ScheduleError: A pinned schedule cannot run with the pinned numbers.
    """
    a_unit_is_too_large(profile, request.usable_bytes, _smallest_rows(request))
    outcomes = _first_round(profile, request)
    fitting = [outcome for outcome in outcomes if outcome.ledger.fits]
    if not fitting:
        raise _refusal(profile, request, outcomes)
    chosen = _best(fitting, request, profile)
    if request.num_microbatches is None:
        more = [try_one(profile, request, c) for c in _other_microbatches(chosen, request)]
        outcomes += more
        chosen = _best([chosen, *(o for o in more if o.ledger.fits)], request, profile)
    return Search(request, profile, tuple(outcomes), chosen)


def _smallest_rows(request: Request) -> int:
    return math.ceil(request.rows / (request.num_microbatches or request.rows))


def _refusal(profile: Profile, request: Request, outcomes: Sequence[Outcome]) -> PlanError:
    """Says what is nearest to fitting, and what small changes would make it fit."""
    nearest = min(outcomes, key=lambda outcome: outcome.ledger.excess_bytes)
    changes = list(_more_ranks(profile, request, nearest.candidate))
    if request.checkpointing is False:
        again = try_one(profile, request, replace(nearest.candidate, checkpointing=True))
        if again.ledger.fits:
            changes.append("activation checkpointing")
    count = nearest.candidate.num_microbatches
    while count < request.rows:
        count = min(2 * count, request.rows)
        again = try_one(profile, request, replace(nearest.candidate, num_microbatches=count))
        if again.ledger.fits:
            changes.append(f"micro-batches of {again.profile.rows} rows (num_microbatches={count})")
            break
    units = [unit.unit for unit in profile.units]
    return nothing_fits(nearest.ledger, nearest.starts, units, str(nearest.candidate), changes)


def _more_ranks(profile: Profile, request: Request, nearest: Candidate) -> Iterator[str]:
    """The smallest P that fits, with as many micro-batches as its schedule needs."""
    piece = profile.for_rows(math.ceil(request.rows / nearest.num_microbatches))
    needed = smallest_pipeline(
        piece,
        request.cap_bytes or 0,
        headroom_fraction=request.headroom_fraction,
        checkpointing=bool(nearest.checkpointing),
    )
    if needed is None and nearest.num_microbatches >= nearest.num_ranks:
        return
    least = max(nearest.num_ranks + 1, (needed or 0) // 2)
    free = replace(request, split_points=None)
    if not isinstance(request.balance, str):
        free = replace(free, balance="auto")
    for num_ranks in range(least, min(least + _TRIED_MORE, len(profile.units) + 1)):
        count = max(nearest.num_microbatches, num_ranks)
        if count > request.rows:
            return
        try:
            wider = replace(nearest, num_ranks=num_ranks, num_microbatches=count)
            fits = try_one(profile, free, wider).ledger.fits
        except (PlanError, ScheduleError):
            continue
        if fits:
            more = "" if count == nearest.num_microbatches else f" with num_microbatches={count}"
            yield f"P={num_ranks} (devices){more}"
            return


def _first_round(profile: Profile, request: Request) -> list[Outcome]:
    """Every P, schedule and V at the good number of micro-batches."""
    outcomes = []
    errors: list[Exception] = []
    for candidate in _candidates(profile, request):
        try:
            outcome = try_one(profile, request, candidate)
        except (ScheduleError, PlanError) as error:
            errors.append(error)
            continue
        outcomes.append(outcome)
        if not outcome.ledger.fits and request.checkpointing is None:
            again = try_one(profile, request, replace(candidate, checkpointing=True))
            outcomes.append(again)
    if not outcomes:
        raise errors[0]
    return outcomes


def _candidates(profile: Profile, request: Request) -> Iterator[Candidate]:
    for num_ranks in _sizes(profile, request):
        microbatches = request.num_microbatches or _good_microbatches(num_ranks, request.rows)
        for name, chunks in _schedules(num_ranks, microbatches, profile, request):
            yield Candidate(num_ranks, chunks, microbatches, name, bool(request.checkpointing))


def _sizes(profile: Profile, request: Request) -> list[int]:
    if request.num_ranks is not None:
        return [request.num_ranks]
    most = min(request.devices, len(profile.units))
    if request.copies:
        return [size for size in range(1, most + 1) if request.devices % size == 0]
    sizes = {2**power for power in range(most.bit_length())} | {most}
    if request.cap_bytes is not None:
        found = smallest_pipeline(
            profile, request.cap_bytes, headroom_fraction=request.headroom_fraction, most=most
        )
        sizes |= {found} if found is not None else set()
    return sorted(size for size in sizes if size <= most)


def _good_microbatches(num_ranks: int, rows: int) -> int:
    return max(1, min(rows, GOOD * num_ranks)) if num_ranks > 1 else 1


def _schedules(
    num_ranks: int, num_microbatches: int, profile: Profile, request: Request
) -> Iterator[tuple[str, int]]:
    """Names and chunks; pinned ones as they are, so that what is wrong with them is said."""
    chunks = request.virtual_stages
    if request.schedule is not None:
        two = request.schedule in ("zbv", "dualpipev")
        several = request.schedule in ("interleaved", "interleaved_1f1b", "looped_bfs")
        if chunks is None and several and num_ranks > 1:
            for each in (2, 4):
                if each == 2 or num_ranks * each <= len(profile.units):
                    yield request.schedule, each
        else:
            yield request.schedule, chunks or (2 if two else 1)
        return
    if num_ranks == 1:
        yield ("1f1b", chunks or 1)
        return
    if chunks in (None, 1):
        yield ("1f1b" if num_microbatches >= num_ranks else "gpipe"), 1
        yield "zero_bubble", 1
    for each in (2, 4) if chunks is None else (chunks,):
        if each > 1 and (chunks or num_ranks * each <= len(profile.units)):
            yield "interleaved_1f1b", each
            if each == 2:
                yield "zbv", each


def _other_microbatches(chosen: Outcome, request: Request) -> Iterator[Candidate]:
    """Fewer and larger micro-batches, or more and smaller ones, of the same batch."""
    now = chosen.candidate
    if now.num_ranks == 1:
        return
    for count in (now.num_ranks, 2 * now.num_ranks, 8 * now.num_ranks):
        if count <= request.rows and count != now.num_microbatches:
            yield replace(now, num_microbatches=count)


def try_one(
    profile: Profile, request: Request, candidate: Candidate, *, strict: bool = True
) -> Outcome:
    """Cuts and simulates one combination; ``strict`` refuses what a user should not ask for.

    Raises:
        ScheduleError: The schedule does not run with these numbers.
        PlanError: Too few units.
    """
    count = candidate.num_microbatches
    schedule = make_schedule(
        candidate.schedule_name,
        num_ranks=candidate.num_ranks,
        num_microbatches=count,
        virtual_stages=candidate.virtual_stages,
        strict=strict,
    )
    piece = profile.for_rows(math.ceil(request.rows / count))
    starts = starts_for(piece, request, schedule, checkpointing=candidate.checkpointing)
    ledger = make_ledger(
        piece,
        starts,
        schedule,
        cap_bytes=request.cap_bytes,
        headroom_fraction=request.headroom_fraction,
        checkpointing=candidate.checkpointing,
    )
    copies = request.devices // candidate.num_ranks if request.copies else 1
    after_s = _gradient_sums(ledger, schedule, request.topology, copies)
    costs = piece.stage_costs(starts, checkpointing=candidate.checkpointing)
    timeline = simulate(schedule, costs, request.topology.between, after_s=after_s)
    return Outcome(
        candidate,
        schedule,
        piece,
        starts,
        ledger,
        timeline.step_s,
        timeline.bubble_fraction,
        copies,
    )


def _gradient_sums(
    ledger: Ledger, schedule: Schedule, topology: Topology, copies: int
) -> list[float]:
    """Seconds in which each rank sums its gradients with the other copies of the pipeline."""
    sent_bytes = [0] * schedule.num_ranks
    for stage in ledger.stages:
        sent_bytes[stage.rank] += stage.gradient_bytes
    link = topology.node_link or topology.link
    return [all_reduce_s(num_bytes, copies, link) for num_bytes in sent_bytes]


def _best(outcomes: Sequence[Outcome], request: Request, profile: Profile) -> Outcome:
    """The simplest of those that are a hair slower than the fastest at most."""
    eligible = [o for o in outcomes if _may_be_chosen(o.candidate, request, profile)] or outcomes
    fastest = min(outcome.seconds_per_row for outcome in eligible)
    near = [o for o in eligible if o.seconds_per_row <= fastest * (1 + _WORTH)]
    return min(near, key=lambda outcome: _complexity(outcome.candidate))


def _may_be_chosen(candidate: Candidate, request: Request, profile: Profile) -> bool:
    """Without a clock nobody knows what I and W take apart, or how slow small pieces are."""
    if profile.measured_on:
        return True
    if request.schedule is None and candidate.schedule_name in NEED_TIMES:
        return False
    good = request.num_microbatches or _good_microbatches(candidate.num_ranks, request.rows)
    return candidate.num_microbatches == good


def _complexity(candidate: Candidate) -> tuple[float, ...]:
    name = candidate.schedule_name
    order = _SIMPLEST_FIRST.index(name) if name in _SIMPLEST_FIRST else len(_SIMPLEST_FIRST)
    distance = abs(candidate.num_microbatches - GOOD * candidate.num_ranks)
    return (
        bool(candidate.checkpointing),
        candidate.num_ranks,
        order,
        candidate.virtual_stages,
        distance,
    )
