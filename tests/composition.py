"""What runs together with what: the data of `docs/composition.md` and of `test_composition.py`.

A new feature is a line in `FEATURES`. A pair of features has its place in a combination that runs
(`COMBINATIONS`), in a test that there is (`SHOWN`), among what is refused (`REFUSED`) or among what
cannot meet (`APART`); without one it is shown as open. `python -m tests.composition` writes the page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "composition.md"

FEATURES: dict[str, str] = {
    "copies": "copies (`data_parallel_size=2`)",
    "parted": "sharded copies (`data_parallel_sharding`)",
    "chunks": "chunks (`virtual_stages=2`)",
    "split": "split backward (`zero_bubble`, `zbv`)",
    "accumulation": "`accumulate_grad_batches`",
    "clipping": "clipping",
    "tied": "tied weights",
    "weighted": "`loss_weight`",
    "bf16-mixed": "bf16-mixed",
    "16-mixed": "16-mixed, its loss scale",
    "half": "bf16-true, 16-true",
    "again": "`activation_checkpointing`",
    "compile": "`compile`",
    "deferred": '`batchnorm="deferred"`',
    "synced": "`sync_batchnorm`",
    "stored": "sharded checkpoints",
    "shared": "shared tensors (`tensor_parallel_size=2`)",
}
Pair = frozenset[str]


@dataclass(frozen=True)
class Combination:
    """Features that run together in one training; see `test_composition.py`.

    Attributes:
        features: Their keys; every pair of them is exact.
        model: Name of a model there.
        strategy: Arguments of the strategy, beside the sizes.
        trainer: Arguments of the Trainer.
        tolerance: How far from one device it may be, as a part of what training changes.
    """

    features: frozenset[str]
    model: str
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-9


_COMMON = {"copies", "chunks", "split", "accumulation", "clipping", "again", "stored"}
_STRATEGY = {
    "schedule": "zbv",
    "virtual_stages": 2,
    "num_microbatches": 4,
    "activation_checkpointing": "all",
    "save_distributed_checkpoint": True,
}
_TRAINER = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}


def _tied(precision: str, *more: str, tolerance: float = 1e-9) -> Combination:
    return Combination(
        frozenset({*_COMMON, "tied", "weighted", *more}),
        "tied",
        {**_STRATEGY, "compile": {"backend": "aot_eager"}} if "compile" in more else _STRATEGY,
        {**_TRAINER, "precision": precision},
        tolerance,
    )


def _norms(precision: str, *more: str, tolerance: float = 1e-9) -> Combination:
    given = _tied(precision, *more)
    return Combination(
        given.features - {"tied", "weighted"} | {"deferred", "synced"},
        "norms",
        {**given.strategy, "batchnorm": "deferred"},
        {**given.trainer, "sync_batchnorm": True},
        tolerance,
    )


def _in_parts(given: Combination) -> Combination:
    return replace(
        given,
        features=given.features | {"parted"},
        strategy={**given.strategy, "data_parallel_sharding": True},
    )


#: each trains two steps on 2 ranks x 2 copies
COMBINATIONS: dict[str, Combination] = {
    "64-true": _tied("64-true"),
    "64-true, compiled": _tied("64-true", "compile"),
    "bf16-mixed": _tied("bf16-mixed", "compile", "bf16-mixed", tolerance=5e-3),
    "16-mixed": _tied("16-mixed", "compile", "16-mixed", tolerance=1e-3),
    "16-true": _tied("16-true", "compile", "half", tolerance=5e-3),
    "batch norms": _norms("64-true"),
    "batch norms, compiled": _norms("64-true", "compile"),
    "batch norms, bf16-mixed": _norms("bf16-mixed", "compile", "bf16-mixed", tolerance=1e-2),
    "batch norms, 16-mixed": _norms("16-mixed", "compile", "16-mixed", tolerance=1e-3),
    "batch norms, bf16-true": _norms("bf16-true", "compile", "half", tolerance=4e-2),
    "in parts, compiled": _in_parts(_tied("64-true", "compile")),
    "in parts, 16-mixed": _in_parts(_tied("16-mixed", "compile", "16-mixed", tolerance=1e-3)),
    "in parts, batch norms": _in_parts(_norms("64-true")),
    "in parts, batch norms, bf16-mixed": _in_parts(
        _norms("bf16-mixed", "compile", "bf16-mixed", tolerance=1e-2)
    ),
    "in parts, batch norms, bf16-true": _in_parts(
        _norms("bf16-true", "compile", "half", tolerance=4e-2)
    ),
}

#: tests of other files, and what they run together; a pair is shown by the first place it is in
SHOWN: list[tuple[str, frozenset[str]]] = [
    (
        "test_data_parallel.py::test_two_copies_of_two_ranks_train_as_one_device",
        frozenset({"copies", "accumulation", "clipping", "tied"}),
    ),
    (
        "test_precision.py::test_two_copies_of_two_ranks_train_as_one_device",
        frozenset({"copies", "split", "again", "bf16-mixed"}),
    ),
    (
        "test_precision.py::test_two_copies_of_two_ranks_train_as_one_device",
        frozenset({"copies", "split", "again", "16-mixed"}),
    ),
    (
        "test_precision.py::test_two_copies_of_two_ranks_train_as_one_device",
        frozenset({"copies", "split", "again", "half"}),
    ),
    (
        "test_sync_batchnorm.py::test_two_copies_of_two_ranks_normalise_as_one_device",
        frozenset({"copies", "synced", "deferred"}),
    ),
    (
        "test_sync_batchnorm.py::test_two_copies_of_two_ranks_normalise_as_one_device",
        frozenset({"copies", "synced", "chunks", "split"}),
    ),
    (
        "test_sync_batchnorm.py::test_two_copies_of_two_ranks_normalise_as_one_device",
        frozenset({"copies", "synced", "again"}),
    ),
    (
        "test_sync_batchnorm.py::test_two_copies_of_two_ranks_normalise_as_one_device",
        frozenset({"copies", "synced", "compile"}),
    ),
    (
        "test_compile.py::test_every_schedule_trains_compiled_as_one_device",
        frozenset({"compile", "chunks", "split"}),
    ),
    (
        "test_compile.py::test_every_schedule_trains_compiled_as_one_device",
        frozenset({"compile", "again"}),
    ),
    ("test_compile.py::test_units_compile_under_autocast", frozenset({"compile", "bf16-mixed"})),
    (
        "test_activation_checkpointing.py::test_every_schedule_trains_the_same_with_twice_the_forwards",
        frozenset({"again", "chunks"}),
    ),
    (
        "test_strategy_life.py::test_an_overflow_on_one_stage_skips_the_step_of_all_and_weighted_losses_stay_exact",
        frozenset({"16-mixed", "tied", "weighted", "clipping"}),
    ),
    (
        "test_sharded_checkpoint.py::test_resuming_in_another_layout_goes_on_exactly",
        frozenset({"stored", "tied", "copies"}),
    ),
    (
        "test_sharded_checkpoint.py::test_resuming_in_another_layout_goes_on_exactly",
        frozenset({"stored", "chunks"}),
    ),
    *(
        (
            "test_tensor_parallel.py::test_two_stages_of_two_processes_train_as_one_device",
            frozenset({"shared", *others}),
        )
        for others in (("accumulation", "clipping"), ("chunks", "split"), ("again",), ("tied",))
    ),
    (
        "test_tensor_parallel.py::test_copies_whose_processes_share_tensors_train_as_one_device",
        frozenset({"shared", "copies", "accumulation", "tied"}),
    ),
    (
        "test_tensor_parallel.py::test_copies_synchronise_batch_norms_on_shared_tensors",
        frozenset({"shared", "copies", "synced"}),
    ),
    *(
        (
            "test_tensor_parallel.py::test_other_features_train_on_shared_tensors",
            frozenset({"shared", other}),
        )
        for other in ("weighted", "compile", "deferred", "bf16-mixed", "16-mixed", "half")
    ),
    (
        "test_tensor_parallel.py::test_a_sharded_checkpoint_goes_from_shared_tensors_to_any_layout_and_back",
        frozenset({"shared", "stored", "tied"}),
    ),
]

#: pair to the reason and the test of it
REFUSED: dict[Pair, tuple[str, str]] = {
    frozenset({"synced", "weighted"}): (
        "a copy's gradients go through the batch norms of the others before it is known what its "
        "loss counts",
        "test_sync_batchnorm.py::test_steps_whose_gradients_cannot_meet_are_refused",
    ),
    frozenset({"parted", "shared"}): (
        "what `parallelize_module` makes of weights is in parts already, and is not divided over "
        "the copies as well",
        "test_tensor_parallel.py::test_sizes_that_cannot_be_are_refused_with_those_that_can",
    ),
}

#: pairs that have nothing to do with each other, and why
APART: dict[Pair, str] = {
    **{
        frozenset(pair): "one precision at a time"
        for pair in combinations(("bf16-mixed", "16-mixed", "half"), 2)
    },
    frozenset({"tied", "deferred"}): "statistics are not weights",
    frozenset({"tied", "synced"}): "statistics are not weights",
    frozenset({"weighted", "deferred"}): "statistics do not see losses",
}

_HEAD = """# With everything else

