"""Guards against numbers that are wrong without a word: cheap, and always on.

What ranks have to agree on goes with messages that a step sends anyway.

- The batch is the same on all stages: compared by its contents in the first steps.
- Weights that several stages, or copies of the pipeline, hold are the same: compared by checksums
  every so many steps (`share.sum_replicated`; over copies by a message of its own).
- A loss that is not finite is named once, with its micro-batch and the stage where the first such
  value came from.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_pipe.errors import GuardError
from lightning_pipe.runtime import meeting, share
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.nest import items
from lightning_pipe.split.parted import is_divided, part_of
from lightning_pipe.split.spec import ValueSpec

_FIRST_STEPS = 3  # of each kind, whose batches are compared
_EVERY_STEPS = 50  # between two checksums of replicated weights
_SAMPLED_BYTES = 1 << 20  # of a tensor of the batch

Fingerprint = tuple[tuple[str, int], ...]
"""A number for each value of a batch, with its place."""


@dataclass(frozen=True, slots=True)
class Told:
    """What the rank of the last stage tells the others with the traces of a step.

    Attributes:
        batch: The fingerprint of the batch, if it is to be compared.
        not_finite: Micro-batches whose loss is not finite.
    """

    batch: Fingerprint | None = None
    not_finite: tuple[int, ...] = ()


class Finite:
    """Sums of what a step made on this rank, which are not finite if a value in them is not.

    Nothing waits for the device until somebody looks.
    """

    def __init__(self) -> None:
        self._losses: list[tuple[int, Tensor]] = []
        self._sums: list[tuple[int, int, Tensor]] = []

    def note(
        self,
        stage: int,
        microbatch: int,
        inputs: Sequence[ValueSpec],
        outputs: Sequence[ValueSpec],
        values: Sequence[Tensor],
    ) -> None:
        """A stage has run."""
        received = {spec.name for spec in inputs}
        for spec, value in zip(outputs, values, strict=True):
            # a mask may have infinities; it has no gradient
            if spec.requires_grad and spec.name not in received:
                self._sums.append((microbatch, stage, _sum(value)))

    def note_loss(self, microbatch: int, loss: Tensor) -> None:
        """The loss of a micro-batch is there."""
        self._losses.append((microbatch, _sum(loss)))

    def bad_losses(self) -> tuple[int, ...]:
        """Micro-batches whose loss is not finite. Waits for the device."""
        if not self._losses:
            return ()
        flags = torch.stack([torch.isfinite(loss) for _, loss in self._losses]).tolist()
        return tuple(
            microbatch
            for (microbatch, _), is_fine in zip(self._losses, flags, strict=True)
            if not is_fine
        )

    def bad_stages(self, microbatch: int) -> list[int]:
        """Stages of this rank that gave a value that is not finite."""
        return sorted(
            {s for m, s, total in self._sums if m == microbatch and not torch.isfinite(total)}
        )


class Guards:
    """The guards of one run, on this rank.

    Args:
        module: The user's module.
        ranks: This rank.
        device: Where its stages live.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._module = module
        self._ranks = ranks
        self._device = device
        self._num_seen: dict[str, int] = {}
        self._num_checked = 0
        self._num_averaged = 0
        self._batch: Fingerprint | None = None
        self._has_warned = False
        self._finite: Finite | None = None

    def begin(self, name: str, batch: Any, *, training: bool) -> None:
        """A step begins.

        Args:
            name: Its name.
            batch: What it is given.
            training: Whether it has a loss.
        """
        seen = self._num_seen[name] = self._num_seen.get(name, 0) + 1
        is_compared = seen <= _FIRST_STEPS and self._ranks.num_positions > 1
        self._batch = fingerprint(batch) if is_compared else None
        self._finite = Finite() if training and not self._has_warned else None

    @property
    def finite(self) -> Finite | None:
        """What takes note of the values of this step; None if nobody will look."""
        return self._finite

    def forget(self) -> None:
        """The step begins again, on other cuts."""
        if self._finite is not None:
            self._finite = Finite()

    def tell(self) -> Told:
        """What the rank of the last stage tells the others."""
        waits = self._device.type != "cpu" and self._ranks.num_positions == 1
        if self._finite is None or waits:  # nothing else of that step may wait for the device
            return Told(self._batch)
        return Told(self._batch, self._finite.bad_losses())

    def hear(self, told: Told) -> str | None:
        """Compares what was told with what this rank has; called by all ranks.

        Returns:
            A warning for the user, where there is one.

        Raises:
            GuardError: This rank was given another batch.
        """
        if told.batch is not None and self._batch is not None and told.batch != self._batch:
            raise GuardError(
                f"the stages were given different batches: {_difference(told.batch, self._batch)}. "
                "Every stage runs the whole step, so what changes the batch on its way "
                "(on_before_batch_transfer, on_after_batch_transfer, transfer_batch_to_device) has "
                "to do the same on all ranks. Random numbers of torch, NumPy and Python are the "
                "same; generators that the code makes itself, and clocks, are not"
            )
        if not told.not_finite or self._has_warned:
            return None
        self._has_warned = True
        microbatch = told.not_finite[0]
        own = [] if self._finite is None else self._finite.bad_stages(microbatch)
        found = share.gather_objects(self._ranks, (own, self._bad_weights())) or []
        return _warning(
            told.not_finite,
            min((stage for stages, _ in found for stage in stages), default=None),
            [name for _, names in found for name in names],
        )

    def checksums(self, parameters: Mapping[str, Tensor]) -> dict[str, int] | None:
        """Checksums of parameters, in a step in which they are to be compared."""
        self._num_checked += 1
        if (self._num_checked - 1) % _EVERY_STEPS or not parameters:
            return None
        return _checksums(parameters)

    def compare_replicas(self, parameters: Mapping[str, Tensor]) -> None:
        """Compares weights over the other pipelines that hold them, every so many steps.

        Args:
            parameters: Those of this position that each copy holds whole.

        Raises:
            GuardError: They differ; on all.
        """
        self._num_averaged += 1
        if (self._num_averaged - 1) % _EVERY_STEPS:
            return
        for others in self._ranks.others:
            among_copies = others is self._ranks.copies
            same = {n: p for n, p in parameters.items() if among_copies or not is_divided(p)}
            with meeting.at(others, "compares weights"):
                sums = share.gather_objects(others, _checksums(same)) or []
            for name in same:
                if len({told[name] for told in sums}) > 1:
                    called = meeting.PLURAL[others.called]
                    raise GuardError(
                        f"the weight {name} is no longer the same in all {called} of the pipeline: "
                        f"its checksums by {others.called} are {[told[name] for told in sums]}. "
                        f"Something writes to it in one {others.called} alone: take a condition on "
                        "the rank (`is_global_zero`, `global_rank == 0`) away from what changes "
                        "weights"
                    )

    def _bad_weights(self) -> list[str]:
        return [
            name
            for name, parameter in self._module.named_parameters()
            if not is_fake(parameter) and not bool(torch.isfinite(part_of(parameter)).all())
        ]


