"""What a rank is doing, since when, and what it waits for: written by the engine, read by the
watchdog's thread.

Texts are made when they are read: an action only leaves a few references here.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pipe.planning.ir import Action
from lightning_pipe.runtime.transfer import describe
from lightning_pipe.split.spec import ValueSpec

_KEPT = 20  # lengths of steps, for their median
_SHOWN = 3  # values that a text names

OUTSIDE = "is between steps"


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for another rank.

    Attributes:
        position: That rank.
        stage: The stage there whose values are wanted; None while it has to take what it was sent.
        action: What runs once they are there.
        values: What they look like.
    """

    position: int
    stage: int | None = None
    action: Action | None = None
    values: Sequence[ValueSpec] = ()

    def __str__(self) -> str:
        if self.stage is None or self.action is None:
            return f"waits for rank {self.position} to take what it was sent"
        is_gradient = self.stage > self.action.stage
        values = [spec for spec in self.values if spec.requires_grad or not is_gradient]
        shown = ", ".join(f"{spec.name!r} {describe(spec)}" for spec in values[:_SHOWN])
        if len(values) > _SHOWN:
            shown += f" and {len(values) - _SHOWN} more"
        return (
            f"waits for {'the gradient of ' if is_gradient else ''}{shown} of micro-batch "
            f"{self.action.microbatch} from stage {self.stage} on rank {self.position}, to run "
            f"{self.action}"
        )


@dataclass(slots=True)
class Progress:
    """What a rank is doing now.

    Attributes:
        doing: What it does before the first step.
        action: The action that ran last, or runs.
        since_s: Since when, by `time.monotonic`.
        step: Runs of the engine until now, of training and of evaluation.
    """

    doing: Action | Wait | str = OUTSIDE
    action: Action | None = None
    since_s: float = field(default_factory=time.monotonic)
    step: int = 0
    _started_s: float = 0.0
    _lengths_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def text(self) -> str:
        """What the rank does, for people."""
        doing = self.doing
        return f"runs {doing}" if isinstance(doing, Action) else str(doing)

    @property
    def waits(self) -> bool:
        """Whether it waits for another rank."""
        return isinstance(self.doing, Wait)

    @property
    def usual_s(self) -> float:
        """The median length of the last steps; 0 before the first."""
        return statistics.median(list(self._lengths_s) or [0.0])

    def begins(self) -> None:
        """A step begins."""
        self.step += 1
        self._started_s = time.monotonic()
        self._note("begins a step")

    def ends(self) -> None:
        """The step has ended."""
        self._lengths_s.append(time.monotonic() - self._started_s)
        self._note(OUTSIDE)

    def runs(self, action: Action) -> None:
        """An action begins."""
        self.action = action
        self._note(action)

    def awaits(self, wait: Wait) -> None:
        """A wait for another rank begins; it ends with the next note."""
        self._note(wait)

    def goes_on(self) -> None:
        """A wait is over, between two actions."""
        self._note("is between two actions")

    def _note(self, doing: Action | Wait | str) -> None:
        self.since_s = time.monotonic()
        self.doing = doing
