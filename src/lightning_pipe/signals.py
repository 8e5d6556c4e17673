"""What signals ask of a run (SIGTERM, Ctrl-C, SLURM's requeue), done by all ranks at one place.

A signal reaches one rank or all, each anywhere in its step. A checkpoint needs all ranks, so what
it asks for goes with the next meeting of the ranks and is done between two batches.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipe import _loops
from lightning_pipe.runtime.ranks import Ranks


class Signals:
    """The signals of one run, on this rank.

    Args:
        trainer: Its handlers are not registered yet.
        ranks: This rank.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks) -> None:
        self._talk = ranks.talk
        self._done = 0
        self._talk.requests = self._talk.heard = 0
        self._act, self._undo = _loops.postpone_signals(trainer, self._request)
        self._talk.obey = self._obey

    def undo(self) -> None:
        """Gives the handlers back."""
        self._talk.obey = None
        self._undo()

    def asked_for(self, error: BaseException) -> bool:
        """Whether all ranks raise this, since one of them was asked to."""
        return bool(
            (isinstance(error, SIGTERMException) and self._done & _loops.TERM)
            or (isinstance(error, KeyboardInterrupt) and self._done & _loops.INTERRUPT)
        )

    def _request(self, asked: int) -> bool:
        was_asked = bool(self._talk.requests & asked)
        self._talk.requests |= asked
        return was_asked

    def _obey(self, between_batches: bool) -> None:
        asked = self._talk.heard
        if not between_batches:  # nor is the next batch lost then
            asked &= ~_loops.REQUEUE
        if asked:
            self._talk.heard &= ~asked
            self._talk.requests &= ~asked
            self._done |= asked
            self._act(asked)
