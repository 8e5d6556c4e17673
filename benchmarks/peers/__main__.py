"""Who trains one model faster, in turns in one run: `python -m benchmarks.peers`.

    python -m benchmarks.peers --rounds 3 --steps 8 "torch 1f1b" "ours 1f1b" "lightning ddp"

    python -m benchmarks.peers --python deepspeed=PATH/bin/python "torch 1f1b" "deepspeed 1f1b"

Peers that need packages of their own run in an environment of their own, made from
`benchmarks/peers/requirements-*.txt`. Without names, all run that can; ours "measured" are planned
from times of the units, which are taken first.

Contenders run one after the other, in rounds, so that a machine that slows down slows all. Prints a
table (median over rounds, spread, memory of a process, start-up) and writes it as JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import torch
from benchmarks.peers.contender import CONTENDERS
from benchmarks.peers.gpt import SIZES
from rich.console import Console
from rich.progress import track
from rich.table import Table

#: by whole layers: 5 blocks before the cut, 3 and the head after it
_CUTS = {
    1: {"gpt": [6, 4], "heavy-head": [8, 2], "small": [3, 3]},
    2: {"gpt": [3, 3, 2, 2], "heavy-head": [4, 3, 2, 1], "small": [2, 2, 1, 1]},
}
for _cuts in _CUTS.values():
    _cuts["gpt, 32 micro-batches"] = _cuts["gpt"]
#: peers with packages of their own
_ELSEWHERE = ("deepspeed", "colossalai")


def run(
    name: str,
    size: str,
    count: int,
    cut: str,
    timeout_s: float,
    python: str = sys.executable,
    costs: str | None = None,
) -> list[dict[str, Any]]:
    """One launch: what each process reports."""
    world, _ = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if costs is not None and name.endswith("measured"):
            environment["PEERS_COSTS"] = costs
        arguments = [str(world), f"{folder}/store", folder, size, str(count), str(time.time()), cut]
        processes = [
            subprocess.Popen(
                [python, "-m", "benchmarks.peers.contender", name, str(rank), *arguments],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        errors = []
        for process in processes:
            try:
                errors.append(process.communicate(timeout=timeout_s)[1])
            except subprocess.TimeoutExpired:
                for other in processes:
                    other.kill()
                raise SystemExit(f"{name} did not end within {timeout_s:.0f} s") from None
        if any(process.returncode for process in processes):
            raise SystemExit(f"{name} failed:\n" + "\n".join(error[-2000:] for error in errors))
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world)]


def measure(size: str, file: str) -> None:
    """Times the units of our contenders that are planned from measured costs."""
    command = [sys.executable, "-m", "benchmarks.peers.costs", size, file]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)


def chosen(names: list[str], pythons: dict[str, str]) -> list[str]:
    """The contenders to run: those that are named, or all that can.

    Args:
        names: What the command names; none means all.
        pythons: Interpreters of peers with packages of their own.
    """
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise SystemExit(f"no contender {unknown[0]!r}; there are: {', '.join(CONTENDERS)}")
    lacking = [n for n in names if n.startswith(_ELSEWHERE) and n.split()[0] not in pythons]
    if lacking:
        peer = lacking[0].split()[0]
        raise SystemExit(
            f"{lacking[0]!r} needs packages of its own: make an environment from "
            f"benchmarks/peers/requirements-{peer}.txt and give --python {peer}=PATH/bin/python"
        )
    there = [n for n in CONTENDERS if not n.startswith(_ELSEWHERE) or n.split()[0] in pythons]
    return names or there


def cut_of(name: str, size: str, given: str | None) -> str:
    """Layers of each stage, for contenders that take whole layers."""
    if "auto" in name or "its own cut" in name or name in ("one process", "lightning ddp"):
        return ""
    chunks = 2 if "interleaved" in name or "zbv" in name else 1
    if given is not None:
        return given if len(given.split(",")) == 2 * chunks else ""
    by_layers = name.startswith(("torch", *_ELSEWHERE)) or name.endswith("by layers")
    return ",".join(map(str, _CUTS[chunks][size])) if by_layers else ""


def table_of(found: dict[str, list[list[dict[str, Any]]]]) -> tuple[Table, dict[str, Any]]:
    """The table, and its numbers."""
    table = Table("contender", "s/step", "spread", "ratio", "MiB of a process", "to first step")
    numbers: dict[str, Any] = {}
    for name, rounds in found.items():
        times = [max(rank["median_s"] for rank in launch) for launch in rounds]
        memory = max(rank["peak_bytes"] for launch in rounds for rank in launch)
        first = median(max(rank["first_s"] for rank in launch) for launch in rounds)
        numbers[name] = {"seconds": times, "peak_bytes": memory, "first_s": first}
    base = median(next(iter(numbers.values()))["seconds"])
    for name, entry in numbers.items():
        times = entry["seconds"]
        middle = median(times)
        table.add_row(
            name,
            f"{middle:.3f}",
            f"{(max(times) - min(times)) / middle:.1%}",
            f"{middle / base:.3f}",
            f"{entry['peak_bytes'] / 2**20:.0f}",
            f"{entry['first_s']:.1f} s",
        )
    return table, numbers


def worse_than(numbers: dict[str, Any], earlier: dict[str, Any], allowed: float) -> list[str]:
    """Contenders whose time, as a ratio to the first one's, is larger than it was.

    Args:
        numbers: Those of this run; the first contender is what the others are compared with.
        earlier: Those of another run, maybe on another machine.
        allowed: By how much a ratio may be larger: the noise between launches is about 0.04.
    """
    first = next(iter(numbers))
    if first not in earlier:
        raise SystemExit(f"{first!r} is not in the earlier run, which has {sorted(earlier)}")

    def ratio(run: dict[str, Any], name: str) -> float:
        return median(run[name]["seconds"]) / median(run[first]["seconds"])

    found = []
    for name in numbers:
        if name in earlier and (now := ratio(numbers, name)) > ratio(earlier, name) + allowed:
            found.append(f"{name}: {now:.3f} of {first}, it was {ratio(earlier, name):.3f}")
    return found


def check(found: dict[str, list[list[dict[str, Any]]]]) -> None:
    """All contenders that tell whole losses have trained the same."""
    losses = {
        name: next(rank["losses"] for rank in rounds[0] if rank["losses"])
        for name, rounds in found.items()
        if name != "lightning ddp"  # whose logged loss is that of half the rows
    }
    first, *others = losses.values()
    for other in others:
        torch.testing.assert_close(torch.tensor(other), torch.tensor(first), rtol=2e-4, atol=2e-4)


def plot(numbers: dict[str, Any], path: Path) -> None:
    """A bar for each contender."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(numbers) + 1), layout="constrained")
    names = list(reversed(numbers))
    axes.barh(names, [median(numbers[n]["seconds"]) for n in names], color="tab:blue")
    for place, name in enumerate(names):
        axes.plot(numbers[name]["seconds"], [place] * len(numbers[name]["seconds"]), "k.")
    axes.set_xlabel("seconds a step (bar: median; dots: rounds)")
    figure.savefig(path)


