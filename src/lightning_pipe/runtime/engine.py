"""Runs one rank's part of a schedule: calls its stages, moves values and gradients between stages.

Knows stages only as `StageWork`: something that takes the values of the previous boundary and gives
those of the next. Losses arrive weighted, gradients are never scaled here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.ir import Action, Schedule
from lightning_pipe.planning.timeline import Span
from lightning_pipe.runtime import _torch
from lightning_pipe.runtime.accelerator import Mark, mark, read_marks
from lightning_pipe.runtime.actionlog import ActionLog
from lightning_pipe.runtime.chunk import StageChunk
from lightning_pipe.runtime.preflight import check_deeds
from lightning_pipe.runtime.progress import Progress, Wait
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.transfer import Links, Moved
from lightning_pipe.split.spec import ValueSpec

_MAX_LOWERED = 32


class StageWork(Protocol):
    """What the engine needs of a stage, for one step."""

    def inputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """What crosses from the stage before; () for stage 0."""

    def outputs(self, microbatch: int) -> tuple[ValueSpec, ...]:
        """What crosses to the stage after; () for the last.

        A value that is among the inputs too, under the same name, is relayed: it goes on as it
        came, and what `forward` returns in its place is ignored.
        """

    def weights(self) -> Sequence[Tensor]:
        """Weights that the stage uses: they must not change between a forward and its backward."""

    def recomputes(self, microbatch: int) -> bool:
        """Whether the backward runs parts of the forward again: it is not taken apart then."""

    def forward(self, microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Runs the stage on the values of `inputs` and returns those of `outputs`.

        The last stage returns its loss, already weighted; or () if there is none.
        """


class Engine:
    """Runs schedules on one rank.

    Args:
        ranks: This rank and its groups.
        device: Where the values of boundaries live.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.progress = Progress()
        #: notes every action in a file, if somebody wants to know
        self.log: ActionLog | None = None
        self._device = device
        self._lowered: dict[Schedule, _torch.Lowered] = {}

    def run(
        self, schedule: Schedule, stages: Mapping[int, StageWork], *, training: bool
    ) -> Sequence[Span]:
        """Runs this rank's order of a schedule to its end.

        Gradients are added to `.grad` of the parameters. No graph, value or gradient of a micro-
        batch outlives its backward.

        Args:
            schedule: The same on all ranks.
            stages: The stages that the schedule gives to this rank.
            training: Whether to run backwards. If not, no graph is kept.

        Returns:
            When each action ran, by the clock of `time.perf_counter`; read from the device at first
            use.

        Raises:
            Exception: What a stage raised, as it was raised, with a note that says where.
            PeerError: The connection to another rank broke.
        """
        position, num_positions = self.ranks.position, self.ranks.num_positions
        own = schedule.stages(position)
        if set(own) != set(stages) or schedule.num_ranks != num_positions:
            raise ConfigError(
                f"{schedule.name}: rank {position} of {schedule.num_ranks} holds the stages "
                f"{list(own)}; got {sorted(stages)} on rank {position} of {num_positions}"
            )
        assert training == schedule.has_backward, "an evaluation needs a schedule without backwards"
        self.progress.begins()
        links = Links(self.ranks, self._device, self._waits_to_send)
        recorder = _Recorder(position, self._device, self.progress, self.log)
        rank_of = schedule.stage_to_rank
        chunks = {
            stage: StageChunk(
                work,
                stage,
                rank_of,
                links=links,
                observer=recorder,
                device=self._device,
                training=training,
            )
            for stage, work in stages.items()
        }
        with torch.set_grad_enabled(training):
            _torch.run(self._lower(schedule), position, chunks, self._device)
            links.finish()
        self.progress.ends()
        return recorder.spans()

    def _waits_to_send(self, position: int, is_over: bool) -> None:
        if is_over:
            self.progress.goes_on()
        else:
            self.progress.awaits(Wait(position))

    def _lower(self, schedule: Schedule) -> _torch.Lowered:
        lowered = self._lowered.get(schedule)
        if lowered is None:
            if len(self._lowered) >= _MAX_LOWERED:
                self._lowered.pop(next(iter(self._lowered)))
            lowered = _torch.lower(schedule)
            check_deeds(schedule, _torch.deeds(lowered))
            self._lowered[schedule] = lowered
        return lowered


class Spans(Sequence[Span]):
    """The spans of a rank, read from the device's clock when they are first looked at."""

    def __init__(self, rank: int, marks: list[tuple[Action, Mark, Mark, Mark, Mark]]) -> None:
        self._rank = rank
        self._marks = marks
        self._spans: list[Span] | None = None

    def __len__(self) -> int:
        return len(self._marks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if self._spans is None:
            times = read_marks([moment for _, *moments in self._marks for moment in moments])
            self._spans = [
                Span(self._rank, action, start_s, end_s, waited_s - waits_s)
                for (action, *_), waits_s, waited_s, start_s, end_s in zip(
                    self._marks, times[::4], times[1::4], times[2::4], times[3::4], strict=True
                )
            ]
        return self._spans[index]


class _Recorder:
    """Times the actions and tells the watchdog about them."""

    def __init__(
        self, rank: int, device: torch.device, progress: Progress, log: ActionLog | None
    ) -> None:
        self._log = log
        self._rank = rank
        self._device = device
        self._progress = progress
        self._marks: list[tuple[Action, Mark, Mark, Mark, Mark]] = []
        self._waits: Mark | None = None
        self._waited: Mark | None = None

    def waits(self, wait: Wait) -> None:
        self._progress.awaits(wait)
        if self._log is not None:
            self._log.waits(self._progress.step, wait)
        self._waits = mark(self._device)

    def waited(self) -> None:
        self._waited = mark(self._device)

    def moves(self, action: Action, is_sent: bool, position: int, values: Sequence[Moved]) -> None:
        if self._log is not None:
            self._log.moves(self._progress.step, action, is_sent, position, values)

    def starts(self, action: Action, values: Sequence[Moved]) -> Mark:
        self._progress.runs(action)
        if self._log is not None:
            self._log.starts(self._progress.step, action, values)
        return mark(self._device)

    def ends(self, action: Action, start: Mark) -> None:
        waits, waited = self._waits or start, self._waited or start
        self._waits = self._waited = None
        self._marks.append((action, waits, waited, start, mark(self._device)))
        if self._log is not None:
            self._log.ends(self._progress.step, action)

    def spans(self) -> Spans:
        return Spans(self._rank, self._marks)
