"""What the ranks of a job tell each other beside their work: through the store by which their
processes found each other, which needs nobody to answer.

One `Board` is for one run; runs one after the other do not see each other's notes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_pipe.runtime._torch import default_store
from lightning_pipe.runtime.alive import Identity
from lightning_pipe.runtime.verdict import State, Verdict

_ACK_S = 3.0  # for the others to read what a failing rank wrote, before it may take the store away
_OVER_S = 0.5  # between two looks whether the run is over


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run ends.

    Attributes:
        global_rank: The rank that failed.
        summary: What is raised on the others, in a line or two.
        text: What they print: a traceback, or a sentence.
        is_told: Whether that rank failed without a word, so that others tell of it.
        grace_s: For ranks to end by themselves.
    """

    global_rank: int
    summary: str
    text: str
    is_told: bool = False
    grace_s: float = 5.0


class Board:
    """The notes of one run, seen by one rank.

    Every method may raise a `RuntimeError`: the process that keeps the store has ended.

    Args:
        global_rank: This rank.
        world_size: Ranks of the job.
    """

    def __init__(self, global_rank: int, world_size: int) -> None:
        self._rank = global_rank
        self._world_size = world_size
        self._store = default_store()
        guards = self._store.add(f"lightning_pipe/guards/{global_rank}", 1)
        self._prefix = f"lightning_pipe/{guards}"
        self._who: dict[int, Identity] = {}
        self._set("who", global_rank, asdict(Identity.own()))

    @property
    def others(self) -> list[int]:
        """The other global ranks."""
        return [rank for rank in range(self._world_size) if rank != self._rank]

    # ------------------------------------------------------------------ who is there

    def identity(self, rank: int) -> Identity | None:
        """The process of a rank; None before it has come."""
        if rank not in self._who:
            found = self._get("who", rank)
            if found is None:
                return None
            self._who[rank] = Identity(**found)
        return self._who[rank]

    def leave(self) -> None:
        """This rank's run is over."""
        self._set("left", self._rank, True)

    def has_left(self, rank: int) -> bool:
        """Whether another's is."""
        return self._get("left", rank) is not None

    def does(self, text: str) -> None:
        """Notes what this rank does, for when it can no longer be asked."""
        self._set("does", self._rank, text)

    def last_seen(self, rank: int) -> str:
        """What a rank did when it last told of it."""
        found = self._get("does", rank)
        return "" if found is None else f"It was last seen where it {found}"

    def find_dead(self) -> list[int]:
        """Ranks whose processes have ended within their run, as far as this machine knows."""
        found = []
        for rank in self.others:
            identity = self.identity(rank)
            if identity is not None and identity.is_dead() and not self.has_left(rank):
                found.append(rank)
        return found

    def known_dead(self) -> list[int]:
        """Ranks whose processes have ended, of those that are known; asks the store for nothing."""
        return [rank for rank, identity in sorted(self._who.items()) if identity.is_dead()]

    # ------------------------------------------------------------------ failures

    def fail(self, failure: Failure) -> Failure:
        """Tells of a failure; returns the one that came first."""
        text = json.dumps(asdict(failure))
        written = self._store.compare_set(f"{self._prefix}/failure", "", text)
        return Failure(**json.loads(written))

    def failure(self) -> Failure | None:
        """The failure that came first, if there is one; whoever told of it sees that it is read."""
        key = f"{self._prefix}/failure"
        if not self._store.check([key]):
            return None
        self._set("read", self._rank, True)
        return Failure(**json.loads(self._store.get(key)))

    @property
    def is_over(self) -> bool:
        """Whether a rank has failed or died: nobody needs to be asked any more."""
        return bool(self._store.check([f"{self._prefix}/failure"])) or bool(self.find_dead())

    def has_read(self, rank: int) -> bool:
        """Whether a rank knows of the failure."""
        return self._get("read", rank) is not None

    def await_readers(self, but: int = -1) -> None:
        """Waits a moment until the others know of the failure; one of them may be gone."""
        end_s = time.monotonic() + _ACK_S
        waited = [rank for rank in self.others if rank != but]
        while not all(map(self.has_read, waited)) and time.monotonic() < end_s:
            time.sleep(0.05)

    # ------------------------------------------------------------------ alarms

    def alarm(self, number: int) -> int:
        """Asks all ranks what they do; returns the rank that asked first."""
        key = f"{self._prefix}/alarm/{number}"
        return int(self._store.compare_set(key, "", str(self._rank)))

    def is_alarmed(self, number: int) -> bool:
        """Whether anyone has asked for the so-manieth time."""
        return bool(self._store.check([f"{self._prefix}/alarm/{number}"]))

    def answer(self, number: int, state: State) -> None:
        """Says what this rank does."""
        self._set(f"state/{number}", self._rank, asdict(state))

    def answers(self, number: int, patience_s: float) -> tuple[dict[int, State], dict[int, str]]:
        """What the ranks say, and what is known of those that say nothing for so long; or until a
        rank has failed or died."""
        states: dict[int, State] = {}
        missing = set(range(self._world_size))
        for _ in self._while_it_lasts(patience_s):
            for rank in sorted(missing):
                found = self._get(f"state/{number}", rank)
                if found is not None:
                    states[rank] = State(**found)
                elif self.has_left(rank):
                    states[rank] = State(f"global rank {rank}", "has left", has_left=True)
            missing -= states.keys()
            if not missing:
                break
        return states, {rank: self.last_seen(rank) for rank in missing}

    def decide(self, number: int, verdict: Verdict) -> None:
        """Tells all what the cause is."""
        self._set("verdict", number, asdict(verdict))

    def verdict(self, number: int, patience_s: float) -> Verdict | None:
        """What the cause is, once somebody says so; None if nobody does, or a rank has failed or
        died before."""
        for _ in self._while_it_lasts(patience_s):
            found = self._get("verdict", number)
            if found is not None:
                return Verdict(**found)
        return None

    def _while_it_lasts(self, patience_s: float) -> Iterator[None]:
        """Looks again and again, for some time, unless the run is over."""
        end_s = time.monotonic() + patience_s
        looked_s = time.monotonic()
        while time.monotonic() < end_s:
            yield
            time.sleep(0.05)
            if time.monotonic() - looked_s > _OVER_S:
                looked_s = time.monotonic()
                if self.is_over:
                    return

    # ------------------------------------------------------------------ the end

    def reap(self, ranks: Iterable[int]) -> list[int]:
        """Ends processes of this machine that could not be told that the run is over."""
        ended = []
        for rank in ranks:
            identity = self.identity(rank)
            if identity is None or not identity.is_here or self.has_left(rank):
                continue
            if not identity.is_dead():
                identity.kill()
                ended.append(rank)
        return ended

    def _set(self, kind: str, number: int, value: Any) -> None:
        self._store.set(f"{self._prefix}/{kind}/{number}", json.dumps(value))

    def _get(self, kind: str, number: int) -> Any:
        key = f"{self._prefix}/{kind}/{number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
