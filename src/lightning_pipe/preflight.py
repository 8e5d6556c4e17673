"""New cuts and schedules are the same on all ranks, or nothing of them runs.

Every rank cuts the step by itself, from its own trace. Neighbours that do not agree about a
boundary would break their connection, or read one value as another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from lightning_pipe.errors import StageMismatchError
from lightning_pipe.home import CutStep
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.runtime import share
from lightning_pipe.runtime.meeting import meet
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.transfer import describe


class Preflight:
    """What was compared on this rank.

    Args:
        ranks: This rank.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: set[Schedule] = set()

    def check(self, schedule: Schedule, new: Sequence[CutStep]) -> None:
        """Compares a schedule and cuts, if they are new; ranks meet for new ones alone.

        Cuts that are only derived have been compared (`Cuts.get`), and are again when their step
        is found to be right.

        Args:
            schedule: Of the step that is about to run.
            new: Cuts that were made since the last step.

        Raises:
            StageMismatchError: Ranks differ; on all ranks.
        """
        traced = [cut for cut in new if cut.unproven is None]
        if self._ranks.num_positions == 1 or (schedule in self._known and not traced):
            return
        texts = (*told_of(traced), f"schedule of {_digest(schedule.to_csv())}")
        digest = int(_digest("\n".join(texts)), 16)
        if len(set(meet(self._ranks, "compares a new cut of its step", digest))) > 1:
            refuse_different(share.gather_objects(self._ranks, texts) or [])
        self._known.add(schedule)


def told_of(cuts: Iterable[CutStep]) -> tuple[str, ...]:
    """What two ranks have to agree on about some cuts, a line for each boundary."""
    lines: dict[str, None] = {}
    for number, cut in enumerate({id(cut): cut for cut in cuts}.values()):
        lines[f"cut {number}: stages on ranks {list(cut.placement)}"] = None
        for stage, boundary in enumerate(cut.cut.boundaries):
            values = ", ".join(
                f"{spec.name!r} {describe(spec)}{' with gradient' if spec.requires_grad else ''}"
                for spec in boundary
            )
            lines[f"cut {number}: stage {stage} gives stage {stage + 1} {values}"] = None
    return tuple(lines)


def refuse_different(told: Sequence[tuple[str, ...]]) -> None:
    """Raises if ranks do not say the same.

    Args:
        told: What each rank says.
    """
    for position, texts in enumerate(told):
        if texts == told[0]:
            continue
        pairs = zip((*told[0], "nothing more"), (*texts, "nothing more"), strict=False)
        one, other = next((a, b) for a, b in pairs if a != b)
        raise StageMismatchError(
            f"the ranks have cut the step differently: on rank 0 it is {one!r}, on rank {position} "
            f"{other!r}. They do not run the same model, batch or configuration"
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
