"""What the user asked for: how many stages, micro-batches, which schedule, how to balance. Checked
at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_pipe.errors import ConfigError, ScheduleError
from lightning_pipe.grouping import Grouped
from lightning_pipe.planning.costs import CostTable
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import Plan
from lightning_pipe.planning.request import BALANCES
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule, validate_user
from lightning_pipe.split.rows import Rule, check_rules
from lightning_pipe.statistics import POLICIES

Size = Literal["auto"] | int


@dataclass(frozen=True, slots=True)
class Layout:
    """The arguments of the strategy that decide how a model is laid over ranks.

    Attributes:
        num_ranks: P.
        virtual_stages: V.
        num_microbatches: M, or None: 4P where the batch allows.
        schedule: A name, the path of a CSV file, or "auto".
        balance: One of `BALANCES`, or a number of unit calls for each stage.
        split_points: Names of modules after which to cut.
        activation_checkpointing: Which units run again for their backward: "none", "all", "auto"
            (as few as fit the memory), every k-th one, or those of some classes.
        split_batch: What the user says about keys of the batch (:mod:`lightning_pipe.split.rows`).
        batchnorm: When running statistics are updated (:mod:`lightning_pipe.statistics`).
        microbatch_size: Rows of a micro-batch, where steps draw M of them; None: M splits a batch.
        compile: Arguments of `torch.compile` for every unit; None compiles nothing.
        plan: The file's plan that the other values are from, if any.
        costs: Measured costs of the units, if any.
        chunks_are_free: Whether V is decided on the traced step (:mod:`lightning_pipe.decide`).
    """

    num_ranks: int
    virtual_stages: int = 1
    num_microbatches: int | None = None
    schedule: str = "auto"
    balance: str | tuple[int, ...] = "auto"
    split_points: tuple[str, ...] | None = None
    activation_checkpointing: str | int | tuple[str, ...] = "auto"
    split_batch: Mapping[str, Rule] = field(default_factory=dict)
    batchnorm: str = "micro-batch"
    microbatch_size: int | None = None
    compile: Mapping[str, Any] | None = None
    plan: Plan | None = None
    costs: CostTable | None = None
    chunks_are_free: bool = False

    def __post_init__(self) -> None:
        for name in ("num_ranks", "virtual_stages", "num_microbatches", "microbatch_size"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                shown = "pipeline_parallel_size" if name == "num_ranks" else name
                raise ConfigError(f"{shown}={value!r}: give a whole number, 1 at least")
        if isinstance(self.balance, str) and self.balance not in BALANCES:
            raise ConfigError(
                f"balance={self.balance!r}: give one of {', '.join(BALANCES)}, or a list "
                "with the number "
                f"of unit calls of each of the {self.num_stages} stages"
            )
        if not isinstance(self.balance, str) and len(self.balance) != self.num_stages:
            raise ConfigError(
                f"balance={list(self.balance)}: {len(self.balance)} counts for "
                f"{self.num_stages} stages "
                f"({self.num_ranks} ranks x {self.virtual_stages}); give one count per stage"
            )
        if self.split_points is not None and len(self.split_points) != self.num_stages - 1:
            raise ConfigError(
                f"split_points: {len(self.split_points)} names make "
                f"{len(self.split_points) + 1} stages, "
                f"but there are {self.num_stages} ({self.num_ranks} ranks x "
                f"{self.virtual_stages}); give "
                f"{self.num_stages - 1} names"
            )
        _check_checkpointing(self.activation_checkpointing)
        if self.microbatch_size is not None and self.num_microbatches is None:
            raise ConfigError(
                f"microbatch_size={self.microbatch_size} without num_microbatches: a step draws "
                "num_microbatches x microbatch_size rows. Give num_microbatches too, or leave "
                "microbatch_size out: then each batch of the loader is split"
            )
        check_rules(self.split_batch)
        if self.batchnorm not in POLICIES:
            raise ConfigError(f"batchnorm={self.batchnorm!r}: give one of {', '.join(POLICIES)}")
        self._check_schedule()

    @property
    def num_stages(self) -> int:
        """P * V."""
        return self.num_ranks * self.virtual_stages

    def microbatches_for(self, rows: int, least_rows: int = 1) -> int:
        """How many micro-batches a batch of so many rows is split into.

        With `microbatch_size` a batch that is no whole step, one of an evaluation or the last of an
        epoch, is split into as many as have that size.

        Args:
            rows: Rows of the batch.
            least_rows: Rows that each needs; a batch that has fewer is one micro-batch.
        """
        wanted = self.num_microbatches
        if self.microbatch_size is not None:
            wanted = -(-rows // self.microbatch_size)
        elif wanted is None:
            wanted = 4 * self.num_ranks if self.num_ranks > 1 else 1
        return min(wanted, max(1, rows // least_rows))

    @property
    def rows_per_step(self) -> int | None:
        """Rows that a step draws; None where it takes a batch of the loader."""
        if self.microbatch_size is None or self.num_microbatches is None:
            return None
        return self.microbatch_size * self.num_microbatches

    def grouped(self, loader: Iterable[Any]) -> Grouped | None:
        """A training loader, read for whole steps; None where its batches are steps.

        Raises:
            ConfigError: Its batches do not make up a step.
        """
        if self.microbatch_size is None or self.num_microbatches is None:
            return None
        return Grouped(loader, self.num_microbatches, self.microbatch_size, self.split_batch)

    def schedule_name(self, num_microbatches: int) -> str:
        """The schedule to run; "auto" is decided by the number of micro-batches."""
        if self.schedule != "auto":
            return self.schedule
        if self.virtual_stages > 1:
            return "interleaved_1f1b"
        return "1f1b" if num_microbatches >= self.num_ranks else "gpipe"

    def make(self, num_microbatches: int, *, name: str | None = None) -> Schedule:
        """The schedule for any number of micro-batches, as a short batch may need."""
        return make_schedule(
            name or self.schedule_name(num_microbatches),
            num_ranks=self.num_ranks,
            num_microbatches=num_microbatches,
            virtual_stages=self.virtual_stages,
            strict=False,
        )

    def stage_to_rank(self) -> tuple[int, ...]:
        """The position that holds each stage."""
        return self.make(1 if _is_file(self.schedule) else 2 * self.num_ranks).stage_to_rank

    def _check_schedule(self) -> None:
        name = self.schedule
        if _is_file(name):
            make_schedule(
                name,
                num_ranks=self.num_ranks,
                num_microbatches=self.num_microbatches or 1,
                virtual_stages=self.virtual_stages,
                strict=False,
            )
            return
        if name != "auto" and name not in SCHEDULES:
            raise ScheduleError(
                f"schedule={name!r}: unknown; give 'auto', the path of a .csv file, or one of "
                f"{', '.join(sorted(SCHEDULES))}"
            )
        if self.chunks_are_free:
            return
        num_microbatches = self.num_microbatches or 4 * self.num_ranks
        validate_user(
            self.schedule_name(num_microbatches),
            self.num_ranks,
            num_microbatches,
            self.virtual_stages,
        )


def number_of(size: Size) -> int | None:
    """What a user gave as a number, "auto" as None."""
    return None if size == "auto" else size


def checkpointing_of(wanted: str | int | list[str]) -> str | int | tuple[str, ...]:
    """As a layout has it; a command line gives numbers as text."""
    if isinstance(wanted, (list, tuple)):
        return tuple(wanted)
    return int(wanted) if isinstance(wanted, str) and wanted.isdecimal() else wanted


def _check_checkpointing(wanted: object) -> None:
    names = isinstance(wanted, tuple) and bool(wanted) and all(isinstance(n, str) for n in wanted)
    number = isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1
    if wanted not in ("none", "all", "auto") and not names and not number:
        raise ConfigError(
            f"activation_checkpointing={wanted!r}: give 'none', 'all', 'auto', a number k (every "
            "k-th unit) or a list of the names of classes"
        )


def _is_file(schedule: str) -> bool:
    return os.fspath(schedule).lower().endswith(".csv")
