"""What sequence lengths that change cost, against one fixed length: seconds per token.

All stages of each step run one after the other in this process, forward and backward. The first
length is traced before the clock starts, as the first batch is in a run; after that every length is
new. Times are processor time of this process; the ratio is of one run, so that the load of the
machine does not matter much.

    python benchmarks/shapes.py --layers 32 --lengths 32 --json shapes.json
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from models import TinyLlama, tokens
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_pipe.cuts import Cuts
from lightning_pipe.home import Home
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.ownership import Ownership, parameters_of_stages
from lightning_pipe.split.patching import find_metrics
from lightning_pipe.split.rows import split_batch
from lightning_pipe.split.signature import signature
from lightning_pipe.split.trace import Trace
from lightning_pipe.tail import Tail
from lightning_pipe.ways import Ways
from lightning_pipe.work import StageOfStep, StepRun, Trial

STATE = ("training_step", True, 0)


class Bench:
    """A model cut into stages that are all here.

    Args:
        num_layers: Decoder layers.
        num_stages: Stages.
        num_microbatches: Pieces of each batch.
        first: The batch that is traced first.
    """

    def __init__(
        self, num_layers: int, num_stages: int, num_microbatches: int, first: Tensor
    ) -> None:
        torch.manual_seed(0)
        self.module = TinyLlama(num_layers)
        self.module.log = lambda *args, **kwargs: None  # there is no Trainer
        self.num_stages, self.num_microbatches = num_stages, num_microbatches
        self.cuts = Cuts(self.module, 0, "cpu")
        self.num_traces, self.num_derived = 0, 0
        self.home: Home | None = None
        piece = split_batch(first, num_microbatches).batches[0]
        trace = self._trace(piece, None)
        starts = tuple(len(trace.calls) * s // num_stages for s in range(num_stages))
        cut = StepCut(trace, place(trace, starts))
        held = parameters_of_stages(self.module, cut)
        units = {c.unit: frozenset({cut.stage_of_call[c.index]}) for c in trace.calls}
        ownership = Ownership(self.module, frozenset().union(*held))
        self.home = Home(cut, starts, (0,) * num_stages, held, units, ownership)
        self.cuts.first(STATE, signature(piece), self.home)

    def _trace(self, piece: Tensor, memo: UnitMemo | None) -> Trace:
        self.num_traces += 1
        return trace_step(
            self.module,
            lambda batch: self.module.training_step(batch, 0),
            piece,
            num_stages=self.num_stages,
            like=None if self.home is None else self.home.cut.trace,
            memo=memo,
        )

    def step(self, batch: Tensor) -> None:
        """Runs one batch, forward and backward."""
        assert self.home is not None
        pieces = split_batch(batch, self.num_microbatches)
        cuts = []
        for piece in pieces.batches:
            find = lambda memo, piece=piece: self._trace(piece, memo)  # noqa: E731
            cuts.append(self.cuts.get(STATE, signature(piece), self.home, find, Ways()))
        unproven = [cut for cut in cuts if cut.unproven is not None]
        self.num_derived += bool(unproven)
        run = StepRun(
            *(self.module, Tail(self.module), lambda name: nullcontext(), "training_step", (0,)),
            *(pieces, cuts, 1, True, 1.0),
            trial=Trial(self.module, torch.device("cpu")) if unproven else None,
            metrics=find_metrics(self.module),
        )
        run.tail.start(pieces.rows, cuts[0].watched, cuts[0].changing)
        for microbatch in range(len(cuts)):
            self._run(run, microbatch)
        assert run.trial is None or run.trial.error is None, run.trial.error
        self.cuts.confirm(unproven)

    def _run(self, run: StepRun, microbatch: int) -> None:
        values: tuple[Tensor, ...] = ()
        kept: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        for stage in range(self.num_stages):
            work = StageOfStep(run, stage)
            received = tuple(
                value.detach().requires_grad_(spec.requires_grad)
                for value, spec in zip(values, work.inputs(microbatch), strict=True)
            )
            values = work.forward(microbatch, received)
            kept.append((received, values))
        grads: list[Tensor | None] = [None]
        for received, made in reversed(kept):
            torch.autograd.backward(made, grads)
            grads = [value.grad for value in received]


def step_s(bench: Bench, rows: int, length: int) -> float:
    """Runs one batch; returns processor seconds."""
    batch = tokens(rows, length)
    start_s = time.process_time()
    bench.step(batch)
    return time.process_time() - start_s


def measure(
    num_layers: int, num_stages: int, num_microbatches: int, num_lengths: int
) -> dict[str, Any]:
    """Measures fixed and changing lengths of the same mean, in turns."""
    rows, mean = 2 * num_microbatches, 64
    changing = [mean - num_lengths // 2 + n for n in range(num_lengths)]
    changing.append(changing.pop(0))
    bench = Bench(num_layers, num_stages, num_microbatches, tokens(rows, mean + num_lengths))
    bench.step(tokens(rows, mean + num_lengths))
    fixed_bench = Bench(num_layers, num_stages, num_microbatches, tokens(rows, mean))
    fixed_bench.step(tokens(rows, mean))
    fixed_s, new_s = 0.0, 0.0
    for length in changing:  # in turns, so that the load of the machine is the same for both
        fixed_s += step_s(fixed_bench, rows, mean)
        new_s += step_s(bench, rows, length)
    fixed = fixed_s / (rows * mean * num_lengths)
    new = new_s / (rows * sum(changing))
    return {
        "layers": num_layers,
        "stages": num_stages,
        "microbatches": num_microbatches,
        "lengths": num_lengths,
        "fixed_us_per_token": 1e6 * fixed,
        "changing_us_per_token": 1e6 * new,
        "ratio": new / fixed,
        "traces": bench.num_traces - 1,
        "first_steps_watched": bench.num_derived,
    }


def main() -> None:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--lengths", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(
        *(arguments.layers, arguments.stages, arguments.microbatches, arguments.lengths)
    )
    table = Table(title=f"{found['lengths']} sequence lengths, each of them new")
    table.add_column("")
    table.add_column("value", justify="right")
    for name, value in found.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}" if name == "ratio" else f"{value:.0f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
