"""Predicted against measured: step time and saved bytes of every schedule, and of a planned cut.

    python benchmarks/predicted_vs_measured.py [--ranks 2 4] [--work wait|compute] [--unit 0.012]

Units that wait stand for a device that computes: their time is known, and ranks do not share cores.
Costs are measured as for a plan, one unit at a time; then the step is predicted and run. One more
step counts what its graphs keep at most at a time for the backward, over all stages, beside what
the plan expects. The model with a heavy head is cut uniformly and by its measured times. Prints a
Markdown table; ratios are measured over predicted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.waiting import SCHEDULES, Wait, fit
from tests.helpers import run_ranks

STEPS, SKIPPED = 8, 2


class Block(nn.Module):
    """A unit that takes `load` seconds for each of F, I and W, or as many FLOPs as go with them."""

    def __init__(self, width: int, load: float, work: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.load, self.work = load, work
        if work == "compute":
            hidden = int(load * 1e3 * 16) * 16
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.work == "compute":
            return x + self.down(self.up(x * self.weight).relu())
        unit_s = self.load  # F, I and W each; W's wait is on the way to the weight alone
        return Wait.apply(x, unit_s, unit_s) * Wait.apply(self.weight, 0.0, unit_s)


def make_module(loads: list[float], work: str) -> Any:
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block(64, load, work) for load in loads)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (x,) = batch
            for block in self.blocks:
                x = block(x)
            return x.pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-9)

    return Lit()


def costs_of(loads: list[float], work: str, rows: int) -> str:
    """Measures the units, as `lightning-pipe plan --measure` does."""
    from lightning_pipe.runtime.measured import measured_costs

    module = make_module(loads, work)
    table = measured_costs(
        module,
        lambda batch: module.training_step(batch, 0),
        [torch.randn(rows, 64)],
        num_stages=1 if len(loads) < 2 else 2,
        device=torch.device("cpu"),
        rows=rows,
    )
    return table.to_json()


@dataclass(frozen=True)
class Measured:
    """Of one run: the median step, and what all stages keep at most for their backwards."""

    step_s: float
    unit_counts: tuple[int, ...]
    expected_bytes: int
    counted_bytes: int


def measure(loads: list[float], work: str, rows: int, arguments: dict[str, Any]) -> Measured:
    """Trains some steps on this job's ranks, and one more that counts."""
    import lightning.pytorch as pl

    seconds: list[float] = []
    held: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if len(seconds) == STEPS:
                trainer.strategy.count_activations()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seconds.append(trainer.strategy.gather_timeline().step_s)
            if len(seconds) > STEPS:
                held.extend(trainer.strategy.gather_memory())

    strategy = fit(make_module(loads, work), STEPS + 1, rows, [Watch()], width=64, **arguments)
    return Measured(
        statistics.median(seconds[SKIPPED:STEPS]),
        strategy.plan.unit_counts,
        sum(stage.traced_bytes for stage in held),
        sum(stage.activation_bytes for stage in held),
    )


def predict(
    loads: list[float], costs: str, counts: Any, name: str, ranks: int, pieces: int
) -> float:
    """Seconds of a step by the planner's own way."""
    from lightning_pipe.planning.choose import Candidate, try_one
    from lightning_pipe.planning.costs import CostTable
    from lightning_pipe.planning.profile import Profile, UnitProfile
    from lightning_pipe.planning.request import Request

    table = CostTable.from_json(costs)
    units = tuple(UnitProfile(f"blocks.{i}", weights=(f"{i}",)) for i in range(len(loads)))
    profile = Profile(units, {}, rows=table.rows)
    profile = profile.with_costs(table)
    request = Request(rows=table.rows * pieces, devices=ranks, balance=tuple(counts))
    candidate = Candidate(ranks, len(counts) // ranks, pieces, name)
    return try_one(_without_weights(profile), request, candidate).step_s


def _without_weights(profile: Any) -> Any:
    return replace(profile, units=tuple(replace(unit, weights=()) for unit in profile.units))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--work", choices=("wait", "compute"), default="wait")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--unit", type=float, default=12e-3, help="seconds of a unit's F")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, units {options.work}\n")
    print("| ranks | model | cut | schedule | predicted | measured | ratio | saved bytes | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            _print_rows(ranks, options, Path(folder) / "costs.json")


def _print_rows(ranks: int, options: argparse.Namespace, file: Path) -> None:
    unit, work = options.unit, options.work
    even, heavy_head = [unit] * 4 * ranks, [unit] * (4 * ranks - 1) + [3 * unit]
    rows, pieces = 8, 4 * ranks
    for model, loads, cuts in (
        ("even", even, ("uniform",)),
        ("heavy head", heavy_head, ("uniform", "time")),
    ):
        costs = costs_of(loads, work, rows)
        file.write_text(costs)
        for name in options.schedules:
            for cut in cuts:
                arguments = {
                    "num_microbatches": pieces, "schedule": name, "balance": cut,
                    "virtual_stages": SCHEDULES[name], "costs": str(file),
                }  # fmt: skip
                found = run_ranks(
                    ranks, measure, loads, work, rows * pieces, arguments, timeout=300
                )[0]
                guess_s = predict(loads, costs, found.unit_counts, name, ranks, pieces)
                print(
                    f"| {ranks} | {model} | {cut} | {name} | {guess_s * 1e3:.0f} ms "
                    f"| {found.step_s * 1e3:.0f} ms | {found.step_s / guess_s:.3f} "
                    f"| {found.expected_bytes:,} | "
                    f"{found.counted_bytes / found.expected_bytes:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
