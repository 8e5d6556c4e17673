"""A file with every action of a rank: what began when, with which values, what was sent to whom.

A line is written before what it tells of, so the last line of each rank says where it is.
`planning.actionlog` merges the files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_pipe.planning.actionlog import file_of
from lightning_pipe.planning.ir import Action
from lightning_pipe.runtime.clock import clock_offset_s
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.progress import Wait
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.transfer import Moved, describe
from lightning_pipe.split.spec import ValueSpec


class ActionLog:
    """The file of one rank.

    Args:
        folder: Where the files of all ranks are; made if it is not there.
        ranks: This rank; all ranks open their logs together, to compare their clocks.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if ranks.global_rank == 0:  # what is left of another run may be of more ranks
            for file in folder.glob(file_of("*")):
                file.unlink()
        with at(ranks, "opens its log of actions"):
            ahead_s = clock_offset_s(ranks)
        self._file = (folder / file_of(ranks.global_rank)).open("w", buffering=1, encoding="utf-8")
        self._write(rank=ranks.position, global_rank=ranks.global_rank, ahead_s=ahead_s)

    def starts(self, step: int, action: Action, values: Sequence[Moved]) -> None:
        """An action begins."""
        self._write(step=step, what="starts", action=str(action), values=_texts(values))

    def ends(self, step: int, action: Action) -> None:
        """It has ended, or on a GPU, is queued."""
        self._write(step=step, what="ends", action=str(action))

    def waits(self, step: int, wait: Wait) -> None:
        """A wait for another rank begins."""
        self._write(step=step, what=str(wait))

    def moves(
        self,
        step: int,
        action: Action,
        is_sent: bool,
        position: int,
        values: Sequence[Moved],
    ) -> None:
        """Values are sent, or a receive of them is begun."""
        what = f"sends to rank {position} of" if is_sent else f"receives from rank {position} for"
        self._write(step=step, what=what, action=str(action), values=_texts(values))

    def close(self) -> None:
        """Nothing more comes."""
        self._file.close()

    def _write(self, **line: Any) -> None:
        self._file.write(json.dumps({"time_s": time.perf_counter(), **line}) + "\n")


def _texts(values: Sequence[Moved]) -> list[str]:
    return [
        "no gradient"
        if v is None
        else f"{v.name!r} {describe(v)}"
        if isinstance(v, ValueSpec)
        else describe(v)
        for v in values
    ]
