"""What a search is asked, and the cut that this makes: by its balance, within the memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.errors import PlanError
from lightning_pipe.planning import balance as cuts
from lightning_pipe.planning.costs import LinkCosts
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.limited import PartSize, best_cuts, smallest_peak
from lightning_pipe.planning.memory import HEADROOM, part_sizes, stage_in_flight
from lightning_pipe.planning.profile import Again, Profile, ranges
from lightning_pipe.planning.topology import ONE_NODE, Topology

__all__ = ["BALANCES", "Request", "starts_for", "unit_work"]

BALANCES = ("auto", "time", "flops", "parameters", "memory", "uniform")


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
        names = [unit.unit for unit in profile.units]
        return cuts.explicit(request.balance, num_units, names)
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
