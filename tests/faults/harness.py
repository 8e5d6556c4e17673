"""Processes that may die, hang or be stopped, and faults at a chosen action of a chosen stage.

The processes are forked from one that has imported everything, so a job of two costs a fraction of
a second. Each writes to a file of its own, and none may be left when a job is over. A fault may be
at any action: `python -m tests.faults.run` tries all of them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests import helpers
from tests.runtime.models import Stage, cut, make_batch, make_model

from lightning_pipe.planning.ir import Op
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.runtime import engine
from lightning_pipe.runtime.patience import Patience
from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.watchdog import guard
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.program import StageProgram

LIMIT_S = 30.0  # within which every process has to end after a fault
_PRELOADED = ["torch", "lightning.pytorch", "lightning_pipe", "tests.helpers", "tests.lit"]


@dataclass(frozen=True)
class Ended:
    """How a process ended, what it wrote, and how long after the fault."""

    returncode: int | None
    stderr: str
    stdout: str
    seconds: float


class Job:
    """Processes that run a function together.

    Args:
        num_ranks: How many.
        fn: A function of a test file.
        args: Its arguments.
    """

    def __init__(self, num_ranks: int, fn: Callable[..., Any], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self.path = Path(tempfile.mkdtemp(prefix="fault-"))
        job = helpers._make_job(num_ranks, fn, args, str(self.path), 120.0)
        self.processes = [
            context.Process(target=_main, args=(job, rank, str(self.path)), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    def stderr(self, rank: int) -> str:
        """What a rank has written until now."""
        file = self.path / f"{rank}.err"
        return file.read_text() if file.exists() else ""

    def await_text(self, text: str, rank: int, timeout_s: float = 120.0) -> None:
        """Waits until a rank has written a text."""
        end_s = time.monotonic() + timeout_s
        while text not in self.stderr(rank):
            if time.monotonic() > end_s or not self.processes[rank].is_alive():
                self._fail(f"{text!r} is not in what rank {rank} wrote")
            time.sleep(0.02)

    def end(self, fault: str = "fault now") -> list[Ended]:
        """Waits for all processes; none may still be there so long after the fault."""
        begun_s = time.monotonic()
        while not any(fault in self.stderr(r) for r in range(len(self.processes))):
            is_late = time.monotonic() - begun_s > 120
            if is_late or not any(process.is_alive() for process in self.processes):
                self._fail(f"{fault!r} is in nothing that was written")
            time.sleep(0.02)
        fault_s = time.monotonic()
        ended = []
        for rank, process in enumerate(self.processes):
            process.join(max(0.1, helpers.PATIENCE * LIMIT_S - (time.monotonic() - fault_s)))
            if process.is_alive():
                self._fail(f"rank {rank} is left")
            out = (self.path / f"{rank}.out").read_text()
            seconds = time.monotonic() - fault_s
            ended.append(Ended(process.exitcode, self.stderr(rank), out, seconds))
        self._clean()
        return ended

    def _fail(self, reason: str) -> None:
        texts = [f"--- rank {r}\n{self.stderr(r)}" for r in range(len(self.processes))]
        self._clean()
        raise AssertionError("\n".join([reason, *texts]))

    def _clean(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.path)


def _main(job: helpers.Job, rank: int, folder: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(helpers._environment(rank, job.num_ranks))
    torch.set_num_threads(1)
    sys.path[:] = job.path
    helpers._call(job, rank)


# ------------------------------------------------------------------ faults


@dataclass(frozen=True)
class Fault:
    """What happens, and at which action."""

    kind: str
    action: str

    def happen(self) -> None:
        """Makes it happen."""
        sys.stderr.write("fault now\n")
        sys.stderr.flush()
        if self.kind == "raise":
            raise ValueError("the user's own text 42")
        if self.kind in ("kill", "native"):
            time.sleep(2.0)  # for the others to have seen what this rank does
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "sleep":
            time.sleep(100)
        if self.kind == "slow":
            time.sleep(6)
        if self.kind == "native":
            ctypes.PyDLL(None).sleep(100)  # as native code that holds the interpreter

    def change(self, value: torch.Tensor) -> torch.Tensor:
        """Makes a wrong value of a right one."""
        self.happen()
        if self.kind == "shape":
            return value[:1]
        if self.kind == "nan":
            return value * torch.nan
        return value.float() if self.kind == "dtype" else value


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, fault):
        ctx.fault = fault
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        ctx.fault.happen()
        return grad, None


class Faulty(Stage):
    """A stage with a fault in a forward, in its own code, or in a whole backward, in autograd's."""

    fault = Fault("none", "")
    number = -1

    def forward(self, microbatch, received):
        values = super().forward(microbatch, received)
        if self.fault.action == f"{self.number}F{microbatch}":
            return tuple(map(self.fault.change, values))
        if self.fault.action == f"{self.number}B{microbatch}":
            return tuple(_InBackward.apply(value, self.fault) for value in values)
        return values


