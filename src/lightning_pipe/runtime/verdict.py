"""Why nothing goes on any more, from what every rank says that it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GONE, BUSY, STUCK, MOVED = "gone", "busy", "stuck", "moved"


@dataclass(frozen=True, slots=True)
class State:
    """What a rank says of itself.

    Attributes:
        name: Which rank it is, for people.
        doing: What it does.
        for_s: For how long.
        waits: Whether it waits for other ranks.
        step: Steps that it has begun.
        line: Where in the user's code, or in any.
        has_left: Whether it is no longer in the run.
    """

    name: str
    doing: str
    for_s: float = 0.0
    waits: bool = False
    step: int = 0
    line: str = ""
    has_left: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.what}"

    @property
    def what(self) -> str:
        """What it does, and where, and for how long."""
        at = f", at {self.line}" if self.line else ""
        return f"{self.doing}, for {self.for_s:.0f} s now, in step {self.step}{at}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why nothing goes on.

    Attributes:
        kind: A rank does not answer ("gone") or runs something ("busy"), or each waits for another
            ("stuck"); or it went on meanwhile ("moved").
        text: A sentence.
        ends: Whether the run is over for it.
    """

    kind: str
    text: str
    ends: bool = False


def judge(asked: int, states: Mapping[int, State], silent: Mapping[int, str]) -> Verdict:
    """Names the likely cause.

    Args:
        asked: The global rank that has waited for too long.
        states: What the ranks say, by global rank.
        silent: What is known of those that say nothing.
    """
    if not states[asked].waits:
        return Verdict(MOVED, f"{states[asked].name} goes on")
    if silent:
        rank, known = next(iter(sorted(silent.items())))
        return Verdict(
            GONE,
            f"global rank {rank} does not answer: its process or its machine is gone, or native "
            f"code in it keeps Python from running. {known}".rstrip(),
        )
    left = [state for state in states.values() if state.has_left]
    if left:
        return Verdict(
            STUCK,
            f"{left[0].name} has left the run: its Trainer is done, and the others wait for it. "
            "All ranks have to make the same calls: look for what only some of them do (a "
            "condition on the rank, an early return, another number of batches)",
        )
    busy = [state for state in states.values() if not state.waits]
    if busy:
        slowest = max(busy, key=lambda state: state.for_s)
        return Verdict(
            BUSY, f"the others wait for {slowest.name}, which {slowest.what}{_apart(states)}"
        )
    listed = "; ".join(str(states[rank]) for rank in sorted(states))
    return Verdict(
        STUCK,
        f"every rank waits for another, so none can go on: {listed}{_apart(states)}. The ranks do "
        "not do the same: look for what only some of them run",
    )


def _apart(states: Mapping[int, State]) -> str:
    steps = {state.step for state in states.values()}
    if len(steps) == 1:
        return ""
    told = ", ".join(f"global rank {rank} in step {states[rank].step}" for rank in sorted(states))
    return f" (they are in different steps: {told})"
