"""What differs by the type of device: backend of transfers, clock, memory, random state."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lightning_pipe.errors import ConfigError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment on a device; read it when the device has passed it, which `read_marks` waits for."""

    time_s: float
    event: Any = None


def backend(device_type: str) -> str:
    """The process group backend that moves tensors of a device type.

    >>> backend("cuda")
    'nccl'
    """
    if device_type not in _BACKENDS:
        raise ConfigError(
            f"device {device_type!r}: no backend moves its tensors between ranks; "
            f"{', '.join(_BACKENDS)} work"
        )
    return _BACKENDS[device_type]


def count_of(device_type: str) -> int | None:
    """Devices of a type that this machine has; None for the CPU, which any number may share."""
    if device_type == "cpu":
        return None
    return int(getattr(torch, device_type).device_count())


def mark(device: torch.device) -> Mark:
    """Notes the moment at which the device gets to here, without waiting for it."""
    if device.type == "cpu":
        return Mark(time.perf_counter())
    event = torch.Event(device.type, enable_timing=True)
    event.record()
    return Mark(time.perf_counter(), event)


def read_marks(marks: list[Mark]) -> list[float]:
    """Seconds of each mark on the clock of `time.perf_counter`.

    A device has a clock of its own, so its times are counted from the first mark, which is taken to
    be when the host made it.
    """
    if not marks or marks[0].event is None:
        return [moment.time_s for moment in marks]
    first = marks[0]
    for moment in marks:
        moment.event.synchronize()
    return [first.time_s + first.event.elapsed_time(moment.event) / 1e3 for moment in marks]


def memory_stats(device: torch.device) -> dict[str, int]:
    """Bytes in use now and at most, and of the whole device.

    Of the device's allocator, which also says what it has reserved; on the CPU of the process,
    beside the memory of the machine.
    """
    module = _module(device)
    if module is not None:
        return {
            "allocated_bytes": int(module.memory_allocated(device)),
            "peak_bytes": int(module.max_memory_allocated(device)),
            "reserved_bytes": int(module.memory_reserved(device)),
            "total_bytes": total_memory(device),
        }
    resident_bytes = int(psutil.Process().memory_info().rss)
    peak_bytes = resident_bytes
    if sys.platform != "win32":
        import resource

        unit_bytes = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return {
        "allocated_bytes": resident_bytes,
        "peak_bytes": max(peak_bytes, resident_bytes),
        "total_bytes": total_memory(device),
    }


_SAYS_OUT_OF_MEMORY = ("DefaultCPUAllocator: ", "out of memory", "_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that the memory of the device or of the host is full.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("a shape is wrong"))
    (True, False)
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in _SAYS_OUT_OF_MEMORY
    )


def total_memory(device: torch.device) -> int:
    """Bytes that a device has; on the CPU, the machine."""
    module = _module(device)
    if module is None:
        return int(psutil.virtual_memory().total)
    return int(module.get_device_properties(device).total_memory)


def get_rng_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The states of torch's generators, of the host and of the device."""
    module = _module(device)
    return torch.get_rng_state(), None if module is None else module.get_rng_state(device)


def set_rng_state(device: torch.device, state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    """Puts back what `get_rng_state` returned."""
    module = _module(device)
    torch.set_rng_state(state[0])
    if module is not None and state[1] is not None:
        module.set_rng_state(state[1], device)


def _module(device: torch.device) -> Any:
    """`torch.cuda` and its like; None for the CPU."""
    return None if device.type == "cpu" else getattr(torch, device.type)
