"""How a micro-batch's run of a step ends: with a result, at the next stage, or without a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipe.errors import CutError


class Skipped(CutError):
    """The training step returned None."""

    def __init__(self) -> None:
        super().__init__(
            "the training step returned None: is there a `return loss` on every way through it? "
            "Skipping a batch on purpose is not supported over several "
            "devices, as with the other strategies of Lightning: the other stages compute for it. "
            "Return a loss times zero, or leave the batch out in the data loader"
        )

    def __reduce__(self) -> Any:
        return Skipped, ()


class StageExit(BaseException):
    """Unwinds the step when the stage has done its part."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the step returned, on the last stage, and the values that were to be recorded."""

    value: Any
    recorded: tuple[Tensor | None, ...] = ()
