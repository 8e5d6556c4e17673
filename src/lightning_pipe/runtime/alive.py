"""Whether a process of this machine still lives: its number alone may be another's by now."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Identity:
    """A process, as others of its machine can find it.

    Attributes:
        machine: Where its number means something.
        pid: Its number.
        started_s: When it was started, which tells it from a later one of that number.
    """

    machine: str
    pid: int
    started_s: float

    @classmethod
    def own(cls) -> Identity:
        """This process."""
        pid = os.getpid()
        return cls(_machine(), pid, psutil.Process(pid).create_time())

    @property
    def is_here(self) -> bool:
        """Whether it is on the machine of this process."""
        return self.machine == _machine()

    def is_dead(self) -> bool:
        """Whether it has ended, as far as can be told: one of another machine never has."""
        if not self.is_here:
            return False
        try:
            process = psutil.Process(self.pid)
            is_other = float(process.create_time()) != self.started_s
            return is_other or str(process.status()) == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def kill(self) -> None:
        """Ends it, if it is still there."""
        if self.is_here and not self.is_dead():
            os.kill(self.pid, signal.SIGKILL)


def _machine() -> str:
    """Host name and, on Linux, the name space of process numbers: containers have their own."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{socket.gethostname()} {space}"
