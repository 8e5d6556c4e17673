"""Why a step over stages is not that of one device: tried out on one device, in plain code.

The step is taken micro-batch by micro-batch, without any of the pipeline. If that differs from the
whole batch too, the step itself is no mean over rows, and what is changed until it is one is the
cause. If it does not, the cut is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_pipe.checking.numbers import Numbers, compare
from lightning_pipe.checking.piecewise import Piecewise
from lightning_pipe.checking.subject import Asked, Facts, one_device
from lightning_pipe.split.nest import first_size, items, leaves
from lightning_pipe.split.rows import REPLICATE, UNRULED, Rule, join_path, rule_for

_MOST_TRIES = 24


def cause(asked: Asked, facts: Facts, count: int, precision: str) -> str:
    """Why so many micro-batches do not give what the whole batch gives.

    Args:
        asked: What is checked.
        facts: Its batch.
        count: Micro-batches.
        precision: What the check runs in.

    Returns:
        What was found, and what to type.
    """
    return _Search(asked, facts, count, precision).result()


class _Search:
    """Runs the step in many ways."""

    def __init__(self, asked: Asked, facts: Facts, count: int, precision: str) -> None:
        self._asked, self._facts = asked, facts
        self._count, self._precision = count, precision
        self._rules: Mapping[str, Rule] = facts.given.get("split_batch") or {}
        self.changed: list[str] = []
        self.losses: list[float] = []
        self._whole = self._run(1, self._rules)

    def result(self) -> str:
        if self._count == 1:
            return _OF_THE_CUT
        try:
            apart = not self._is_whole(self._pieces(self._rules))
            pieces = self.losses
        except Exception as error:
            return self._wrong_split() or (
                f"the step fails on a micro-batch: {type(error).__name__}: {error}. If it needs "
                "all rows of the batch together, use num_microbatches=1"
            )
        if apart:
            return self._wrong_split() or self._no_mean(pieces)
        try:
            carried = self._pieces(self._rules, carries=True)
        except Exception as error:
            return self._state(f"fails with {type(error).__name__}: {error}")
        if not self._is_whole(carried):
            return self._state("gives other numbers")
        return _OF_THE_CUT

    def _state(self, what: str) -> str:
        names = ", ".join(self.changed[:6]) or "an attribute, a global or a buffer"
        return (
            f"the step keeps a state from one micro-batch to the next: it changes {names}, and "
            f"{what} if a micro-batch finds what the one before left there. Keep the state in the "
            "LightningModule (it starts each micro-batch as it was before the step), make it "
            "anew in each call, or use num_microbatches=1"
        )

    def _wrong_split(self) -> str | None:
        """A value of the batch that is split and should not be, or along another dimension."""
        for path, rule in self._other_rules():
            try:
                right = self._is_whole(self._pieces({**self._rules, path: rule}))
            except Exception:
                continue
            same = all(math.isclose(loss, self.losses[0], rel_tol=1e-5) for loss in self.losses)
            if right and not same:  # with all of what it reads whole, every loss is that of all
                return (
                    f"{path!r} of the batch is split as if its first dimension were rows, and it "
                    f"is not: with split_batch={{{path!r}: {rule!r}}} micro-batches give what the "
                    "whole batch gives. Give that to PipelineStrategy"
                )
        return None

    def _other_rules(self) -> Iterator[tuple[str, Rule]]:
        tries: list[tuple[str, Rule]] = []
        for path, value in _values(self._facts.batch, ""):
            if rule_for(path, self._rules) is not UNRULED:
                continue
            if any(first_size(leaf) == self._facts.rows for leaf in leaves(value)):
                tries.append((path, REPLICATE))
            if isinstance(value, Tensor):
                dims = [d for d in range(1, value.dim()) if value.shape[d] == self._facts.rows]
                tries += [(path, dim) for dim in dims]
        yield from tries[:_MOST_TRIES]

    def _no_mean(self, pieces: Sequence[float]) -> str:
        total = sum(pieces)
        whole = self._whole.loss
        if abs(total - whole) <= 1e-4 * max(abs(whole), 1e-12):
            return (
                f"the loss is a sum over rows and no mean: {whole:.6g} for the batch and as much "
                'for its micro-batches together. Return {"loss": loss, "loss_weight": "sum"}'
            )
        return (
            f"the loss depends on which rows are in a micro-batch together: {whole:.6g} for the "
            f"whole batch, {total / len(pieces):.6g} on average for its {len(pieces)} "
            "micro-batches, on one device too. If it compares rows with each other (contrastive "
            "losses, normalisation over the batch), use num_microbatches=1. If it divides by "
            "something else than rows (valid tokens, a mask), return "
            '{"loss": loss, "loss_weight": n} with the number that it divides by'
        )

    # ------------------------------------------------------------------ runs

    def _is_whole(self, numbers: Numbers) -> bool:
        return compare(self._whole, numbers, logged=False).is_close

    def _pieces(self, rules: Mapping[str, Rule], *, carries: bool = False) -> Numbers:
        return self._run(self._count, rules, carries=carries)

    def _run(self, count: int, rules: Mapping[str, Rule], *, carries: bool = False) -> Numbers:
        way = Piecewise(count, rules, carries=carries, calm=True)
        found = one_device(self._asked, self._facts.batch, self._precision, piecewise=way)
        self.changed, self.losses = way.changed, way.losses
        found.buffers = {}  # what a step counts, it counts for each micro-batch
        return found


_OF_THE_CUT = (
    "on one device the step gives the same for its micro-batches as for the batch, so it is what "
    "the stages do that differs. Please report it with the model; until then, keep the module with "
    "the largest error whole by split_points, or use fewer stages"
)


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every value in a batch that has a name, with its path."""
    if path:
        yield path, value
    for key, item in items(value) or ():
        yield from _values(item, join_path(path, key))
