"""Processes that are started once and given one function after another, as the ranks of a job.

Each call gets a process group of its own over a file, without a port, and the environment that
`torchrun` would set, so that a Trainer inside of it starts nothing. None of them outlives the
parent, and no answer is waited for without a limit.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipe.errors import PeerError, PipelineError
from lightning_pipe.runtime.accelerator import backend

_START_S = 300.0
_GRACE_S = 20.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process sends back.

    Attributes:
        value: What the function returned.
        error: Type and message of what it raised instead; empty if nothing.
        is_ours: Whether that is an error of this package.
        is_second: Whether it only says that another rank failed.
        trace: Its traceback.
        time_s: When, to know who was first.
    """

    value: Any = None
    error: str = ""
    is_ours: bool = False
    is_second: bool = False
    trace: str = ""
    time_s: float = 0.0


class Workers:
    """Some processes.

    Args:
        number: How many to start with; more come when they are wanted.
        folder: Where their files go, what they print among them.
        device_type: Of what they compute on.
    """

    def __init__(self, number: int, folder: str, device_type: str = "cpu") -> None:
        self._folder = folder
        self._backend = backend(device_type)
        self._started: set[int] = set()
        self._processes: list[tuple[Any, Connection]] = []
        self._grow(number)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def run(
        self, num_ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float
    ) -> list[Answer]:
        """Calls a function in the first processes, as the ranks of a job.

        Args:
            num_ranks: How many; one has no process group.
            function: Of a module that can be imported; its arguments can be pickled.
            args: They.
            timeout_s: How long it may take.

        Returns:
            Their answers by rank. Where one is silent for too long, all are ended; where one has
            died, the next call starts others.
        """
        if not self.are_alive:
            self.close()
        self._grow(num_ranks)
        self._wait_for_start(num_ranks)
        store = tempfile.mktemp(dir=self._folder)
        call = (function.__module__, function.__qualname__, args)
        for _, connection in self._processes[:num_ranks]:
            connection.send_bytes(pickle.dumps((num_ranks, store, timeout_s, call)))
        return self._collect(num_ranks, timeout_s)

    @property
    def are_alive(self) -> bool:
        """Whether they can be told to do something more."""
        return all(process.is_alive() for process, _ in self._processes)

    def printed(self, rank: int) -> str:
        """The last lines that a process has printed."""
        text = Path(self._output(rank)).read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-40:])

    def close(self) -> None:
        """Ends the processes; others are started when they are wanted."""
        for process, connection in self._processes:
            process.kill()
            process.join()
            connection.close()
        self._processes.clear()
        self._started.clear()

    def _grow(self, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self._processes), number):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, self._output(rank), self._backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def _wait_for_start(self, num_ranks: int) -> None:
        for rank in range(num_ranks):
            connection = self._processes[rank][1]
            if rank not in self._started:
                if not connection.poll(_START_S):
                    raise PeerError(f"process {rank} did not start in {_START_S:.0f} s")
                connection.recv_bytes()
                self._started.add(rank)

    def _collect(self, num_ranks: int, timeout_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        end_s = time.monotonic() + timeout_s
        while len(answers) < num_ranks:
            open_to = {self._processes[r][1]: r for r in range(num_ranks) if r not in answers}
            ready = wait(list(open_to), timeout=max(0.0, end_s - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                answer = self._receive(open_to[connection], connection)
                answers[open_to[connection]] = answer
                if answer.error:
                    end_s = min(end_s, time.monotonic() + _GRACE_S)
            if not ready:
                answers |= {rank: self._late(rank, timeout_s) for rank in open_to.values()}
                self.close()
        return [answers[rank] for rank in range(num_ranks)]

    def _receive(self, rank: int, connection: Connection) -> Answer:
        try:
            found = pickle.loads(connection.recv_bytes())
            assert isinstance(found, Answer)
            return found
        except (EOFError, ConnectionResetError):
            process = self._processes[rank][0]
            process.join(5)
            code = process.exitcode
            error = f"the process of rank {rank} died with exit code {code}"
            return Answer(error=error, trace=self.printed(rank), time_s=0.0)

    def _late(self, rank: int, timeout_s: float) -> Answer:
        """The answer of a rank that gives none: where it is."""
        os.kill(self._processes[rank][0].pid, signal.SIGUSR1)
        time.sleep(1.0)
        error = f"rank {rank} gave no answer in {timeout_s:.0f} s"
        return Answer(error=error, trace=self.printed(rank), time_s=time.monotonic())

    def _output(self, rank: int) -> str:
        return os.path.join(self._folder, f"rank-{rank}.txt")


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    """What torchrun sets; the port is never opened."""
    return {
        "TORCHELASTIC_RUN_ID": "check",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _serve(rank: int, connection: Connection, output: str, moves_with: str) -> None:
    """The main function of a process; what it prints goes to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    before = dict(os.environ)
    connection.send_bytes(b"started")
    while True:
        try:
            num_ranks, store, timeout_s, call = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            return
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
        if num_ranks > 1:
            os.environ.update(_environment(rank, num_ranks))
        group = _Group(rank, num_ranks, store, timeout_s, moves_with)
        connection.send_bytes(pickle.dumps(_answer(group, call)))


@dataclass(frozen=True, slots=True)
class _Group:
    """The process group of one call."""

    rank: int
    num_ranks: int
    store: str
    timeout_s: float
    backend: str

    def make(self) -> None:
        if self.num_ranks == 1:
            return
        files = dist.FileStore(self.store, self.num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group(
            self.backend, store=files, rank=self.rank, world_size=self.num_ranks,
            timeout=timedelta(seconds=self.timeout_s),
        )  # fmt: skip
        dist.barrier()


def _answer(group: _Group, call: Any) -> Answer:
    module, name, args = call
    rank = group.rank
    try:
        group.make()
        answer = Answer(value=getattr(importlib.import_module(module), name)(rank, *args))
        pickle.loads(pickle.dumps(answer))
        return answer
    except BaseException as error:
        time_s = time.monotonic()
        return Answer(
            error=f"{type(error).__name__}: {error}",
            is_ours=isinstance(error, PipelineError),
            is_second=isinstance(error, PeerError),
            trace=traceback.format_exc(),
            time_s=time_s,
        )
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
