"""What random programs have found: each fault as the smallest program that shows it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from tests.fuzz.programs import Example
from tests.fuzz.trainings import EQUAL, Outcome, judge

from lightning_pipe.split.shapes import Family, Sample

PLAIN = Example(
    seed=1, parts=(), frozen=(), ops=(), home="module", loss="mse", batch="dict", rows=4, short=4,
    length=0, extras=False, ranks=2, chunks=1, microbatches=2, schedule="auto", recompute="none",
    balance="uniform", accumulate=1, clip=None, optimizer="adamw", validates=False, counts=False,
    alias=False,
)  # fmt: skip
FOUND = {
    # its gradient came back as zeros, and AdamW decayed the weights before it
    "a value crosses to a stage that makes nothing of it for the loss": replace(
        PLAIN,
        parts=("residual", "two", "residual"),
        ops=(("call", 0, 0), ("two", 1, 1), ("call", 2, 0)),
    ),
    # it is zero, which is not none; a shorter batch is traced with units that do not run
    "the gradient of a weight is zero": replace(
        PLAIN,
        parts=("nested", "recurrent"),
        ops=(("call", 0, 0), ("call", 1, 1)),
        rows=6,
        short=5,
        microbatches=1,
    ),
    # torch refuses to clip nothing
    "a rank has no gradients to clip by value": replace(
        PLAIN,
        parts=("residual", "residual"),
        frozen=(1,),
        ops=(("call", 0, 0), ("call", 1, 1)),
        clip=("value", 0.01),
    ),
    # it was a unit by its second name, which nothing else knows: its counter stood still
    "a norm in a container that two modules share": replace(
        PLAIN,
        home="halves",
        parts=("batchnorm", "linear", "residual"),
        ops=(("call", 0, 0), ("call", 1, 1), ("call", 2, 2), ("call", 1, 3)),
    ),
    # and its checkpointed call could not be run again: KeyError
    "a checkpointed call of a module that two modules share": replace(
        PLAIN,
        home="halves",
        parts=("residual", "residual", "linear"),
        ops=(("call", 0, 0), ("again", 1, 1), ("call", 2, 2), ("again", 1, 3)),
    ),
    # the copy that is sent, since the code writes the value, was taken for the code's own
    "a value that is written after its unit, on a cut that is derived": replace(
        PLAIN,
        parts=("residual", "linear", "residual"),
        ops=(("noise", 0), ("call", 0, 1), ("call", 1, 1), ("inplace", 1, 2), ("call", 2, 4)),
        rows=8,
        short=6,
    ),
    # ranks without its weights saw it change, so the third size was traced by some ranks alone
    "micro-batches of three sizes through a recurrent module": replace(
        PLAIN,
        parts=("linear", "recurrent"),
        ops=(("call", 0, 0), ("call", 1, 1)),
        rows=5,
        short=2,
    ),
    # the loss of the whole batch, which decides once, was shown: its gradients were not taken
    "values decide after the last unit, for each micro-batch": replace(
        PLAIN,
        ranks=1,
        microbatches=4,
        parts=("residual", "residual"),
        ops=(("call", 0, 0), ("peek", 1, 1)),
    ),
    # its gradient is zero, which is not none: momentum goes on
    "only a micro-batch whose loss counts nothing uses a weight": replace(
        PLAIN,
        microbatches=4,
        parts=("residual", "residual"),
        ops=(("call", 0, 0), ("coin", 1, 1)),
        loss="weighted",
        optimizer="sgd",
    ),
    # all are weights that an earlier rank has, too; it rounded the norm of all to single precision
    "a rank counts none of the gradients that it clips by their norm": replace(
        PLAIN,
        seed=41500,
        parts=("encoder", "nested"),
        ops=(
            ("call", 0, 0),
            ("call", 1, 0),
            ("call", 0, 2),
            ("call", 0, 0),
            ("call", 1, 4),
            ("split", 5),
            ("mul", 6, 2),
        ),
        loss="dict",
        batch="record",
        rows=8,
        short=8,
        microbatches=4,
        schedule="zero_bubble",
        recompute="auto",
        balance="auto",
        clip=("norm", 0.05),
        validates=True,
    ),
}
THREE_SIZES = replace(
    PLAIN, parts=("linear", "linear"), ops=(("call", 0, 0), ("call", 1, 1)), rows=5, short=2
)


def _judged(ranks: int) -> dict[str, Outcome]:
    """Runs in every rank."""
    return {name: judge(example) for name, example in FOUND.items() if example.ranks == ranks}


@pytest.mark.parametrize("ranks", sorted({example.ranks for example in FOUND.values()}))
def test_faults_that_were_found_stay_away(ranks: int, pool: Callable[..., list[Any]]) -> None:
    for outcomes in pool(ranks, _judged, ranks, timeout=120):
        wrong = {name: outcome.text for name, outcome in outcomes.items() if outcome.kind != EQUAL}
        assert not wrong


def _nothing(found: Sample | None) -> Sample | None:
    return None


def _something_else(found: Sample | None) -> Sample | None:
    """A row more than there is, in every value."""
    if found is None or found.trace.derived is None:
        return found
    metas = {
        key: replace(meta, shape=(meta.shape[0] + 1, *meta.shape[1:])) if meta.shape else meta
        for key, meta in found.trace.derived.items()
    }
    return replace(found, trace=replace(found.trace, derived=metas))


def _judged_where_one_derives(change: Callable[[Sample | None], Sample | None]) -> Any:
    """Runs in every rank; the last one derives other shapes."""
    derived: list[Sample | None] = []
    own = Family.derive

    def derive(family: Family, sizes: tuple[int, ...]) -> Sample | None:
        derived.append(own(family, sizes))
        return change(derived[-1]) if dist.get_rank() else derived[-1]

    with patch.object(Family, "derive", derive):
        outcome = judge(THREE_SIZES)
    return outcome, sum(sample is not None for sample in derived)


@pytest.mark.parametrize("change", [_nothing, _something_else])
def test_shapes_that_not_all_ranks_derive_are_traced(
    pool: Callable[..., list[Any]], change: Callable[[Sample | None], Sample | None]
) -> None:
    for outcome, num_derived in pool(2, _judged_where_one_derives, change, timeout=60):
        assert num_derived == 1
        assert outcome.kind == EQUAL, outcome.text
