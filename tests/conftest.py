"""What every test gets: a known seed and an environment that it cannot leave changed."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers import run_ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports torch


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "random trainings, see tests/fuzz")
    group.addoption("--fuzz-examples", type=int, default=30, help="how many")
    group.addoption("--fuzz-seed", type=int, default=0, help="seed of the first")


@pytest.fixture(autouse=True)
def _unchanged_process() -> Iterator[None]:
    environment, folder = dict(os.environ), Path.cwd()
    random.seed(0)
    torch = sys.modules.get("torch")  # planning is tested without it
    if torch is not None:
        torch.manual_seed(0)
    yield
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_default_dtype(torch.float32)
        assert not torch.distributed.is_initialized(), "the test left a process group behind"
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def pool() -> Callable[..., list[Any]]:
    """`pool(n, fn, *args, timeout=60)`: see `helpers.run_ranks`."""
    return run_ranks
