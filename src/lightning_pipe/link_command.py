"""`lightning-pipe link`: how fast values get from one process to another, for plans.

Alone it starts two processes on this machine; under `torchrun` it measures between the processes
that are there, on one machine and between two.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planfile import read_costs
from lightning_pipe.planning.costs import LinkCosts
from lightning_pipe.runtime.accelerator import backend
from lightning_pipe.runtime.link import measure_link
from lightning_pipe.runtime.ranks import make_ranks
from lightning_pipe.runtime.share import gather_objects

__all__ = ["link"]

_LOCAL = 2  # processes that are started here
_TIMEOUT = timedelta(minutes=2)


def link(arguments: Sequence[str]) -> None:
    """Measures the links, prints them as `plan` takes them, and keeps them in a cost table."""
    options = _parser().parse_args(arguments)
    if options.costs is not None and os.environ.get("RANK", "0") == "0":  # it writes them
        _check_costs(options.costs)
    kind = options.device or ("cuda" if torch.cuda.device_count() >= _LOCAL else "cpu")
    backend(kind)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group(backend(kind), timeout=_TIMEOUT)
        try:
            _measure(kind, options.costs, int(os.environ.get("LOCAL_RANK", "0")))
        finally:
            dist.destroy_process_group()
        return
    if kind == "cuda" and torch.cuda.device_count() < _LOCAL:
        raise ConfigError(
            f"--device cuda: {torch.cuda.device_count()} of {_LOCAL} devices are here; run it "
            "with torchrun where there are more, or give --device cpu"
        )
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_each = (f"{folder}/store", kind, options.costs)
        mp.spawn(_local, arguments_of_each, _LOCAL)  # type: ignore[attr-defined, no-untyped-call]


def _check_costs(path: str) -> None:
    """Before anything is measured: whether the links can be added to this file."""
    if not Path(path).is_file():
        raise PlanError(
            f"--costs {path}: no such file; `lightning-pipe plan --measure DEVICE "
            "--save-costs FILE` makes a table of the units, which the links are added to"
        )
    read_costs(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe link",
        description="Measures latency and bandwidth between two processes of this machine; with "
        "`torchrun --nnodes 2 ... -m lightning_pipe.cli link` between two machines as well.",
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "xpu"), help="cuda if there are two")
    parser.add_argument("--costs", metavar="FILE", help="add the links to what --save-costs wrote")
    return parser


def _local(rank: int, store: str, kind: str, costs: str | None) -> None:
    """One of the processes that are started here."""
    torch.set_num_threads(1)
    file = dist.FileStore(store, _LOCAL)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend(kind), store=file, rank=rank, world_size=_LOCAL,
        timeout=_TIMEOUT,
    )  # fmt: skip
    try:
        _measure(kind, costs, rank)
    finally:
        dist.destroy_process_group()


def _measure(kind: str, costs: str | None, local_rank: int) -> None:
    """Measures from the first process to another of its machine, and to one of another machine."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind == "cuda":
        torch.cuda.set_device(device)
    size = dist.get_world_size()
    ranks = make_ranks(tuple(range(size)), size)
    hosts = gather_objects(ranks, socket.gethostname()) or []
    found: dict[str, LinkCosts] = {}
    for name, same in (("link", True), ("node_link", False)):
        others = [p for p in range(1, size) if (hosts[p] == hosts[0]) == same]
        if others:
            found[name] = measure_link(ranks, device, first=0, second=others[0])
    if not ranks.is_first:
        return
    for name, measured in found.items():
        option = f"--{name.replace('_', '-')}"
        print(f"{option} {measured.latency_s:.3g},{measured.bytes_per_s:.3g}")
    if costs is not None:
        table = read_costs(costs)
        kept = replace(
            table,
            link=found.get("link", table.link),
            node_link=found.get("node_link", table.node_link),
        )
        Path(costs).write_text(kept.to_json(), encoding="utf-8")
        print(f"added to {costs}")
