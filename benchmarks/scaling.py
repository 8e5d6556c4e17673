"""How pipelines scale, by simulation: 4 to 512 ranks, micro-batches, chunks, and what is sent.

    python benchmarks/scaling.py [--out benchmarks/results/scaling.json] [--most 1500000]

Every rank has the same number of layers, so the model grows with the ranks. Costs are those of a
layer of a decoder, from published formulas: FLOPs 24 b s h^2 (1 + s / 6h) forward and twice that
backward (Narayanan et al. 2021, appendix), kept bytes 34 s b h without those of attention
(Korthikanti et al. 2022, with selective recomputation), 16 bytes of weights, gradients and Adam a
parameter.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_pipe.planning.costs import LinkCosts, StageCosts
from lightning_pipe.planning.schedules import make_schedule
from lightning_pipe.planning.simulate import peak_activation_bytes, simulate

FLOPS_PER_S = 4e14  # what a layer reaches of an H100's 989e12 in bf16
NETWORK = LinkCosts(2e-5, 2.5e10)  # between machines: latency in s, bytes a second
LAYERS = 4  # of a rank: those of up to four chunks
SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))


@dataclass(frozen=True, slots=True)
class Model:
    """A layer of a decoder, and the rows of a micro-batch."""

    width: int = 8192
    length: int = 4096
    rows: int = 1

    @property
    def layer_parameters(self) -> int:
        return 12 * self.width**2

    @property
    def boundary_bytes(self) -> int:
        return 2 * self.rows * self.length * self.width

    @property
    def kept_bytes(self) -> int:
        return 34 * self.rows * self.length * self.width

    @property
    def forward_s(self) -> float:
        attention = 1 + self.length / (6 * self.width)
        flops = 24 * self.rows * self.length * self.width**2 * attention
        return flops / FLOPS_PER_S


def pipeline(model: Model, name: str, ranks: int, pieces: int, chunks: int) -> dict[str, float]:
    """Efficiency and memory of a schedule."""
    schedule = make_schedule(name, num_ranks=ranks, num_microbatches=pieces, virtual_stages=chunks)
    layers = LAYERS // chunks
    each_s = layers * model.forward_s
    costs = [
        StageCosts(
            each_s,
            each_s,
            each_s,
            activation_bytes=layers * model.kept_bytes,
            boundary_bytes=model.boundary_bytes,
        )
    ] * schedule.num_stages
    timeline = simulate(schedule, costs, NETWORK)
    kept = max(peak_activation_bytes(schedule, costs))
    return {
        "efficiency": 1 - timeline.bubble_fraction,
        "kept_gib": kept / 2**30,
        "weights_gib": 16 * LAYERS * model.layer_parameters / 2**30,
    }


def sent(model: Model, devices: int, pieces: int) -> dict[str, float]:
    """GB that a device sends in a step of a model of that many devices' layers.

    - Pipeline: activations ahead and gradients back, for each micro-batch.
    - FSDP: weights gathered for the forward and for the backward, gradients scattered; once for a
      step, whatever the rows of a device are.
    - Tensor parallel: two sums in the forward and two in the backward of each layer and
      micro-batch, each sends twice the activation but for the own part.
    """
    layers = LAYERS * devices
    own = (devices - 1) / devices
    return {
        "pipeline": 2 * pieces * model.boundary_bytes / 1e9,
        "fsdp": 3 * 2 * layers * model.layer_parameters * own / 1e9,
        "tensor": 4 * layers * pieces * 2 * model.boundary_bytes * own / 1e9,
    }


def actions(name: str, ranks: int, pieces: int, chunks: int) -> int:
    """How much there is to simulate."""
    return ranks * pieces * chunks * (3 if name == "zbv" else 2)


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Efficiency and kept bytes against ranks, a line for each schedule and number of pieces."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    colors = dict(zip(SCHEDULES, ("tab:blue", "tab:orange", "tab:red", "tab:green"), strict=True))
    for (name, chunks), color in colors.items():
        for times, style in ((1, ":"), (4, "-")):
            line = [
                f
                for f in found
                if (f["schedule"], f["chunks"], f["pieces"]) == (name, chunks, times * f["ranks"])
            ]
            label = f"{name}, V={chunks}, M={times}P"
            ranks = [f["ranks"] for f in line]
            left.plot(ranks, [f["efficiency"] for f in line], style, color=color, label=label)
            right.plot(ranks, [f["kept_gib"] for f in line], style, color=color)
    for axes, text in ((left, "part of the time that ranks work"), (right, "GiB of activations")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_title(text)
        axes.grid(alpha=0.3)
    right.set_yscale("log", base=2)
    left.set_ylim(0, 1)
    left.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Prints two tables, and writes numbers and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of the numbers; the plot is beside it")
    parser.add_argument("--most", type=int, default=1_500_000, help="actions of one simulation")
    given = parser.parse_args()
    model, found = Model(), []
    cases = [
        (name, chunks, ranks, times * ranks)
        for ranks in (4, 8, 16, 32, 64, 128, 256, 512)
        for times in (1, 2, 4)
        for name, chunks in SCHEDULES
        if actions(name, ranks, times * ranks, chunks) <= given.most
    ]
    for name, chunks, ranks, pieces in track(cases, description="simulations"):
        numbers = pipeline(model, name, ranks, pieces, chunks)
        case = {"schedule": name, "chunks": chunks, "ranks": ranks, "pieces": pieces}
        found.append({**case, **numbers})
    table = Table("ranks", "micro-batches", *(f"{n}, V={v}" for n, v in SCHEDULES))
    by_case = {(f["ranks"], f["pieces"], f["schedule"], f["chunks"]): f for f in found}
    for ranks, pieces in sorted({(f["ranks"], f["pieces"]) for f in found}):
        cells = [by_case.get((ranks, pieces, name, chunks)) for name, chunks in SCHEDULES]
        texts = [f"{c['efficiency']:.1%}, {c['kept_gib']:.0f} GiB" if c else "-" for c in cells]
        table.add_row(str(ranks), str(pieces), *texts)
    Console().print(table)
    volumes = Table("devices", "micro-batches", "pipeline", "FSDP", "tensor parallel")
    for devices in (4, 8, 64, 512):
        for pieces in (devices, 4 * devices):
            gb = sent(model, devices, pieces)
            volumes.add_row(
                str(devices), str(pieces), *(f"{value:,.1f} GB" for value in gb.values())
            )
    Console().print(volumes)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1))
        plot(found, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
