"""One rank's failure reaches all, and a rank that waits says what for.

A rank that raises leaves the others in a receive that nobody will ever answer. So it puts its
traceback into the store through which the processes found each other, and a thread of every other
rank looks there twice a second, repeats it on its own stderr and ends the process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from lightning_pipe.errors import PeerError
from lightning_pipe.runtime._torch import default_store
from lightning_pipe.runtime.ranks import Ranks

_POLL_S = 0.5
_GRACE_S = 5.0  # for a rank to end by itself after another has failed
_LOST_GRACE_S = 30.0  # the same, after the process that keeps the store has gone
_ACK_S = 3.0  # for the others to read what a failing rank wrote, before it may take the store away


class Doing(Protocol):
    """What a rank is doing; `engine.Progress` is one."""

    @property
    def text(self) -> str: ...

    @property
    def since_s(self) -> float: ...


@contextmanager
def guard(
    ranks: Ranks, progress: Doing | None = None, *, report_after_s: float = 60.0
) -> Iterator[None]:
    """Ends all ranks when one raises within the body.

    The exception of the rank that failed first comes out as it was raised. In the others, what the
    failure causes comes out as a `PeerError`; one that still waits after five seconds is ended with
    exit code 1.

    Args:
        ranks: This rank; all ranks of the job enter together.
        progress: What this rank is doing, written to stderr when it stays the same for too long.
        report_after_s: How long that is.
    """
    if ranks.world_size == 1:
        yield
        return
    watch = _Watch(ranks, progress, report_after_s)
    watch.start()
    try:
        yield
    except BaseException as error:
        failure = watch.failed(error)
        if failure is None or not isinstance(error, PeerError):
            raise
        watch.repeat(failure)
        raise PeerError(
            f"global rank {failure.global_rank} failed first: {failure.summary}"
        ) from error
    finally:
        watch.stop()


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure as it is written into the store."""

    global_rank: int
    summary: str
    text: str


class _Watch:
    """The thread of one rank, and its part of the store."""

    def __init__(self, ranks: Ranks, progress: Doing | None, report_after_s: float) -> None:
        self._ranks = ranks
        self._progress = progress
        self._report_after_s = report_after_s
        self._store = default_store()
        rank = ranks.global_rank
        # Guards one after the other must not see each other's failures.
        self._prefix = f"lightning_pipe/{self._store.add(f'lightning_pipe/guards/{rank}', 1)}"
        self._stopped = threading.Event()
        self._guarded = threading.get_ident()
        self._repeated = False
        self._reported_since_s = 0.0
        self._thread = threading.Thread(target=self._run, name="pipeline watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=_GRACE_S)

    def failed(self, error: BaseException) -> _Failure | None:
        """Tells the others about a failure of this rank; returns another's if that was earlier."""
        earlier = self._earlier_failure(wait_s=2.0 if isinstance(error, PeerError) else 0.0)
        if earlier is not None:
            return earlier
        own = {
            "global_rank": self._ranks.global_rank,
            "summary": "".join(traceback.format_exception_only(error)).strip(),
            "text": "".join(traceback.format_exception(error)),
        }
        try:
            written = self._store.compare_set(f"{self._prefix}/failure", "", json.dumps(own))
            failure = _Failure(**json.loads(written))
            if failure.global_rank != self._ranks.global_rank:
                return failure
            self._await_readers()
        except RuntimeError:  # the store is gone, and with it who could read
            return None
        return None

    def repeat(self, failure: _Failure) -> None:
        """Shows another rank's failure on this rank's stderr, once."""
        if not self._repeated:
            self._repeated = True
            sys.stderr.write(f"\nglobal rank {failure.global_rank} failed:\n{failure.text}\n")
            sys.stderr.flush()

    def _run(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                failure = self._read_failure()
            except RuntimeError:
                self._end_after(_LOST_GRACE_S, "the process that keeps the store has ended")
                return
            if failure is not None:
                if failure.global_rank != self._ranks.global_rank:
                    self.repeat(failure)
                    self._end_after(_GRACE_S, f"global rank {failure.global_rank} failed")
                return
            self._report_progress()

    def _end_after(self, grace_s: float, reason: str) -> None:
        if self._stopped.wait(grace_s):
            return
        doing = f" while {self._progress.text}" if self._progress is not None else ""
        sys.stderr.write(f"{self._ranks}: {reason}; ended{doing}\n")
        sys.stderr.flush()
        os._exit(1)

    def _report_progress(self) -> None:
        if self._progress is None:
            return
        since_s = self._progress.since_s
        waited_s = time.monotonic() - since_s
        if waited_s > self._report_after_s and since_s != self._reported_since_s:
            self._reported_since_s = since_s
            sys.stderr.write(
                f"{self._ranks}: {self._progress.text}, for {waited_s:.0f} s now, in\n"
                f"{self._stack()}"
            )
            sys.stderr.flush()

    def _stack(self) -> str:
        """Where the guarded code is, for people."""
        frame = sys._current_frames().get(self._guarded)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _earlier_failure(self, wait_s: float) -> _Failure | None:
        """A connection can break a moment before the reason is in the store."""
        end_s = time.monotonic() + wait_s
        while True:
            try:
                failure = self._read_failure()
            except RuntimeError:
                return None
            if failure is not None or time.monotonic() >= end_s:
                return failure
            time.sleep(0.05)

    def _read_failure(self) -> _Failure | None:
        key = f"{self._prefix}/failure"
        if not self._store.check([key]):
            return None
        failure = _Failure(**json.loads(self._store.get(key)))
        if failure.global_rank != self._ranks.global_rank:
            self._store.set(f"{self._prefix}/read/{self._ranks.global_rank}", "")
        return failure

    def _await_readers(self) -> None:
        others = [
            f"{self._prefix}/read/{rank}"
            for rank in range(self._ranks.world_size)
            if rank != self._ranks.global_rank
        ]
        end_s = time.monotonic() + _ACK_S
        while not self._store.check(others) and time.monotonic() < end_s:
            time.sleep(0.05)