def checksum(value: Tensor) -> Tensor:
    """The sum of the bits of a tensor, as a whole number: equal for equal contents."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()]).sum(dtype=torch.int64)


def _checksums(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    if not parameters:
        return {}
    sums = torch.stack([checksum(part_of(value)) for value in parameters.values()])
    return dict(zip(parameters, sums.tolist(), strict=True))


def fingerprint(batch: Any) -> Fingerprint:
    """A number for every value of a batch; of a large tensor, for some of its elements."""
    return tuple(_fingerprint(batch, "batch"))


def _fingerprint(value: Any, place: str) -> Iterator[tuple[str, int]]:
    found = items(value)
    if found is not None:
        for key, item in found:
            yield from _fingerprint(item, f"{place}[{key!r}]")
    elif isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        yield place, _crc(_sampled(value.detach().reshape(-1)))
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield place, zlib.crc32(np.ascontiguousarray(value).tobytes())
    elif value is None or isinstance(value, (bool, int, float, str, bytes)):
        yield place, zlib.crc32(repr(value).encode())


def _sampled(flat: Tensor) -> Tensor:
    return flat[:: flat.nbytes // _SAMPLED_BYTES + 1]


def _crc(flat: Tensor) -> int:
    flat = flat.resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _sum(value: Tensor) -> Tensor:
    value = value.detach()
    wide = torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else None
    return value.sum(dtype=wide)


def _difference(theirs: Fingerprint, own: Fingerprint) -> str:
    ours = dict(own)
    names = [place for place, number in theirs if ours.get(place) != number]
    shown = ", ".join(names[:4]) or "its structure"
    return f"{shown} differ{'s' if len(names) <= 1 else ''} from that of the last stage"


def _warning(microbatches: Sequence[int], stage: int | None, weights: Iterable[str]) -> str:
    which = (
        f"micro-batch{'es' if len(microbatches) > 1 else ''} {', '.join(map(str, microbatches))}"
    )
    bad = list(weights)
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        where = f"the weight {bad[0]}{more} has such values, so an earlier step made them"
    elif stage is None:
        where = "what all stages gave is finite, so it comes from the last stage or the loss itself"
    else:
        where = f"the first such value is among what stage {stage} gives the next"
    return (
        f"the loss of {which} is not finite (NaN or infinite): {where}. Training goes on, as on "
        "one device; this is said once"
    )
