"""One batch for all stages: one process reads the loader, the others are given what it read.

With each batch go the reader's random states, so what hooks draw after it (a random transform in
`on_after_batch_transfer`) is the same on every rank; so are the length, the end and a failure.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from warnings import warn

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len

from lightning_pipe import _lightning as seam
from lightning_pipe.errors import BatchError, PeerError
from lightning_pipe.grouping import Grouped
from lightning_pipe.runtime.accelerator import get_rng_state, set_rng_state
from lightning_pipe.runtime.meeting import at, meet
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.share import (
    broadcast_everywhere,
    broadcast_object,
    broadcast_read,
    gather_objects,
)


def _unpicklable(read: _Read, reason: Exception) -> _Read:
    """What all ranks are told of a batch, or an exception, that cannot be sent."""
    if read.error is not None:
        text = "".join(traceback.format_exception(read.error))
        error: Exception = PeerError(f"the first rank of the pipeline failed to read:\n{text}")
    else:
        error = BatchError(
            f"the batch of type {type(read.batch).__name__} cannot be given to the other stages: "
            f"{reason}; everything in it must be picklable"
        )
    return replace(read, batch=None, error=error)


@dataclass(frozen=True, slots=True)
class _Read:
    """What one call of `next` on the reader led to: a batch, the end, or an exception."""

    batch: Any = None
    is_end: bool = False
    error: BaseException | None = None
    rng: Any = None
    #: row numbers of batches since the last read, for writers of predictions
    rows: Sequence[Any] = ()


class SharedLoader:
    """Stands for a loader on every rank of a pipeline; only one rank iterates it.

    Everything but the iteration is the loader's own: attributes are read and set there, and
    `isinstance` sees its class.

    Args:
        loader: The user's loader, on this rank.
        ranks: This rank.
        device: Whose random state goes with each batch, beside the host's.
        grouped: What is read instead, where several of its batches make one.
        ends_together: Whether all copies of the pipeline end with the first that has no more
            batches, as training does: a step needs all of them.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        ranks: Ranks,
        device: torch.device,
        grouped: Grouped | None = None,
        *,
        ends_together: bool = False,
    ) -> None:
        space = self.__dict__
        space["_shared"] = loader
        space["_ranks"] = ranks
        space["_of_device"] = device
        space["_read"] = loader if grouped is None else grouped
        space["_copies"] = ranks.copies if ends_together and ranks.reads else None
        with at(ranks, "sets up a data loader"):
            length = sized_len(self._read) if ranks.reads else None
            space["_num_batches"] = _given(ranks, _least(self._copies, length))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._shared)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_shared"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._shared, name, value)

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError(f"the {type(self._shared).__name__} has no length")
        length: int = self._num_batches
        return length

    @property
    def unshared(self) -> Iterable[Any]:
        """The user's loader."""
        loader: Iterable[Any] = self._shared
        return loader

    def __iter__(self) -> Iterator[Any]:
        iterator = _SharedIterator(
            self._read, self._shared, self._ranks, self._of_device, self._copies
        )
        self.__dict__["_num_batches"] = iterator.num_batches
        return iterator


