"""How long a rank may wait for another before that is called a hang."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime.verdict import BUSY, GONE, STUCK

Timeout = float | str | None

_REPORT_S = 60.0
_STUCK_S = 300.0
_STEPS = 10
_ANSWER_S = 5.0
_BUSY_ANSWER_S = 60.0  # a machine that compiles or swaps may keep a thread from running for long
_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class Patience:
    """What `hang_timeout` means.

    By itself, a wait of a minute is looked into, or of ten usual steps where those are longer: all
    ranks say what they do and the cause is named. The run is ended if a rank does not answer; after
    five minutes if every rank waits for another, which nothing can mend; and not while a rank runs
    something, which may only be slow.

    Args:
        timeout: "auto" for this; seconds after which a wait is looked into and ends the run,
            whatever the cause; None: no wait ends it.
    """

    timeout: Timeout = "auto"

    def __post_init__(self) -> None:
        timeout = self.timeout
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if timeout not in ("auto", None) and not (is_number and float(timeout) > 0):
            raise ConfigError(
                f"hang_timeout={timeout!r}: give 'auto', a number of seconds above 0, or None "
                "for no end"
            )

    def moment_s(self, looks: int, usual_s: float) -> float:
        """Length of a wait at which it is looked into.

        Args:
            looks: How often it has been.
            usual_s: The usual length of a step.
        """
        if isinstance(self.timeout, (int, float)):
            return float(self.timeout) * (looks + 1)
        first_s = max(_REPORT_S, _STEPS * usual_s)
        return max(_STUCK_S, first_s) * looks if looks else first_s

    @property
    def answer_s(self) -> float:
        """How long a rank may take to say what it does before it counts as gone.

        The death of a process is seen by itself; this is for one that lives.
        """
        return _BUSY_ANSWER_S if self.timeout == "auto" else _ANSWER_S

    def ends(self, kind: str, waited_s: float, usual_s: float) -> bool:
        """Whether a wait that was looked into ends the run.

        Args:
            kind: That of the verdict.
            waited_s: Its length.
            usual_s: The usual length of a step.
        """
        if self.timeout is None or kind not in (GONE, BUSY, STUCK):
            return False
        if self.timeout != "auto":
            return True
        after_s = {GONE: 0.0, STUCK: self.moment_s(1, usual_s), BUSY: _NEVER_S}[kind]
        return waited_s >= after_s
