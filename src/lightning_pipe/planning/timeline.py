"""When each action ran: the one type for predicted and for measured time.

The simulator makes a ``Timeline`` from a schedule and costs, the engine from clocks; pictures and
callbacks read it and cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_pipe.planning.ir import Action

__all__ = ["Span", "Timeline"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from ``start_s`` to ``end_s`` in seconds.

    ``wait_s`` are the seconds right before it in which the rank waited for what the action needs.
    """

    rank: int
    action: Action
    start_s: float
    end_s: float
    wait_s: float = 0.0

    @property
    def duration_s(self) -> float:
        """Seconds that the action took."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """What all ranks did within one step.

    Args:
        spans: Every action, those of one rank in the order in which it ran them, none overlapping.
        num_ranks: Ranks of the pipeline.
        step_s: Seconds of the whole step, the same for all ranks.

    >>> action = Action.parse("0F0")
    >>> timeline = Timeline((Span(0, action, 0.0, 1.0), Span(1, action, 1.0, 4.0)), 2, 4.0)
    >>> timeline.busy_s(0), timeline.idle_s(0), timeline.bubble_fraction
    (1.0, 3.0, 0.5)
    """

    spans: tuple[Span, ...]
    num_ranks: int
    step_s: float

    @classmethod
    def from_spans(cls, spans: Iterable[Span], num_ranks: int) -> Timeline:
        """Makes the timeline of a step that lasts from the first start to the last end.

        Args:
            spans: From all ranks, on one clock; it may start anywhere.
            num_ranks: Ranks of the pipeline.
        """
        ordered = sorted(spans, key=lambda span: (span.rank, span.start_s))
        origin_s = min((span.start_s for span in ordered), default=0.0)
        moved = tuple(
            replace(span, start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)
            for span in ordered
        )
        return cls(moved, num_ranks, max((span.end_s for span in moved), default=0.0))

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """What one rank did."""
        return tuple(span for span in self.spans if span.rank == rank)

    def busy_s(self, rank: int) -> float:
        """Seconds that a rank computed."""
        return sum(span.duration_s for span in self.spans if span.rank == rank)

    def idle_s(self, rank: int) -> float:
        """Seconds of the step that a rank did not compute."""
        return self.step_s - self.busy_s(rank)

    def rank_bubble_fraction(self, rank: int) -> float:
        """Idle over total time of one rank, 0 to 1."""
        return self.idle_s(rank) / self.step_s if self.step_s else 0.0

    @property
    def bubble_fraction(self) -> float:
        """Idle over total time, mean over the ranks, 0 to 1."""
        total_s = self.step_s * self.num_ranks
        busy_s = sum(span.duration_s for span in self.spans)
        return (total_s - busy_s) / total_s if total_s else 0.0