@contextmanager
def in_step(fault: Fault, step: int, num_microbatches: int, patch: Any) -> Iterator[None]:
    """A fault in what a stage makes, in one step of a `Trainer` that does nothing but train."""
    own, calls = StageProgram.run, Counter[tuple[int, bool]]()

    def run(self, *args, **kwargs):
        number = calls[self.stage, self.is_last]  # the tail on the whole batch is stage 1, too
        calls[self.stage, self.is_last] += 1
        made = own(self, *args, **kwargs)
        at = number // num_microbatches + 1, f"{self.stage}F{number % num_microbatches}"
        if at != (step, fault.action):
            return made
        if isinstance(made, StepResult):
            return replace(made, value=fault.change(made.value))
        return tuple(map(fault.change, made))

    with patch.context() as changed:
        changed.setattr(StageProgram, "run", run)
        yield


class _Recorder(engine._Recorder):
    """A fault at the start of half a backward, before it calls anything."""

    fault = Fault("none", "")

    def starts(self, action, values):
        started = super().starts(action, values)
        if action.op in (Op.INPUT, Op.WEIGHT) and str(action) == self.fault.action:
            self.fault.happen()
        return started


def train(
    fault: Fault,
    hang_timeout: float | str | None = "auto",
    num_ranks: int = 2,
    steps: int = 3,
    schedule: str = "1f1b",
) -> dict[str, Any]:
    """Trains a chain; the fault comes in the last step but one, so that all ranks wait for it."""
    order = make_schedule(schedule, num_ranks=num_ranks, num_microbatches=4)
    ranks = make_ranks(order.stage_to_rank, num_ranks)
    runner = engine.Engine(ranks, torch.device("cpu"))
    model = make_model("chain")
    engine._Recorder = _Recorder
    with guard(ranks, runner.progress, Patience(hang_timeout)):
        for step in range(steps):
            stage = Faulty(model, ranks.position, cut(model, num_ranks), make_batch([2] * 4))
            stage.number = ranks.position
            stage.fault = _Recorder.fault = fault if step == steps - 2 else Fault("none", "")
            runner.run(order, {ranks.position: stage}, training=True)
    return {"losses": stage.losses}


# ------------------------------------------------------------------ what has to be said


def wrong(fault: Fault, ended: Sequence[Ended]) -> list[str]:
    """What is not as it should be where a stage of `train` had a fault; nothing, if all is right.

    All processes have ended in time and not with success, and each has said what it was and where.
    """
    stage, _, microbatch = re.split("([FBIW])", fault.action)
    failing = len(ended) - 1 - int(stage)  # the last stage is on global rank 0
    found = []
    for rank, process in enumerate(ended):
        who = f"rank {rank} of {fault}"
        if process.returncode in (0, None):
            found.append(f"{who} ended with {process.returncode}")
        if process.seconds >= LIMIT_S:
            found.append(f"{who} ended after {process.seconds:.1f} s")
        if rank == failing and fault.kind in ("kill", "native"):
            if process.returncode != -signal.SIGKILL:
                found.append(f"{who} ended with {process.returncode}")
            continue  # it can say nothing
        for text in _texts(fault.kind, fault.action, microbatch, failing):
            if not re.search(text, process.stderr):
                found.append(f"{who} does not say {text!r}:\n{process.stderr}")
    return found


def _texts(kind: str, action: str, microbatch: str, rank: int) -> list[str]:
    seen = rf"It was last seen where it runs {action}\b"
    return {
        "raise": [
            "ValueError: the user's own text 42",
            rf"action {action}, micro-batch {microbatch}\b",
            rf"global rank {rank} failed|stage {action[0]}, rank \d, action {action}",
        ],
        "kill": [rf"global rank {rank} has died: its process \d+ ended without a word", seen],
        "sleep": [
            rf"no progress.*: the others wait for rank \d \(global rank {rank}\), which runs "
            rf"{action}, .*, at happen, harness.py:",
        ],
        "native": [f"global rank {rank} does not answer", seen],
        "shape": [r"gave '\w+' as \(1, 6\) float64; the next stage was told \(2, 6\)"],
        "dtype": [r"gave '\w+' as \(2, 6\) float32; the next stage was told \(2, 6\) float64"],
    }[kind]
