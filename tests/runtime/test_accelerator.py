"""The table of devices, as far as a CPU can tell."""

import pytest
import torch

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime.accelerator import (
    backend,
    get_rng_state,
    mark,
    memory_stats,
    read_marks,
    set_rng_state,
)

CPU = torch.device("cpu")


def test_backends():
    assert [backend(name) for name in ("cpu", "cuda", "xpu")] == ["gloo", "nccl", "xccl"]
    with pytest.raises(ConfigError, match=r"device 'mps': .* cpu, cuda, xpu work"):
        backend("mps")


def test_marks_are_in_order():
    marks = [mark(CPU) for _ in range(3)]
    times = read_marks(marks)
    assert times == sorted(times)
    assert read_marks([]) == []


def test_memory_of_the_process():
    stats = memory_stats(CPU)
    assert 10_000_000 < stats["allocated_bytes"] <= stats["peak_bytes"]


def test_random_state_comes_back():
    state = get_rng_state(CPU)
    first = torch.rand(3)
    set_rng_state(CPU, state)
    assert torch.equal(torch.rand(3), first)