def main() -> None:
    """Runs the contenders that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("contenders", nargs="*", help=", ".join(CONTENDERS))
    parser.add_argument("--size", choices=SIZES, default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cut", help="layers of each stage, for all: 6,4")
    parser.add_argument("--out", type=Path, help="file of the numbers; the plot is beside it")
    parser.add_argument("--python", action="append", default=[], help="deepspeed=PATH/bin/python")
    parser.add_argument("--against", type=Path, help="file of an earlier run: fails if worse")
    parser.add_argument("--allowed", type=float, default=0.04, help="larger ratio that is noise")
    given = parser.parse_args()
    pythons = dict(entry.split("=", 1) for entry in given.python)
    names = chosen(given.contenders, pythons)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        costs = f"{folder}/costs.json"
        if any(name.endswith("measured") for name in names):
            measure(given.size, costs)
        for _ in track(range(given.rounds), description="rounds"):
            for name, launches in found.items():
                cut = cut_of(name, given.size, given.cut)
                python = pythons.get(name.split()[0], sys.executable)
                launches.append(run(name, given.size, given.steps, cut, 600, python, costs))
    check(found)
    table, numbers = table_of(found)
    Console().print(table)
    if given.out is not None:
        machine = {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        given.out.write_text(json.dumps({"machine": machine, "contenders": numbers}, indent=1))
        plot(numbers, given.out.with_suffix(".png"))
    if given.against is not None:
        earlier = json.loads(given.against.read_text())["contenders"]
        if worse := worse_than(numbers, earlier, given.allowed):
            raise SystemExit("slower than before:\n" + "\n".join(worse))


if __name__ == "__main__":
    main()
