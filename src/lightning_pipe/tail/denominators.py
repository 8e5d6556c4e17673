"""What the losses of torch divide by, watched while micro-batches run.

For outputs that are too large to be kept for a comparison with the whole batch: a mean over valid
targets divides by another number per row in each micro-batch, and a sum by none.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_pipe.split._fake import is_fake

_LOSSES = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


class Denominators(TorchFunctionMode):
    """Notes the denominators of `cross_entropy` and `nll_loss`; a context around each
    micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[list[Tensor | None]] = []

    def __enter__(self) -> Denominators:
        self._found.append([])
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if func in _LOSSES:
            given = _LOSSES[func].bind(*args, **kwargs)
            given.apply_defaults()
            self._note(given.arguments)
        return func(*args, **kwargs)

    def differ(self, rows: Sequence[int]) -> bool:
        """Tell whether any of them is no constant times the rows.

        Args:
            rows: Rows of the micro-batches.
        """
        if len({len(found) for found in self._found}) != 1:
            return False
        for column in zip(*self._found, strict=True):
            counts = [float(count) for count in column if count is not None]
            if len(counts) < len(column):
                return True
            shares = [count / size for count, size in zip(counts, rows, strict=True)]
            if max(shares) - min(shares) > 1e-6 * max(shares):
                return True
        return False

    def _note(self, given: dict[str, Any]) -> None:
        target, weight = given["target"], given["weight"]
        if is_fake(target) or target.is_floating_point() or given["reduction"] == "none":
            return
        if given["reduction"] == "sum":
            self._found[-1].append(None)
            return
        valid = target != given["ignore_index"]
        if weight is None:
            self._found[-1].append(valid.sum())
        elif not is_fake(weight):
            self._found[-1].append(torch.where(valid, weight[target * valid], 0).sum())
