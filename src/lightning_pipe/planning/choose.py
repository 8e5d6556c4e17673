"""Chooses P, V, M, the schedule and checkpointing: enumerate, cut, simulate, take the fastest.

Every combination is cut under the memory cap for its own in-flight counts and simulated with its
own links. Of those that fit, the simplest within a hair of the fastest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from lightning_pipe.errors import PlanError, ScheduleError
from lightning_pipe.planning import balance as cuts
from lightning_pipe.planning.costs import LinkCosts
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.limited import PartSize, best_cuts, smallest_peak
from lightning_pipe.planning.memory import (
    HEADROOM,
    Ledger,
    make_ledger,
    part_sizes,
    smallest_pipeline,
    stage_in_flight,
)
from lightning_pipe.planning.profile import Again, Profile, all_reduce_s, ranges
from lightning_pipe.planning.refuse import a_unit_is_too_large, nothing_fits
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import simulate
from lightning_pipe.planning.topology import ONE_NODE, Topology

__all__ = [
    "BALANCES",
    "GOOD",
    "NEED_TIMES",
    "Candidate",
    "Outcome",
    "Request",
    "Search",
    "search",
    "starts_for",
]

BALANCES = ("auto", "time", "flops", "parameters", "memory", "uniform")
_SIMPLEST_FIRST = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble", "zbv", "looped_bfs")
NEED_TIMES = ("zero_bubble", "zbv", "dualpipev")  # what they gain depends on I and W, not on FLOPs
_WORTH = 0.02  # a less simple combination must be so much faster to be taken
_TRIED_MORE = 8  # ranks, when nothing fits
GOOD = 4  # micro-batches per rank that keep the ranks busy


@dataclass(frozen=True, slots=True)
class Request:
    """What is given, and what is free (None).

    Args:
        rows: Rows of the batch that a pipeline is given per step.
        devices: Devices that there are.
        num_ranks: P.
        virtual_stages: V.
        num_microbatches: M.
        schedule: Name, or path of a CSV file.
        checkpointing: Whether units run again for the backward; None allows it where nothing else
            fits.
        balance: One of ``BALANCES``, or the unit calls of each stage.
        split_points: Names of units after which to cut.
        cap_bytes: Memory of a device; None if it does not matter.
        headroom_fraction: Share of it that stays free.
        topology: Machines and links.
        copies: Whether devices that a pipeline leaves over run copies of it (data parallelism).
    """

    rows: int
    devices: int
    num_ranks: int | None = None
    virtual_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    checkpointing: bool | None = None
    balance: str | tuple[int, ...] = "auto"
    split_points: tuple[str, ...] | None = None
    cap_bytes: int | None = None
    headroom_fraction: float = HEADROOM
    topology: Topology = ONE_NODE
    copies: bool = False

    @property
    def usable_bytes(self) -> float:
        """What may be used of a device."""
        if self.cap_bytes is None:
            return math.inf
        return self.cap_bytes * (1 - self.headroom_fraction)


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


def starts_for(
    profile: Profile, request: Request, schedule: Schedule, *, checkpointing: Again = False
) -> tuple[int, ...]:
    """The cut that the request's balance makes, within the memory if that is possible at all.

    Raises:
        PlanError: Fewer units than stages, or counts or names that do not fit the model.
    """
    num_units, num_stages = len(profile.units), schedule.num_stages
    if request.split_points is not None:
        return cuts.at_names([unit.unit for unit in profile.units], request.split_points)
    if not isinstance(request.balance, str):
        return cuts.explicit(request.balance, num_units)
    if request.balance == "uniform":
        return cuts.uniform(num_units, num_stages)
    flights = stage_in_flight(schedule)
    size = part_sizes(profile, flights, checkpointing=checkpointing)

    if request.balance != "memory":
        for share in dict.fromkeys((1, schedule.num_stages // schedule.num_ranks)):
            starts = _timed_starts(profile, request, schedule, size, share)
            if starts is None:
                continue
            if (
                request.cap_bytes is None
                or max(_held(starts, size, profile, schedule)) <= request.usable_bytes
                or share > 1
            ):
                return starts
    return smallest_peak(num_units, num_stages, size)


def _timed_starts(
    profile: Profile, request: Request, schedule: Schedule, size: PartSize, share: int
) -> tuple[int, ...] | None:
    """The most even cut whose stages hold at most their share of a rank's memory."""
    usable_bytes = request.usable_bytes / share
    work = unit_work(profile, str(request.balance))
    by_time = request.balance in ("auto", "time") and profile.has_times
    units = profile.units
    ahead_s, back_s = _sending(profile, request.topology, schedule)

    def sends(part: int, start: int, end: int) -> float:
        if not units[end - 1].can_cut_after:
            return math.inf
        return ahead_s[part][end] + back_s[part][start] if by_time else 0.0

    def allowed(part: int, start: int, end: int) -> bool:
        return request.cap_bytes is None or size(part, start, end) <= usable_bytes

    return best_cuts(work, schedule.num_stages, extra=sends, allowed=allowed)


def _sending(
    profile: Profile, topology: Topology, schedule: Schedule
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds in which each stage sends its outputs, by its end, and its gradients, by its
    start."""
    units, rank_of = profile.units, schedule.stage_to_rank
    sizes = [0, *(unit.output_bytes for unit in units[:-1]), 0]
    returned = [0, *(unit.gradient_bytes for unit in units[:-1]), 0]
    known: dict[tuple[LinkCosts | None, bool], list[float]] = {}

    def seconds(part: int, other: int, num_bytes: Sequence[int]) -> list[float]:
        away = 0 <= other < len(rank_of) and rank_of[other] != rank_of[part]
        link = topology.between(rank_of[part], rank_of[other]) if away else None
        key = (link, num_bytes is sizes)
        if key not in known:
            known[key] = [0.0 if link is None else link.transfer_s(n) for n in num_bytes]
        return known[key]

    parts = range(len(rank_of))
    return (
        [seconds(part, part + 1, sizes) for part in parts],
        [seconds(part, part - 1, returned) for part in parts],
    )


def _held(
    starts: Sequence[int], size: PartSize, profile: Profile, schedule: Schedule
) -> list[float]:
    """Bytes of each rank if all of its stages are at their peak at once."""
    held = [0.0] * schedule.num_ranks
    places = zip(schedule.stage_to_rank, ranges(starts, len(profile.units)), strict=True)
    for part, (rank, (start, end)) in enumerate(places):
        held[rank] += size(part, start, end)
    return held


def unit_work(profile: Profile, balance: str) -> list[float]:
    """What each unit call weighs: seconds, FLOPs or parameters.

    "auto" is the seconds where there are any, which are measured or in proportion to FLOPs; a model
    without FLOPs is balanced by its parameters.
    """
    if balance in ("auto", "time") and profile.has_times:
        return [unit.total_s for unit in profile.units]
    if balance == "time":
        raise PlanError(
            "balance='time' needs measured costs: give costs=FILE, which `lightning-pipe plan "
            "--measure cpu --save-costs FILE` writes, or balance='flops'"
        )
    if balance in ("auto", "flops") and any(unit.flops for unit in profile.units):
        return [float(unit.flops) for unit in profile.units]
    seen: set[str] = set()
    counts = []
    for unit in profile.units:
        new = set(unit.weights) - seen
        seen |= new
        counts.append(float(sum(profile.weights[name].elements for name in new)))
    return counts


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
