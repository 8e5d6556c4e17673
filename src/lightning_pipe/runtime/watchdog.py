"""One rank's failure reaches all, and a rank that waits for too long finds out why.

A rank that raises leaves the others in a receive that nobody will ever answer. So it puts its
traceback on a board that all can read, and a thread of every other rank looks there twice a second,
repeats it on its own stderr and ends the process. The same thread looks whether the processes of
the other ranks still live, and asks all ranks what they do when its own has waited for too long.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Protocol

from lightning_pipe.errors import PeerError
from lightning_pipe.runtime.board import Board, Failure
from lightning_pipe.runtime.patience import Patience
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.verdict import MOVED, State, judge
from lightning_pipe.runtime.where import line_of, users_line

_POLL_S = 0.5
_LOOK_S = 1.0  # between two looks at the other processes
_STOP_S = 5.0  # for the thread to end
_HANG_GRACE_S = 1.0  # for the others to say what they have to, before all end
_LOST_GRACE_S = 10.0  # the same, after the process that keeps the store has gone
_CAUSE_S = 2.0  # for the cause of a broken connection to be known
_REAP_S = 4.0  # for a rank to hear that the run is over


class Doing(Protocol):
    """What a rank is doing."""

    @property
    def text(self) -> str: ...

    @property
    def since_s(self) -> float: ...

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""

    @property
    def step(self) -> int: ...

    @property
    def usual_s(self) -> float:
        """The usual length of a step."""


@contextmanager
def guard(
    ranks: Ranks, progress: Doing | None = None, patience: Patience | None = None
) -> Iterator[None]:
    """Ends all ranks when one raises, dies or hangs within the body.

    The exception of the rank that failed first comes out as it was raised. In the others, what the
    failure causes comes out as a `PeerError`; one that still waits after five seconds is ended with
    exit code 1.

    Args:
        ranks: This rank; all ranks of the job enter together.
        progress: What this rank is doing.
        patience: How long it may wait for another.
    """
    if ranks.world_size == 1:
        yield
        return
    watch = _Watch(ranks, progress, patience or Patience())
    watch.start()
    try:
        yield
    except BaseException as error:
        failure = watch.failed(error)
        if failure is None or not isinstance(error, PeerError):
            raise
        watch.repeat(failure)
        raise PeerError(failure.summary) from error
    finally:
        watch.stop()


class _Watch:
    """The thread of one rank."""

    def __init__(self, ranks: Ranks, progress: Doing | None, patience: Patience) -> None:
        self._ranks = ranks
        self._progress = progress
        self._patience = patience
        self._board = Board(ranks.global_rank, ranks.world_size)
        self._stopped = threading.Event()
        self._guarded = threading.get_ident()
        self._repeated = False
        self._looked_s = time.monotonic()
        self._said = ""
        self._num_alarms = 0
        self._alarmed = (0.0, 0)  # since when this rank waits, and how often all were asked then
        self._thread = threading.Thread(target=self._run, name="pipeline watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=_STOP_S)
        try:
            self._board.leave()
        except RuntimeError:  # the store is gone, and with it who could read
            return

    # ------------------------------------------------------------------ in the guarded thread

    def failed(self, error: BaseException) -> Failure | None:
        """Tells the others about a failure of this rank; returns another's if that was earlier."""
        rank = self._ranks.global_rank
        try:
            if isinstance(error, PeerError):
                earlier = self._cause(_CAUSE_S)
                if earlier is not None:
                    return earlier
            summary = "".join(traceback.format_exception_only(error)).strip()
            own = Failure(
                rank,
                f"global rank {rank} failed first: {summary}",
                "".join(traceback.format_exception(error)),
            )
            failure = self._board.fail(own)
            if failure.global_rank != rank:
                return failure
            self._board.await_readers()
        except RuntimeError:  # the store is gone
            return self._store_keeper() if isinstance(error, PeerError) else None
        return None

    def _store_keeper(self) -> Failure | None:
        """The rank that has died and taken the store with it, as far as this machine knows."""
        end_s = time.monotonic() + _CAUSE_S
        while time.monotonic() < end_s:
            for rank in self._board.known_dead():
                text = self._of_the_dead(rank)
                return Failure(rank, text, text, is_told=True)
            time.sleep(0.05)
        return None

    def _cause(self, wait_s: float) -> Failure | None:
        """A connection can break a moment before the reason is known."""
        end_s = time.monotonic() + wait_s
        while True:
            failure = self._board.failure() or self._tell_of_the_dead()
            if failure is not None or time.monotonic() >= end_s:
                return failure
            time.sleep(0.05)

    def repeat(self, failure: Failure) -> None:
        """Shows another rank's failure on this rank's stderr, once."""
        if not self._repeated:
            self._repeated = True
            said = "" if failure.is_told else f"global rank {failure.global_rank} failed:\n"
            _write(f"\n{said}{failure.text}")

    # ------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                if self._sees_failure():
                    return
                self._look_around()
                self._answer_alarms()
                self._raise_alarm()
            except RuntimeError:
                self._end_after(_LOST_GRACE_S, self._lost())
                return

    def _sees_failure(self) -> bool:
        failure = self._board.failure()
        if failure is None:
            return False
        if failure.is_told or failure.global_rank != self._ranks.global_rank:
            self.repeat(failure)
            told = (
                "the run is over"
                if failure.is_told
                else f"global rank {failure.global_rank} failed"
            )
            self._end_after(failure.grace_s, told)
        return True

    def _look_around(self) -> None:
        """Notes what this rank does, and looks whether the others live."""
        if time.monotonic() - self._looked_s < _LOOK_S:
            return
        self._looked_s = time.monotonic()
        text = self._text()
        if text != self._said:
            self._said = text
            self._board.does(text)
        self._tell_of_the_dead()

    def _tell_of_the_dead(self) -> Failure | None:
        dead = self._board.find_dead()
        failure = self._board.failure() if dead else None  # which it may have told of at its end
        if not dead or failure is not None:
            return failure
        text = f"{self._of_the_dead(dead[0])} {self._board.last_seen(dead[0])}".rstrip()
        return self._board.fail(Failure(dead[0], text, text, is_told=True))

    def _of_the_dead(self, rank: int) -> str:
        identity = self._board.identity(rank)
        return (
            f"global rank {rank} has died: its process{f' {identity.pid}' if identity else ''} "
            "ended without a word, as by SIGKILL, a crash of native code, or the system where "
            "memory runs out (its log says so)."
        )

    def _lost(self) -> str:
        """Why the store may be gone."""
        dead = self._board.known_dead()
        return self._of_the_dead(dead[0]) if dead else "the process that keeps the store has ended"

    def _end_after(self, grace_s: float, reason: str) -> None:
        if self._stopped.wait(grace_s):
            return
        _write(f"{self._ranks}: {reason}; ended while it {self._text()}")
        self._reap()
        os._exit(1)

    def _reap(self) -> None:
        """Ends ranks of this machine that do not even hear that the run is over."""
        try:
            end_s = time.monotonic() + _REAP_S
            deaf = self._board.others
            while deaf and time.monotonic() < end_s:
                dead = self._board.known_dead()
                deaf = [r for r in deaf if r not in dead and not self._board.has_read(r)]
                time.sleep(0.1)
            for rank in self._board.reap(deaf):
                _write(f"{self._ranks}: global rank {rank} did not answer and was ended too")
        except RuntimeError:
            return

    # ------------------------------------------------------------------ alarms

    def _raise_alarm(self) -> None:
        """Asks all ranks what they do if this one has waited for too long."""
        doing = self._progress
        if doing is None or not doing.waits:
            return
        since_s, usual_s = doing.since_s, doing.usual_s
        waited_s = time.monotonic() - since_s
        if waited_s < self._patience.moment_s(self._looks(since_s), usual_s):
            return
        self._alarmed = since_s, self._looks(since_s) + 1
        number = self._num_alarms
        if self._board.alarm(number) != self._ranks.global_rank:
            return  # another asked first
        self._num_alarms += 1
        self._say(number)
        states, silent = self._board.answers(number, self._patience.answer_s)
        if silent and self._board.is_over:
            return  # which is told by itself, and first
        verdict = judge(self._ranks.global_rank, states, silent)
        ends = self._patience.ends(verdict.kind, waited_s, usual_s)
        self._board.decide(number, replace(verdict, ends=ends))
        text = f"no progress for {waited_s:.0f} s: {verdict.text}"
        if not ends:
            _write(text)
            return
        blamed = next(iter(silent), self._ranks.global_rank)
        # none of them will get anywhere, so none is waited for
        self._board.fail(Failure(blamed, text, text, is_told=True, grace_s=_HANG_GRACE_S))

    def _looks(self, since_s: float) -> int:
        """How often all ranks were asked during this wait."""
        return self._alarmed[1] if self._alarmed[0] == since_s else 0

    def _answer_alarms(self) -> None:
        """Says what this rank does if another has asked."""
        number = self._num_alarms
        if not self._board.is_alarmed(number):
            return
        self._num_alarms += 1
        if self._progress is not None:
            since_s = self._progress.since_s
            self._alarmed = since_s, self._looks(since_s) + 1
        self._say(number)
        verdict = self._board.verdict(number, self._patience.answer_s + 1)
        if verdict is not None and verdict.kind != MOVED and not verdict.ends:
            _write(f"no progress: {verdict.text}")

    def _say(self, number: int) -> None:
        frame = sys._current_frames().get(self._guarded)
        state = self._state(frame)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _write(f"{state}, in\n{stack}")
        self._board.answer(number, state)

    def _state(self, frame: FrameType | None) -> State:
        doing = self._progress
        line = users_line(frame) or (line_of(frame) if frame is not None else "")
        if doing is None:
            return State(str(self._ranks), "runs", line=line)
        return State(
            str(self._ranks),
            doing.text,
            time.monotonic() - doing.since_s,
            doing.waits,
            doing.step,
            line,
        )

    def _text(self) -> str:
        return "runs" if self._progress is None else self._progress.text


def _write(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