class _SharedIterator(Iterator[Any]):
    """One pass over a `SharedLoader`. Making it, `next` and `peek` are done by all ranks
    together."""

    def __init__(
        self,
        read: Iterable[Any],
        loader: Iterable[Any],
        ranks: Ranks,
        device: torch.device,
        copies: Ranks | None,
    ) -> None:
        self._ranks = ranks
        self._copies = copies
        self._device = device
        self._iterator: Iterator[Any] | None = None
        self._peeked: _Read | None = None
        self._rng_before_peek: Any = None
        self._error: Exception | None = (
            None  # raised at the first read: Lightning expects none here
        )
        length = None
        if ranks.reads:
            try:
                self._iterator = iter(read)
                length = sized_len(read)
            except Exception as error:
                self._error = error
        self._seen: list[Any] | None = None if ranks.reads else seam.seen_rows(loader, reset=True)
        self._loader = loader
        self._num_sent = 0
        with at(ranks, "begins to read a data loader"):
            self.num_batches = _given(ranks, _least(copies, length))

    def __next__(self) -> Any:
        read = self._peeked
        if read is None:
            read = self._read()
            if not self._ranks.reads and read.rng is not None:
                _set_rng(self._device, read.rng)
        else:
            # The batch was read ahead of its time: the generators move now, as they would have.
            self._peeked = None
            if not self._ranks.reads or _same(_get_rng(self._device), self._rng_before_peek):
                _set_rng(self._device, read.rng)
        if read.error is not None:
            raise read.error
        if read.is_end:
            raise StopIteration
        return read.batch

    def peek(self) -> tuple[bool, Any]:
        """Reads the first batch and keeps it; the random generators stay as they were.

        Returns:
            Whether there is one, and the batch.
        """
        if self._peeked is None:
            self._rng_before_peek = _get_rng(self._device)
            self._peeked = self._read()
            _set_rng(self._device, self._rng_before_peek)
        if self._peeked.error is not None:
            raise self._peeked.error
        return not self._peeked.is_end, self._peeked.batch

    def _read(self) -> _Read:
        read = _Read()
        if self._ranks.reads:
            try:
                if self._error is not None:
                    raise self._error
                assert self._iterator is not None
                read = _Read(next(self._iterator))
            except StopIteration:
                read = _Read(is_end=True)
            except Exception as error:
                read = _Read(error=error)
            read = self._unless_another_ends(read)
            rows = (seam.seen_rows(self._loader) or [])[self._num_sent :]
            self._num_sent += len(rows)
            rng = _get_rng(self._device)
            read = _Read(read.batch, read.is_end, read.error, rng, rows)
        with at(self._ranks, "reads a batch"):
            for ranks in _to_give(self._ranks):
                read = broadcast_read(ranks, read, partial(_unpicklable, read))
        # copies of the pipeline are not at the same batch of an evaluation, and those who share a
        # stage have not heard of it yet
        if self._ranks.talk.obey is not None and not self._ranks.others:
            self._ranks.talk.obey(False)
        if self._seen is not None:
            self._seen.extend(read.rows)
        return read

    def _unless_another_ends(self, read: _Read) -> _Read:
        """The end, where any copy of the pipeline has no more batches."""
        if self._copies is None:
            return read
        ended = meet(self._copies, "reads a batch of training", read.is_end)
        if not any(ended) or read.is_end:
            return read
        warn(
            f"copy {ended.index(1)} of the pipeline has no more batches and this one, copy "
            f"{self._copies.position}, has: the epoch ends for all, and its batch is left out. "
            "Give all copies as many",
            stacklevel=2,
        )
        return _Read(is_end=True, error=read.error)


def _to_give(ranks: Ranks) -> tuple[Ranks, ...]:
    """How what one process has read gets to all of its copy: first to the other parts of its
    stage."""
    return (ranks.tensor, ranks) if ranks.tensor is not None and ranks.is_first else (ranks,)


def _given(ranks: Ranks, length: int | None) -> int | None:
    """The number of batches that the process that reads has found."""
    for given in _to_give(ranks):
        length = broadcast_object(given, length, given.first_position)
    return length


def _least(copies: Ranks | None, length: int | None) -> int | None:
    """The batches that each copy of the pipeline has; None where that is not known."""
    if copies is None:
        return length
    with at(copies, "counts the batches of training"):
        lengths = gather_objects(copies, length) or []
    known = [found for found in lengths if found is not None]
    if len(known) < len(lengths):
        return None
    if len(set(known)) > 1:
        warn(
            f"the copies of the pipeline have {known} batches of training: an epoch ends for all "
            f"after {min(known)}, and the others are left out. Give all copies as many",
            stacklevel=2,
        )
    return min(known)


def share_random_state(ranks: Ranks, device: torch.device) -> None:
    """Puts the generators of all ranks where those of the first are: hooks draw the same on all."""
    if ranks.world_size > 1:
        _set_rng(device, broadcast_everywhere(ranks, _get_rng(device)))


def _get_rng(device: torch.device) -> Any:
    return get_rng_state(device), random.getstate(), np.random.get_state()


def _set_rng(device: torch.device, state: Any) -> None:
    set_rng_state(device, state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _same(a: Any, b: Any) -> bool:
    return (
        all(
            x is y or torch.equal(x, y)
            for x, y in zip(a[0], b[0], strict=True)
            if x is not None and y is not None
        )
        and a[1] == b[1]
        and all(bool(np.all(x == y)) for x, y in zip(a[2], b[2], strict=True))
    )
