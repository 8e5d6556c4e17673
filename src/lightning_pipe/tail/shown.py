"""The loss that a training step shows is the one whose gradients were taken.

The tail on the whole batch may give another: of a loss that is no mean over rows, or where the step
decides by values and the whole batch decides otherwise than its micro-batches did. Gradients are
those of the micro-batches, so their loss takes its place wherever the step left it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_pipe.split.tree import flatten, unflatten
from lightning_pipe.tail.notes import Notes


def show_loss(notes: Notes, loss: Tensor, trained: Tensor) -> None:
    """Puts the loss whose gradients were taken where a run on the whole batch left its own.

    Args:
        notes: What that run did; changed in place.
        loss: The loss that it returned.
        trained: The one of the micro-batches.
    """
    shown = _Shown(loss.detach(), trained.detach())
    notes.outputs[:] = map(shown, notes.outputs)
    for calls in (*notes.logs, *notes.metrics, *notes.prints, *notes.loggers):
        calls[:] = map(shown, calls)
    for changes in notes.attributes:
        changes.update({place: shown(change) for place, change in changes.items()})


class _Shown:
    """Replaces one loss by another in what a step left."""

    def __init__(self, loss: Tensor, trained: Tensor) -> None:
        self._loss = loss
        self._trained = trained
        self._number = float(loss)

    def __call__(self, value: Any) -> Any:
        leaves, spec = flatten(value)
        if not any(map(self._is_loss, leaves)):
            return value  # the very object
        return unflatten([self._replaced(leaf) for leaf in leaves], spec)

    def _replaced(self, leaf: Any) -> Any:
        if not self._is_loss(leaf):
            return leaf
        if isinstance(leaf, Tensor):
            return self._trained.to(leaf.device, leaf.dtype).reshape(leaf.shape)
        return type(leaf)(self._trained.item())

    def _is_loss(self, leaf: Any) -> bool:
        """Copies count: the loss of a step as a number, on the host, in another precision."""
        if isinstance(leaf, Tensor):
            if leaf.numel() != 1 or not leaf.is_floating_point():
                return False
            is_it = leaf.data_ptr() == self._loss.data_ptr()
            return is_it or self._equals(float(leaf), float(self._loss.to(leaf.dtype)))
        return isinstance(leaf, float) and self._equals(leaf, self._number)

    @staticmethod
    def _equals(value: float, loss: float) -> bool:
        # a 0.0 or 1.0 beside the loss may well be something else
        return value == loss and not value.is_integer()
