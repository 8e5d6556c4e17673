"""How the losses of micro-batches make the loss of the batch.

A step may say so: it returns ``{"loss": loss, "loss_weight": n}``, where ``n`` is what its mean
divides by (the number of valid tokens, say), or ``"sum"`` if its loss is a sum. Otherwise a loss is
taken for a mean over rows. A backward runs before the last weights are known, so gradients are made
with a provisional scale and corrected once by `LossWeights.correction`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from lightning_pipe.errors import BatchError
from lightning_pipe.split.microbatch import NumberMemory, merge_values, weighted_mean

Weight = float | Literal["sum"] | None


def split_loss(value: Any) -> tuple[Any, Weight]:
    """What a step returned, as its loss and the weight that it gives to it.

    Raises:
        BatchError: The weight is not a number that counts something, nor "sum".
    """
    if not isinstance(value, Mapping):
        return value, None
    loss, weight = value.get("loss"), value.get("loss_weight")
    if loss is None or weight is None:
        return loss, None
    if isinstance(weight, str) and weight == "sum":
        return loss, "sum"
    is_number = isinstance(weight, (int, float)) or (
        isinstance(weight, Tensor) and weight.numel() == 1
    )
    if not is_number or not 0 <= float(weight) < float("inf"):
        raise BatchError(
            f"the step returned loss_weight={weight!r}: give what the mean divides by, a number "
            'from 0 on such as the count of valid tokens, or "sum" if the loss is a sum'
        )
    return loss, float(weight)


def need_loss(value: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        TypeError: There is none.
    """
    loss = value.get("loss") if isinstance(value, Mapping) else value
    if isinstance(loss, Tensor):
        return loss
    found = f"it returned {type(value).__name__}"
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value)) or "none"
        found = f"the dict that it returned has the keys {keys}"
        if "loss" in value:
            found = f"'loss' in what it returned is {type(loss).__name__}"
    raise TypeError(
        "In automatic optimization, `training_step` must return a Tensor or a dict with the key "
        f"'loss'; {found}."
    )


class LossWeights:
    """The weights of the losses of one step.

    Args:
        rows: Rows of each micro-batch.
    """

    def __init__(self, rows: Sequence[int] = ()) -> None:
        self._rows = rows
        self._reference = 1.0
        self.given: list[Weight] = []

    def factor(self, weight: Weight) -> float:
        """What the loss of the next micro-batch is multiplied with before its backward.

        Raises:
            BatchError: Other micro-batches gave weights of another kind.
        """
        if self.given and type(weight) is not type(self.given[0]):
            raise BatchError(
                "micro-batches of one batch return loss_weight of different kinds "
                f"({self.given[0]!r} and {weight!r}): return the same for every batch"
            )
        self.given.append(weight)
        if isinstance(weight, str):
            return 1.0
        if weight is None:
            return self._rows[len(self.given) - 1] / sum(self._rows)
        if len(self.given) == 1:  # any scale would do; this one keeps fp16 in its range
            self._reference = max(weight, 1.0) * len(self._rows)
        return weight / self._reference

    @property
    def total(self) -> float | Literal["sum"]:
        """What the mean of the batch divides by: what its weights count, or its rows."""
        if not self.given or self.given[0] is None:
            return float(sum(self._rows))
        if self.given[0] == "sum":
            return "sum"
        return sum(weight for weight in self.given if isinstance(weight, float))

    @property
    def correction(self) -> float:
        """What gradients that were made with these factors are multiplied with."""
        return self.correction_among([self.total])

    def correction_among(self, totals: Sequence[float | Literal["sum"]]) -> float:
        """The same where the mean of several batches will be taken, and that of all is wanted.

        Args:
            totals: Those of all batches, of which this is one.
        """
        if self.total == "sum":
            return float(len(totals))
        mean = sum(total for total in totals if not isinstance(total, str)) / len(totals)
        weighted = self.given and self.given[0] is not None
        made_with = self._reference if weighted else float(sum(self._rows))
        return made_with / mean if mean else float("nan")  # a mean of nothing

    def merged(self, losses: Sequence[Any]) -> Any:
        """The loss of the batch."""
        if not self.given or self.given[0] is None:
            return merge_values(losses, self._rows)
        if self.given[0] == "sum":
            return sum(losses[1:], start=losses[0])
        pairs = [
            (loss, weight)
            for loss, weight in zip(losses, self.given, strict=True)
            if isinstance(weight, float) and weight > 0  # a mean of nothing is not a number
        ]
        if not pairs:
            return losses[0]
        values, weights = [loss for loss, _ in pairs], [weight for _, weight in pairs]
        if all(isinstance(value, Tensor) for value in values):
            return weighted_mean(values, weights)
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)

    def merged_output(
        self, outputs: Sequence[Any], memory: NumberMemory | None = None, step: str = ""
    ) -> Any:
        """What the step returned for the batch.

        Args:
            outputs: What it returned for each micro-batch.
            memory: What numbers were seen to be in earlier steps.
            step: Its name, for the memory.
        """
        merged = merge_values(outputs, self._rows, memory=memory, place=(step,))
        weighted = self.given and self.given[0] is not None
        if not weighted or len(outputs) == 1 or not isinstance(merged, Mapping):
            return merged
        whole = self.given[0]
        if not isinstance(whole, str):
            whole = sum(weight for weight in self.given if isinstance(weight, float))
        loss = self.merged([output["loss"] for output in outputs])
        return {**merged, "loss": loss, "loss_weight": whole}
