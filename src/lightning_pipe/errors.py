"""Every exception that lightning-pipe raises on purpose, on one page.

    PipelineError
      CutError(ValueError)          the model or the step cannot be cut there
      PlanError(ValueError)         no plan satisfies the limits
      ScheduleError(ValueError)     the schedule is not runnable; carries rank, step, action
      BatchError(ValueError)        the batch cannot be split into micro-batches
      ConfigError(ValueError)       the arguments contradict each other or the machine
      MeetingError(ValueError)      ranks of a pipeline are at different places of the program
      StageMismatchError            two neighbouring stages disagree about a tensor
      GuardError                    a number that would be wrong without a word
      PeerError                     another rank failed; its own traceback is the cause
      CheckpointError               the saved stages do not make this model

What a user can correct is a ``ValueError`` too, so that ``except ValueError`` keeps working. A
message reads "what was asked: what was found; what is allowed. What to do", with the numbers in it.
"""

from __future__ import annotations

__all__ = [
    "BatchError",
    "CheckpointError",
    "ConfigError",
    "CutError",
    "GuardError",
    "MeetingError",
    "PeerError",
    "PipelineError",
    "PlanError",
    "ScheduleError",
    "StageMismatchError",
]


class PipelineError(Exception):
    """The root of all errors of this package."""


class CutError(PipelineError, ValueError):
    """The model or its step cannot be cut at the place that was asked for."""


class PlanError(PipelineError, ValueError):
    """No plan satisfies the limits, such as more stages than units."""


class ScheduleError(PipelineError, ValueError):
    """The schedule is not runnable.

    Args:
        message: What is wrong and what is allowed.
        rank: Position in the pipeline whose order is wrong, where one is to blame.
        step: Index into the order of that rank (the column of the CSV file), from 0.
        action: The text of the action at fault, such as ``"2F0"``.

    >>> error = ScheduleError("2F0 is missing", rank=1, action="2F0")
    >>> error.rank, error.step, error.action
    (1, None, '2F0')
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.action = action


class BatchError(PipelineError, ValueError):
    """The batch is empty or cannot be split into micro-batches."""


class ConfigError(PipelineError, ValueError):
    """The arguments contradict each other, the Trainer or the machine."""


class MeetingError(PipelineError, ValueError):
    """The ranks of a pipeline are at different places of the program, so none could go on."""


class StageMismatchError(PipelineError):
    """Two neighbouring stages disagree about a tensor that crosses their boundary."""


class GuardError(PipelineError):
    """Something that has to be the same is not, and the numbers of the run would be wrong."""


class PeerError(PipelineError):
    """Another rank failed, so this one cannot go on."""


class CheckpointError(PipelineError):
    """The saved stages do not make this model."""
