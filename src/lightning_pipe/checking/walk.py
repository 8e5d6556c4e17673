"""The order in which a practitioner looks for the fault, each step with one thing more than the
one before; it stops at the first that fails."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from lightning_pipe.checking import jobs
from lightning_pipe.checking.numbers import TOLERANCE, Comparison
from lightning_pipe.checking.subject import Asked, Facts, Lay
from lightning_pipe.checking.workers import Answer, Workers

#: what a simple cut has in place of the user's arguments
_SIMPLE: dict[str, Any] = {
    "virtual_stages": 1, "schedule": "auto", "balance": "auto", "split_points": None,
    "activation_checkpointing": "none", "plan": None, "chunks_are_free": False,
    "batchnorm": "micro-batch",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A step of the check.

    Attributes:
        name: Its letter and what it is.
        is_right: Whether the walk goes on.
        comparison: With one device, where there is one.
        remark: What to know about it.
        cause: Why it failed, and what to type.
    """

    name: str
    is_right: bool
    comparison: Comparison | None = None
    remark: str = ""
    cause: str = ""


class Walk:
    """All steps.

    Args:
        workers: Two processes at least, and as many as there are ranks.
        asked: What is checked.
        facts: What the config says.
        timeout_s: How long a step may take.
    """

    def __init__(self, workers: Workers, asked: Asked, facts: Facts, timeout_s: float) -> None:
        self._workers, self._asked, self._facts = workers, asked, facts
        self._timeout_s = timeout_s
        self._draws = False

    def rows(self) -> Iterator[Row]:
        """The steps, up to the first that fails."""
        for step in self._steps():
            row = step()
            yield row
            if not row.is_right:
                return

    def _steps(self) -> Iterator[Callable[[], Row]]:
        facts = self._facts
        pieces, ranks = facts.num_microbatches, facts.num_ranks
        yield self._alone
        yield self._as_ranks
        simple = Lay(2, 1, arguments=_SIMPLE)
        yield lambda: self._over_stages("b  2 stages x 1 micro-batch", simple)
        if pieces > 1:
            name = f"c  2 stages x {pieces} micro-batches"
            yield lambda: self._over_stages(name, replace(simple, num_microbatches=pieces))
        own = Lay(ranks, pieces)
        yield lambda: self._over_stages(f"d  {self._described()}", own)
        yield self._recomputed
        yield self._replicas

    def _described(self) -> str:
        facts = self._facts
        chunks = f" x {facts.virtual_stages} chunks" if facts.virtual_stages > 1 else ""
        if facts.given.get("chunks_are_free"):
            chunks = " x chunks by simulation"
        schedule = "a plan" if facts.given.get("plan") else facts.given.get("schedule", "auto")
        return (
            f"your layout: {schedule}, {facts.num_ranks} rank{'s' * (facts.num_ranks > 1)}{chunks}"
            f" x {facts.num_microbatches} micro-batches"
        )

    # ------------------------------------------------------------------ one device

    def _alone(self) -> Row:
        name = "a  one device"
        (answer,) = self._run(1, jobs.alone)
        if answer.error:
            return Row(name, False, cause=_raised("the step fails on one device, too", answer))
        found: jobs.Alone = answer.value
        if not math.isfinite(found.loss):
            return Row(name, False, cause=f"the loss on one device is {found.loss}")
        if found.not_finite:
            names = ", ".join(found.not_finite[:4])
            return Row(name, False, cause=f"gradients on one device are not finite: {names}")
        first, second = found.losses
        if not math.isclose(first, second, rel_tol=1e-6, abs_tol=1e-12):
            return Row(name, False, cause=_not_repeatable(first, second))
        some, all_of_them = found.with_gradient
        return Row(name, True, remark=f"loss {found.loss:.6g}, {some} of {all_of_them} gradients")

    def _as_ranks(self) -> Row:
        number = max(2, self._facts.num_ranks)
        name = f"a  one device, as each of {number} ranks"
        answers = self._run(number, jobs.as_rank)
        failed = _first_failure(answers)
        if failed is not None:
            return Row(name, False, cause=_raised("the step fails for a rank", failed))
        (loss, sizes), *others = (answer.value for answer in answers)
        for rank, (other, other_sizes) in enumerate(others, 1):
            apart = [n for n in sizes if not _near(sizes[n], other_sizes.get(n, math.nan))]
            if not _near(loss, other) or apart or sizes.keys() != other_sizes.keys():
                where = f"; gradients differ from {apart[0]} on" if apart else ""
                return Row(name, False, cause=_by_rank(rank, loss, other) + where)
        return Row(name, True, remark="the same for all")

    # ------------------------------------------------------------------ over stages

    def _over_stages(self, name: str, lay: Lay) -> Row:
        precision = self._facts.precision[0]
        found, cause = self._judge(lay, precision)
        if cause:
            return Row(name, False, cause=cause)
        assert found is not None
        remark = self._remark(found)
        if found.comparison.is_close:
            return Row(name, True, found.comparison, remark)
        if precision == "32-true":
            exact, _ = self._judge(lay, "64-true")
            if exact is not None and exact.comparison.is_close:
                return Row(name, True, found.comparison, f"rounding: {_again(exact)} in 64 bits")
        cause = _OF_THE_COPIES if lay.copies > 1 else self._why(lay, precision)
        worst = found.comparison.worst()
        return Row(name, False, found.comparison, remark, f"{worst}. {cause}")

    def _why(self, lay: Lay, precision: str) -> str:
        (answer,) = self._run(1, jobs.why, lay, precision)
        return answer.value if not answer.error else _raised("no cause was found", answer)

    def _judge(self, lay: Lay, precision: str) -> tuple[jobs.Judged | None, str]:
        """The comparison, or why there is none."""
        answers = self._run(lay.processes, jobs.staged, lay, precision)
        failed = _first_failure(answers)
        if failed is None:
            self._draws |= answers[0].value
            (failed,) = self._run(1, jobs.judged, lay, precision)
            if not failed.error:
                return failed.value, ""
        if failed.is_ours or lay.num_microbatches == 1 or not self._workers.are_alive:
            return None, _raised("the step over stages fails", failed)
        (answer,) = self._run(1, jobs.why, lay, precision)
        known = answer.value if not answer.error else ""
        return None, f"{_raised('the step over stages fails', failed)}\n{known}"

    def _remark(self, found: jobs.Judged) -> str:
        if not found.in_sequence:
            return ""
        norms = bool(self._facts.norms)
        what = "batch norms see micro-batches" if norms else "with the pipeline's seeds of dropout"
        return f"{what}: compared with one device that takes them in sequence"

    def _recomputed(self) -> Row:
        own = self._facts.given.get("activation_checkpointing", "auto")
        other = "none" if own == "all" else "all"
        arguments: dict[str, Any] = {"activation_checkpointing": other}
        if self._facts.given.get("plan") is not None:
            arguments = {**_SIMPLE, **arguments}
        lay = Lay(self._facts.num_ranks, self._facts.num_microbatches, arguments=arguments)
        return self._over_stages(f"e  the same, activation_checkpointing={other}", lay)

    def _replicas(self) -> Row:
        facts, name = self._facts, f"f  {self._facts.copies} copies of it"
        if facts.copies == 1:
            return Row("f  copies", True, remark="one copy: nothing to compare")
        if facts.norms or self._draws or facts.rows % facts.copies:
            why = "rows that do not divide" if facts.rows % facts.copies else "other numbers"
            return Row(name, True, remark=f"not compared: each copy has {why} by intention")
        pieces = max(1, min(facts.num_microbatches, facts.rows // facts.copies))
        arguments = _SIMPLE if facts.given.get("plan") is not None else {}
        lay = Lay(facts.num_ranks, pieces, facts.copies, arguments)
        return self._over_stages(name, lay)

    def _run(self, num_ranks: int, job: Any, *rest: Any) -> list[Answer]:
        args = (self._asked, self._facts, *rest)
        return self._workers.run(num_ranks, job, *args, timeout_s=self._timeout_s)


_OF_THE_COPIES = (
    "One copy gives what one device gives (d), so it is what copies do not do alike: the step asks "
    "for its rank or for the number of processes (global_rank, world_size), or its loss is no mean "
    "over rows: where it divides by something else (valid tokens, a mask), return "
    '{"loss": loss, "loss_weight": n} with the number that it divides by, for a sum "sum"'
)


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=10 * TOLERANCE[4], abs_tol=1e-9)


def _again(exact: jobs.Judged) -> str:
    return f"{exact.comparison.gradient_error:.0e}"


def _first_failure(answers: list[Answer]) -> Answer | None:
    failed = [answer for answer in answers if answer.error]
    return min(failed, key=lambda a: (a.is_second, a.time_s), default=None)


def _raised(what: str, answer: Answer) -> str:
    """An error of a process: its message; for one of the user's code, where it was raised."""
    if answer.is_ours:
        return f"{what}. {answer.error}"
    return f"{what}. {answer.error}\n{answer.trace}".rstrip()


def _not_repeatable(first: float, second: float) -> str:
    return (
        f"the step gives {first:.6g} and then {second:.6g} from the same weights, the same batch "
        "and the same seeds. It draws from a random generator that is in no place where it could "
        "be found and seeded (attributes of modules, objects and containers in them, globals of "
        "the files of their classes, the global ones of torch, NumPy and Python), or counts in "
        "something that is outside of the module. Stages would draw different numbers: keep the "
        "generator in an attribute of a module"
    )


def _by_rank(rank: int, loss: float, other: float) -> str:
    return (
        f"the step asks for its rank: on one device its loss is {loss:.6g}, and {other:.6g} where "
        f"global_rank and RANK say {rank}. Every stage runs the whole step and has to do the same "
        "in it: take the rank out of the step (do in a callback or hook what one rank is to do)"
    )
