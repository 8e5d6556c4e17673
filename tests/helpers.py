"""Worker processes for tests that need ranks, started once per session.

Each start of a process pays an import of torch and Lightning (seconds), so the workers stay and
every test body is sent to them. A body gets a fresh gloo process group over a `FileStore` (no port)
and the environment variables of torchrun, so a `Trainer(devices=n)` inside a body starts no
processes itself. Nothing here waits without a limit: a body that takes too long fails its test with
the stacks of all ranks.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_START = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from tests.helpers import _main
_main()
"""
PATIENCE = 3  # limits are against hangs, and a busy machine is none: they are so much longer
GRACE_S = 30.0  # how long the other ranks may take to end once one rank has failed
START_S = 300.0  # how long a worker may take to import torch


@dataclass(frozen=True, slots=True)
class Job:
    """A test body as sent to a worker: the function by name and file, its arguments as a pickle."""

    path: tuple[str, ...]  # sys.path of the test process
    module: str
    file: str
    name: str
    arguments: bytes
    store: str  # file of the FileStore
    num_ranks: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """What a worker sends back."""

    value: Any = None
    error: BaseException | None = None
    time_s: float = 0.0  # time.monotonic(), to find which rank failed first


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process of `spawn_ranks` ended; `returncode` is None if it had to be killed."""

    returncode: int | None
    stdout: str
    stderr: str


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Runs `fn(*args)` on `num_ranks` ranks and returns what each returned, by rank.

    Args:
        num_ranks: Number of ranks.
        fn: A module-level function of a test file.
        args: Its arguments, picklable.
        timeout: Seconds until the stacks of all ranks are dumped and the test fails.

    Raises:
        BaseException: The exception of the rank that failed first, with its traceback as a note.
    """
    return _POOL.run(num_ranks, fn, args, _patient(timeout))


def spawn_ranks(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[Ended]:
    """Like `run_ranks` in new processes that may die: returns how each ended and what it wrote."""
    timeout = _patient(timeout)
    with tempfile.TemporaryDirectory() as folder:
        job = _make_job(num_ranks, fn, args, folder, timeout)
        file = Path(folder) / "job"
        file.write_bytes(pickle.dumps(job))
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _START, str(file), str(rank)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **_environment(rank, num_ranks)},
            )
            for rank in range(num_ranks)
        ]
        end = time.monotonic() + timeout
        ended = []
        try:
            for process in processes:
                returncode: int | None
                try:
                    out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
                    returncode = process.returncode
                except subprocess.TimeoutExpired:
                    process.kill()
                    out, err = process.communicate()
                    returncode = None
                ended.append(Ended(returncode, out, err))
        finally:
            for process in processes:
                process.kill()
        return ended


def _patient(timeout_s: float) -> float:
    """Longer, unless the test is about the limit itself."""
    return timeout_s * PATIENCE if timeout_s >= 30 else timeout_s


def _described(error: BaseException) -> str:
    notes = "\n".join(getattr(error, "__notes__", ()))
    return f"beside it: {type(error).__name__}: {error}\n{notes}"


def _make_job(
    num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: str, timeout_s: float
) -> Job:
    file = sys.modules[fn.__module__].__file__
    assert file is not None, "fn must be a function of a module"
    assert "<locals>" not in fn.__qualname__, "fn must be a module-level function"
    store = tempfile.mktemp(dir=folder)
    return Job(
        path=tuple(sys.path),
        module=fn.__module__,
        file=file,
        name=fn.__qualname__,
        arguments=pickle.dumps(args),
        store=store,
        num_ranks=num_ranks,
        timeout_s=timeout_s,
    )


def _environment(rank: int, num_ranks: int) -> dict[str, str]:
    """What torchrun sets; Lightning's TorchElasticEnvironment looks for it."""
    return {
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": "tests",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # never opened: the process group comes from a file
    }


