"""Several batches of the loader for one step: what `microbatch_size` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from lightning_pipe.errors import BatchError, ConfigError
from lightning_pipe.split.joining import join_batches
from lightning_pipe.split.rows import Rule, count_rows


@dataclass(frozen=True, slots=True)
class Grouped:
    """Reads a training loader so that each step has M x `microbatch_size` rows.

    A step takes as many whole batches of the loader as make that many rows, and joins them. The
    last step of an epoch takes what is left, unless the loader drops incomplete batches.

    Args:
        loader: The user's loader.
        num_microbatches: M.
        microbatch_size: Rows of a micro-batch.
        rules: What the user says about keys of the batch.

    Raises:
        ConfigError: The loader's batches do not make up the rows of a step.
    """

    loader: Iterable[Any]
    num_microbatches: int
    microbatch_size: int
    rules: Mapping[str, Rule]

    def __post_init__(self) -> None:
        rows = self.batch_size
        if self.rows % rows:
            raise ConfigError(
                f"num_microbatches={self.num_microbatches} with microbatch_size="
                f"{self.microbatch_size}: the loader gives batches of {rows} rows, and steps of "
                f"{self.rows} are not made of whole ones. Give the loader batch_size="
                f"{self.microbatch_size}, or leave microbatch_size out: num_microbatches then "
                "splits each batch of the loader"
            )

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.num_microbatches * self.microbatch_size

    @property
    def batch_size(self) -> int:
        """Rows of the loader's batches; a loader that does not say gives micro-batches."""
        sampler = getattr(self.loader, "batch_sampler", None)
        for found in (self.loader, sampler):
            size = getattr(found, "batch_size", None)
            if isinstance(size, int) and size > 0:
                return size
        return self.microbatch_size

    @property
    def num_batches(self) -> int:
        """Of the loader, for a step."""
        return self.rows // self.batch_size

    def __len__(self) -> int:
        """Steps of an epoch; a `TypeError` if the loader has no length."""
        loader: Any = self.loader
        whole, rest = divmod(len(loader), self.num_batches)
        return whole + bool(rest and not self._drops_last)

    @property
    def _drops_last(self) -> bool:
        return bool(getattr(self.loader, "drop_last", False))

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.loader)
        while batches := list(islice(iterator, self.num_batches)):
            if len(batches) < self.num_batches and self._drops_last:
                return
            self._check(batches)
            yield join_batches(batches, self.rules)

    def _check(self, batches: list[Any]) -> None:
        found = max(count_rows(batch, self.rules) for batch in batches)
        if found > self.batch_size:
            raise BatchError(
                f"microbatch_size={self.microbatch_size}: the loader gave a batch of {found} rows, "
                f"and {self.batch_size} were expected, as it has no batch_size that says "
                f"otherwise. Let it give batches of {self.microbatch_size} rows, or leave "
                "microbatch_size out"
            )


__all__ = ["Grouped"]
