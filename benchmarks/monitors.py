"""What the monitors cost, and whether the bubble that they measure is the schedule's.

    python benchmarks/monitors.py overhead [--step 0.2] [--blocks 8]
    python benchmarks/monitors.py bubbles [--ranks 2 4] [--unit 0.05]

`overhead` trains in blocks of 50 steps, with all monitors and without, in turns within one run, and
prints the ratio of the mean times; each block with monitors has one measurement of each. `bubbles`
prints measured and ideal bubble of every schedule on stages that only wait, and what the parts
miss of the whole; other work on the machine shows as bubble. Units wait instead of computing, so
ranks do not share cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.waiting import SCHEDULES, Wait, fit
from tests.helpers import run_ranks

BLOCK = 50


class Block(nn.Module):
    """A unit that waits as long for F as for I and W, and keeps some tensors for its backward."""

    def __init__(self, wait_s: float, num_kept: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.bias = nn.Parameter(torch.zeros(16))  # so that the first stage has a way back too
        self.wait_s, self.num_kept = wait_s, num_kept

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_kept):
            x = x.tanh()
        value = Wait.apply(x + self.bias, self.wait_s, self.wait_s)
        return value * Wait.apply(self.weight, 0.0, self.wait_s)


class Module(pl.LightningModule):
    """Units that wait.

    Args:
        num_units: How many.
        wait_s: Seconds of F, of I and of W of each.
        num_kept: Tensors that each keeps for its backward.
    """

    def __init__(self, num_units: int, wait_s: float, num_kept: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(wait_s, num_kept) for _ in range(num_units)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.blocks(batch[0]).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-9)


class Turns(pl.Callback):
    """Lets the monitors see every second block of steps, and times both kinds.

    Args:
        monitors: Callbacks.
    """

    def __init__(self, monitors: list[pl.Callback]) -> None:
        self.monitors = monitors
        self.times: dict[bool, list[float]] = {True: [], False: []}
        self.inside_s: list[float] = []  # in the monitors, after each watched step
        self._step, self._since_s = 0, None

    @property
    def watched(self) -> bool:
        """Whether this step belongs to a block with monitors; the first block has none."""
        return self._step // BLOCK % 2 == 1

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        for monitor in self.monitors:
            monitor.setup(trainer, module, stage)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for monitor in self.monitors:
            monitor.on_train_start(trainer, module)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        now_s = time.perf_counter()
        if self._since_s is not None and self._step > BLOCK:  # the first block warms up
            before = (self._step - 1) // BLOCK % 2 == 1
            self.times[before].append(now_s - self._since_s)
        self._since_s = now_s
        if self.watched:
            for monitor in self.monitors:
                monitor.on_train_batch_start(trainer, module, batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.watched:
            begin_s = time.perf_counter()
            for monitor in self.monitors:
                monitor.on_train_batch_end(trainer, module, outputs, batch, batch_idx)
            self.inside_s.append(time.perf_counter() - begin_s)
        self._step += 1


def overhead(step_s: float, blocks: int, folder: str) -> tuple[float, float, float]:
    """Mean seconds of a step with all monitors, without them, and of those inside of them."""
    from lightning.pytorch.loggers import CSVLogger

    from lightning_pipe import BubbleMonitor, PipelineDoctor, PipelineProgress, StageMemoryMonitor

    turns = Turns(
        [
            BubbleMonitor(every_n_steps=BLOCK),
            StageMemoryMonitor(every_n_steps=BLOCK),
            PipelineDoctor(),
            PipelineProgress(every_n_steps=BLOCK),
        ]
    )
    pieces, units = 8, 8
    # two ranks, 1F1B: (M + P - 1) times F, I and W of half the units
    wait_s = step_s / (pieces + 1) / 3 / (units / 2)
    steps = BLOCK * (2 * blocks + 1) + 1
    fit(Module(units, wait_s, num_kept=10), steps, 2 * pieces, [turns], num_microbatches=pieces,
        schedule="1f1b", logger=CSVLogger(folder))  # fmt: skip
    watched, plain = turns.times[True], turns.times[False]
    return statistics.mean(watched), statistics.mean(plain), statistics.mean(turns.inside_s)


def bubbles(cases: list[tuple[str, int, int]], wait_s: float) -> list[dict[str, Any]]:
    """Measured and ideal bubble of each (schedule, V, M), in the least disturbed of some steps."""

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            measured.append(trainer.strategy.gather_bubble())

    found = []
    ranks = int(os.environ["WORLD_SIZE"])
    for name, chunks, pieces in cases:
        measured: list[Any] = []
        units = ranks * chunks
        strategy = fit(
            Module(units, wait_s / chunks), 5, pieces, [Watch()],
            num_microbatches=pieces, schedule=name, virtual_stages=chunks,
        )  # fmt: skip
        best = min(measured[1:], key=lambda one: one.bubble_fraction)
        parts = sum(
            getattr(best, f"{part}_fraction")
            for part in ("fill_drain", "imbalance", "communication", "host")
        )
        ideal = strategy.bubble.ideal_fraction
        found.append({"ideal": ideal, "measured": best.bubble_fraction, "parts": parts})
    return found


def _legal(ranks: int) -> list[tuple[str, int, int]]:
    """The cases that may be asked for: not all schedules take few micro-batches."""
    from lightning_pipe.errors import ScheduleError
    from lightning_pipe.planning.schedules import validate_user

    cases = []
    for name, chunks in SCHEDULES.items():
        for pieces in (1, 4, 8, 16):
            try:
                validate_user(name, ranks, pieces, chunks)
            except ScheduleError:
                continue
            cases.append((name, chunks, pieces))
    return cases


def _print_bubbles(ranks: int, wait_s: float) -> None:
    cases = _legal(ranks)
    found = run_ranks(ranks, bubbles, cases, wait_s, timeout=3000)[0]
    for (name, chunks, pieces), one in zip(cases, found, strict=True):
        more = one["measured"] - one["ideal"]
        missing = abs(one["parts"] - one["measured"])
        print(
            f"| {ranks} | {name} | {chunks} | {pieces} | {one['ideal']:.3f} | "
            f"{one['measured']:.3f} | {more:+.3f} | {missing:.1e} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "bubbles"))
    parser.add_argument("--step", type=float, default=0.2, help="seconds of a step")
    parser.add_argument("--blocks", type=int, default=4, help="of each kind")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of F of a rank")
    options = parser.parse_args()
    if options.what == "overhead":
        with tempfile.TemporaryDirectory() as folder:
            results = run_ranks(2, overhead, options.step, options.blocks, folder, timeout=3000)
        watched_s, plain_s, inside_s = results[0]
        print(
            f"with all monitors {watched_s * 1e3:.2f} ms, without {plain_s * 1e3:.2f} ms: "
            f"{watched_s / plain_s - 1:+.2%}; in their hooks {inside_s / plain_s:.2%}"
        )
        return
    print("| P | schedule | V | M | ideal | measured | difference | parts miss |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in options.ranks:
        _print_bubbles(ranks, options.unit)


if __name__ == "__main__":
    main()