class _Pool:
    """The workers; bodies of n ranks run on the first n."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        self._workers: list[tuple[Any, Connection]] = []
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        atexit.register(self.kill)  # runs before: last in, first out

    def run(
        self, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        job = _make_job(num_ranks, fn, args, self._folder, timeout_s)
        self._start(num_ranks)
        for _, connection in self._workers[:num_ranks]:
            connection.send(job)
        results = self._collect(num_ranks, timeout_s)
        Path(job.store).unlink(missing_ok=True)
        errors = [result for result in results if result is not None and result.error is not None]
        if errors:
            first = min(errors, key=lambda result: result.time_s)
            error = first.error
            assert error is not None
            if isinstance(error, ChildProcessError):  # may have ended since another failed
                beside = [_described(r.error) for r in errors if r.error and r is not first]
                error = ChildProcessError("\n".join([str(error), *beside]))
            fine = [result for result in results if result is not None and result.error is None]
            error.__dict__["others"] = [result.value for result in fine]
            raise error
        return [result.value for result in results if result is not None]

    def kill(self) -> None:
        """Ends the workers; the next body starts new ones."""
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers.clear()

    def _start(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        started = []
        for rank in range(len(self._workers), num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, theirs, self._stack_file(rank)), daemon=True
            )
            with _changed_environment(_environment(rank, num_ranks)):
                process.start()
            theirs.close()
            self._workers.append((process, ours))
            started.append(ours)
        for connection in started:
            assert connection.poll(START_S), "a worker did not start"
            connection.recv()

    def _collect(self, num_ranks: int, timeout_s: float) -> list[Result | None]:
        """Waits for all ranks; one still busy when it should have ended costs the pool its life."""
        results: list[Result | None] = [None] * num_ranks
        end = time.monotonic() + timeout_s
        while None in results:
            waiting = {
                self._workers[rank][1]: rank
                for rank, result in enumerate(results)
                if result is None
            }
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                results[rank] = self._receive(rank, connection)
                if results[rank].error is not None:  # type: ignore[union-attr]
                    end = min(end, time.monotonic() + GRACE_S)
            if not ready:
                failed = any(result is not None and result.error for result in results)
                stacks = self._stacks(sorted(waiting.values()))
                self.kill()
                if failed:
                    return results
                raise AssertionError(
                    f"ranks {sorted(waiting.values())} ran past {timeout_s} s\n{stacks}"
                )
        if any(result is None or isinstance(result.error, ChildProcessError) for result in results):
            self.kill()
        return results

    def _receive(self, rank: int, connection: Connection) -> Result:
        try:
            result = pickle.loads(connection.recv_bytes())
            assert isinstance(result, Result)
            return result
        except (EOFError, ConnectionResetError):
            process = self._workers[rank][0]
            process.join(5)
            error = ChildProcessError(f"rank {rank} died with exit code {process.exitcode}")
            return Result(error=error, time_s=0.0)  # what others raise comes of it

    def _stack_file(self, rank: int) -> str:
        return os.path.join(self._folder, f"stacks-{rank}")

    def _stacks(self, ranks: list[int]) -> str:
        for rank in ranks:
            os.kill(self._workers[rank][0].pid, signal.SIGUSR1)
        files = [Path(self._stack_file(rank)) for rank in ranks]
        end = time.monotonic() + GRACE_S
        while not all(file.stat().st_size for file in files) and time.monotonic() < end:
            time.sleep(0.2)
        time.sleep(1.0)  # all of its threads
        return "\n".join(f"--- rank {r}\n{Path(self._stack_file(r)).read_text()}" for r in ranks)


_POOL = _Pool()


@contextmanager
def _changed_environment(values: dict[str, str]) -> Iterator[None]:
    old = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(old)


def _serve(rank: int, connection: Connection, stack_file: str) -> None:
    """The main function of a worker."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send("ready")
        while True:
            try:
                job = connection.recv()
            except EOFError:
                return
            connection.send_bytes(_dump(_run(job, rank)))


def _end_with_parent() -> None:
    """A worker whose test process was killed waits for its peers no more."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _dump(result: Result) -> bytes:
    """Pickles a result; one that cannot be pickled becomes an error that says so."""
    try:
        data = pickle.dumps(result)
        pickle.loads(data)
        return data
    except Exception as unpicklable:
        text = "".join(traceback.format_exception(result.error)) if result.error else ""
        error = RuntimeError(f"the result cannot be pickled: {unpicklable!r}\n{text}")
        return pickle.dumps(Result(error=error, time_s=result.time_s))


def _run(job: Job, rank: int) -> Result:
    with _changed_environment(_environment(rank, job.num_ranks)):
        folder = os.getcwd()
        try:
            return Result(value=_call(job, rank), time_s=time.monotonic())
        except BaseException as error:
            text = traceback.format_exc()
            if hasattr(error, "add_note"):
                error.add_note(f"on rank {rank}:\n{text}")
            error.__cause__ = error.__context__ = (
                None  # often not picklable, and in the text already
            )
            time_s = error.__dict__.pop("failed_at_s", time.monotonic())
            return Result(error=error.with_traceback(None), time_s=time_s)
        finally:
            os.chdir(folder)
            gc.collect()


def _call(job: Job, rank: int) -> Any:
    import torch
    import torch.distributed as dist

    sys.path[:] = job.path
    fn = getattr(_load_module(job.module, job.file), job.name)
    arguments = pickle.loads(job.arguments)
    torch.manual_seed(0)
    random.seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(job.store, job.num_ranks),
            rank=rank,
            world_size=job.num_ranks,
            timeout=timedelta(seconds=job.timeout_s + GRACE_S),
        )
        dist.barrier()  # a body that ends at once must not close connections still being made
    except BaseException as error:
        # a group half made leaves torch's counter of groups ahead of the other ranks': not reusable
        raise ChildProcessError(f"rank {rank} found no process group: {error!r}") from error
    try:
        return fn(*arguments)
    except BaseException as error:
        # before the group goes: what its end makes other ranks raise came second
        error.__dict__["failed_at_s"] = time.monotonic()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # closes the connections: peers that wait for us fail too


def _load_module(name: str, file: str) -> Any:
    """Imports a test module by name, or from its file if pytest made up the name."""
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == file:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _main() -> None:
    """One rank of `spawn_ranks`: exceptions end the process as they would end a user's script."""
    import torch

    torch.set_num_threads(1)
    job = pickle.loads(Path(sys.argv[1]).read_bytes())
    faulthandler.dump_traceback_later(job.timeout_s - 1)  # before `spawn_ranks` kills us
    _call(job, int(sys.argv[2]))
