"""What the user left open, decided on the traced step: chunks and schedule, and the reasons."""

from __future__ import annotations

from dataclasses import replace

from lightning_pipe.errors import PlanError
from lightning_pipe.layout import Layout
from lightning_pipe.planning.choose import search
from lightning_pipe.planning.costs import FREE, GUESSED_FLOPS_PER_S, GUESSED_LINK, LinkCosts
from lightning_pipe.planning.explain import explain
from lightning_pipe.planning.profile import Profile
from lightning_pipe.planning.request import Request
from lightning_pipe.planning.topology import Topology

__all__ = ["decide"]


def decide(
    layout: Layout, profile: Profile, pieces: int, cap_bytes: int
) -> tuple[Layout, tuple[str, ...]]:
    """Takes the fastest combination that fits the memory.

    Args:
        layout: What was asked for.
        profile: The traced step of a micro-batch.
        pieces: Micro-batches of the first batch.
        cap_bytes: Memory of a rank.

    Returns:
        The layout with nothing open, and the reasons, a sentence each. Where the model fits in no
        way, memory does not count, and the first reason says so.

    Raises:
        ScheduleError: The schedule that was asked for runs with no number of chunks.
    """
    if not layout.chunks_are_free:
        return layout, ()
    request = Request(
        rows=profile.rows * pieces,
        devices=layout.num_ranks,
        num_ranks=layout.num_ranks,
        num_microbatches=pieces,
        schedule=None if layout.schedule == "auto" else layout.schedule,
        checkpointing={"all": True, "none": False}.get(str(layout.activation_checkpointing)),
        balance=layout.balance,
        split_points=layout.split_points,
        cap_bytes=cap_bytes,
        topology=Topology(link=_link(layout)),
    )
    priced = profile if profile.measured_on else profile.with_flops_per_s(GUESSED_FLOPS_PER_S)
    notes: tuple[str, ...] = ()
    try:
        found = search(priced, request)
    except PlanError as error:
        notes = (str(error),)
        found = search(priced, replace(request, cap_bytes=None))
    chosen = found.chosen.candidate
    stays_open = layout.schedule == "auto" and chosen.schedule_name in ("1f1b", "gpipe")
    decided = replace(
        layout,
        virtual_stages=chosen.virtual_stages,
        chunks_are_free=False,
        schedule="auto" if stays_open else chosen.schedule_name,
    )
    return decided, (*notes, *explain(found))


def _link(layout: Layout) -> LinkCosts:
    if layout.costs is not None and layout.costs.link != FREE:
        return layout.costs.link
    return GUESSED_LINK