What runs together with what, on a pipeline of two ranks. This page is written by `python -m
tests.composition` from the table that the tests run (`tests/composition.py`), and a test compares
them.

- **exact**: the numbers of one device, up to the order of sums (and, in half precision, its
  rounding), shown by the test with that number.
- **refused**: an error before the first step, or in it, that says what to write instead.
- **-**: the two do not meet. **?**: nothing is known against it, and no test runs it yet.

"""
# ruff: noqa: E501
_TAIL = """
Beside these, which are the same with any of them:

| | P | P x D | shown by |
|---|---|---|---|
| schedules (GPipe, 1F1B, interleaved, ZBV) | exact | exact | `tests/test_transparency.py`, `tests/test_data_parallel.py` |
| all precisions, one device's bits | exact | exact | `tests/test_precision.py` |
| 16-mixed: an overflow | everyone's | everyone's | `tests/test_precision.py`, `tests/test_data_parallel.py` |
| one reduction for a step, bucket and stage | | counted | `tests/test_data_parallel.py` |
| later stages reduce while the first still runs | | yes | `tests/test_data_parallel.py` |
| dropout, random depth | same for any cut | copies differ | `tests/test_data_parallel.py` |
| `sync_dist`, `all_gather`, metric objects | one world | over the copies | `tests/test_data_parallel.py` |
| `ModelCheckpoint`, `EarlyStopping`, `ReduceLROnPlateau` | exact | decided together | `tests/test_data_parallel.py` |
| checkpoints, to and from any layout | exact | exact | `tests/test_strategy_checkpoint.py`, `tests/test_data_parallel.py` |
| sharded copies (`data_parallel_sharding`, FSDP2), also with `compile` and `sync_batchnorm` | | exact | `tests/test_sharded_data.py`, `tests/test_sync_batchnorm.py`, `tests/test_strategy_between.py` |
| an uneven last batch | exact | the epoch ends for all | `tests/test_data_parallel.py` |
| copies with other numbers of rows | | exact | `tests/test_data_parallel.py` |
| `overfit_batches`, `limit_*`, `fast_dev_run`, `profiler`, `detect_anomaly`, `deterministic`, `inference_mode` | exact | exact | `tests/test_trainer_flags.py` |
| `LearningRateFinder`, `BatchSizeFinder` | refused | refused | `tests/test_strategy_life.py` |
| `on_before_optimizer_step` with `grad_norm` | exact | | `tests/test_strategy_between.py` |
| Transformer Engine, bitsandbytes | refused | refused | `tests/test_precision.py` |
"""


def places() -> Iterator[tuple[str, frozenset[str]]]:
    """Every test that shows pairs, and the features that it runs together."""
    yield from SHOWN
    for name, combination in COMBINATIONS.items():
        yield f"test_composition.py::{TEST}[{name}]", combination.features


TEST = "test_features_run_together_as_one_device"


def cell(one: str, other: str) -> tuple[str, str]:
    """What a pair of features does, and the test or reason."""
    pair = frozenset({one, other})
    if pair in APART:
        return "-", APART[pair]
    if pair in REFUSED:
        return "refused", REFUSED[pair][1]
    for test, features in places():
        if pair <= features:
            return "exact", test
    return "?", "no test yet"


def tests_named() -> set[str]:
    """All tests that the table names, without parameters."""
    named = {test for test, _ in places()} | {test for _, test in REFUSED.values()}
    return {test.partition("[")[0] for test in named}


def exists(test: str) -> bool:
    """Whether there is such a test function."""
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def page() -> str:
    """The page."""
    keys = list(FEATURES)
    numbers: dict[str, int] = {}
    lines = [
        "| | " + " | ".join(FEATURES[key] for key in keys[1:]) + " |",
        "|---" * len(keys) + "|",
    ]
    for row, one in enumerate(keys[:-1]):
        cells = [" "] * row
        for other in keys[row + 1 :]:
            verdict, why = cell(one, other)
            if verdict not in "-?":
                number = numbers.setdefault(why, len(numbers) + 1)
                verdict = f"{verdict} ({number})"
            cells.append(verdict)
        lines.append(f"| **{FEATURES[one]}** | " + " | ".join(cells) + " |")
    notes = [f"{number}. `tests/{test}`" for test, number in numbers.items()]
    reasons = [
        f"- {' with '.join(FEATURES[key] for key in FEATURES if key in pair)}: {reason}."
        for pair, (reason, _) in REFUSED.items()
    ]
    refused = ["", "Refused:", "", *reasons]
    return _HEAD + "\n".join([*lines, "", *notes, *refused]) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page())
