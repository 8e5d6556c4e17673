"""Predicted against measured: step time of every schedule, and what a planned cut gains.

    python benchmarks/predicted_vs_measured.py [--ranks 2 4] [--work wait|compute]

Units that wait stand for a device that computes: their time is known, and ranks do not share cores.
Costs are measured as for a plan, one unit at a time; then the step is predicted and run. Prints a
Markdown table; the last column is measured over predicted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import run_ranks

SCHEDULES = {
    "naive": 1, "gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_1f1b": 2, "looped_bfs": 2,
    "zbv": 2, "dualpipev": 2,
}  # fmt: skip
STEPS, SKIPPED = 9, 3


class _Wait(torch.autograd.Function):
    """Passes a value on, and takes so long forward and so long backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, forward_s: float, backward_s: float) -> Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.backward_s)
        return grad, None, None


class Block(nn.Module):
    """A unit that takes a known time, or a known number of FLOPs."""

    def __init__(self, width: int, load: float, work: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.load, self.work = load, work
        if work == "compute":
            hidden = int(load * 64) * 16
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.work == "compute":
            return x + self.down(self.up(x * self.weight).relu())
        unit_s = self.load * 4e-3  # F, I and W each; W's wait is on the way to the weight alone
        return _Wait.apply(x, unit_s, unit_s) * _Wait.apply(self.weight, 0.0, unit_s)


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
    from lightning_pipe.split.measure import measure_units

    module = make_module(loads, work)
    table = measure_units(
        module,
        lambda batch: module.training_step(batch, 0),
        [torch.randn(rows, 64)],
        num_stages=1 if len(loads) < 2 else 2,
        device=torch.device("cpu"),
        rows=rows,
    )
    return table.to_json()


def measure(loads: list[float], work: str, rows: int, arguments: dict[str, Any]) -> Any:
    """Trains some steps; the median seconds of a step, and how many units each stage has."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_pipe import PipelineStrategy

    warnings.simplefilter("ignore")
    seconds: list[float] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            timeline = trainer.strategy.gather_timeline()
            seconds.append(timeline.step_s)

    strategy = PipelineStrategy(**arguments)
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy,
        max_steps=STEPS, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Watch()],
    )  # fmt: skip
    data = TensorDataset(torch.randn(STEPS * rows, 64))
    trainer.fit(make_module(loads, work), DataLoader(data, batch_size=rows))
    return statistics.median(seconds[SKIPPED:]), strategy.plan.unit_counts


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
    from dataclasses import replace

    return replace(profile, units=tuple(replace(unit, weights=()) for unit in profile.units))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--work", choices=("wait", "compute"), default="wait")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, units {options.work}\n")
    print("| ranks | model | schedule | predicted | measured | ratio |\n|---|---|---|---|---|---|")
    for ranks in options.ranks:
        models = {"even": [1.0] * 4 * ranks, "uneven": [1.0] * (4 * ranks - 1) + [3.0]}
        for model, loads in models.items():
            rows, pieces = 8, 4 * ranks
            costs = costs_of(loads, options.work, rows)
            for name in options.schedules:
                chunks = SCHEDULES[name]
                arguments = {
                    "num_microbatches": pieces, "schedule": name, "virtual_stages": chunks,
                    "balance": "uniform",
                }  # fmt: skip
                results = run_ranks(
                    ranks, measure, loads, options.work, rows * pieces, arguments, timeout=300
                )
                seconds, counts = results[0]
                guess = predict(loads, costs, counts, name, ranks, pieces)
                print(
                    f"| {ranks} | {model} | {name} | {guess * 1e3:.0f} ms | {seconds * 1e3:.0f} ms "
                    f"| {seconds / guess:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
