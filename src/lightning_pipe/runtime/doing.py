"""What this rank is doing, for the watchdog."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pipe.runtime.progress import Progress
from lightning_pipe.runtime.ranks import Ranks, Talk


class Doing:
    """What this rank is doing, said by whoever knows; the engine comes later than the watchdog.

    Args:
        ranks: This rank.
        progress: What the engine is doing, once there is one.
    """

    def __init__(self, ranks: Ranks, progress: Callable[[], Progress | None]) -> None:
        self._ranks = ranks
        self._found = progress
        self._start = Progress("sets up")

    @property
    def text(self) -> str:
        """As the end of "rank 0 ..."."""
        talk = self._talk
        return f"waits for the others where it {talk.place}" if talk else self._progress.text

    @property
    def since_s(self) -> float:
        """Since when."""
        talk = self._talk
        return talk.since_s if talk else self._progress.since_s

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        return self._talk is not None or self._progress.waits

    @property
    def step(self) -> int:
        """Steps that were run."""
        return self._progress.step

    @property
    def usual_s(self) -> float:
        """Seconds that a step takes."""
        return self._progress.usual_s

    @property
    def _progress(self) -> Progress:
        return self._found() or self._start

    @property
    def _talk(self) -> Talk | None:
        """Where this rank waits for all others, if it does."""
        lines = (self._ranks, *self._ranks.others)
        return next((met.talk for met in lines if met.talk.place), None)


__all__ = ["Doing"]
