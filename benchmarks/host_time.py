"""What the step program costs the host, for each stage and micro-batch.

All stages of a step run one after the other in this process. The time of a stage is that of
everything but its own units: ghosts of earlier units, glue, seeds, what is kept of the tail. The
plain forward of the whole model in the same run is there to compare with: absolute numbers depend
on the machine and its load. Times are processor time of this process.

    python benchmarks/host_time.py --layers 32 --stages 4 --json host_time.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from models import TinyLlama, tokens
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_pipe.home import CutStep
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place
from lightning_pipe.split.patching import find_metrics
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.rows import Pieces
from lightning_pipe.tail import Tail
from lightning_pipe.work import StageOfStep, StepRun


class UnitClock:
    """Adds up the time that units take."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.total_s = 0.0
        self._start_s: float | None = None
        for module in modules:
            module.register_forward_pre_hook(self._starts)
            module.register_forward_hook(self._ends)

    def _starts(self, module: nn.Module, args: Any) -> None:
        self._start_s = time.process_time()

    def _ends(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._start_s is not None:  # a ghost runs the hook after the call only
            self.total_s += time.process_time() - self._start_s
        self._start_s = None


def cut_model(module: TinyLlama, batch: torch.Tensor, num_stages: int) -> tuple[CutStep, float]:
    """Traces the step and cuts it into stages of as many calls; also says what the trace took."""
    log, module.log = module.log, lambda *args, **kwargs: None  # there is no Trainer
    start_s = time.process_time()
    trace = trace_step(module, lambda b: module.training_step(b, 0), batch, num_stages=num_stages)
    trace_s = time.process_time() - start_s
    module.log = log
    starts = tuple(len(trace.calls) * stage // num_stages for stage in range(num_stages))
    cut = StepCut(trace, place(trace, starts))
    step = CutStep(cut, (0,) * num_stages)
    for stage in range(num_stages):
        step.programs[stage] = StageProgram(cut, stage, module)
    return step, trace_s


def run_step(module: TinyLlama, cut: CutStep, batch: torch.Tensor, clock: UnitClock) -> list[Any]:
    """Runs every stage on one micro-batch; returns (host seconds, unit seconds) of each."""
    tail = Tail(module)
    step = StepRun(
        *(module, tail, lambda name: nullcontext(), "training_step", (0,)),
        *(Pieces((batch,), (len(batch),)), [cut], 1, True, 1.0),
        metrics=find_metrics(module),
    )
    tail.start((len(batch),), cut.watched, cut.changing)
    found, values = [], ()
    for stage in sorted(cut.programs):
        work = StageOfStep(step, stage)
        specs = work.inputs(0)
        received = tuple(
            value.detach().requires_grad_(spec.requires_grad)
            for value, spec in zip(values, specs, strict=True)
        )
        clock.total_s = 0.0
        start_s = time.process_time()
        values = work.forward(0, received)
        whole_s = time.process_time() - start_s
        found.append((whole_s - clock.total_s, clock.total_s))
    return found


def measure(num_layers: int, num_stages: int, repeats: int) -> dict[str, Any]:
    """Measures a model; times are medians over `repeats` micro-batches, in milliseconds."""
    torch.manual_seed(0)
    module = TinyLlama(num_layers)
    batch = tokens(2, 16)
    cut, trace_s = cut_model(module, batch, num_stages)
    clock = UnitClock([module.get_submodule(name) for name in cut.cut.trace.unit_names])
    run_step(module, cut, batch, clock)
    runs, plain = [], []
    for _ in range(repeats):
        runs.append(run_step(module, cut, batch, clock))
        start_s = time.process_time()
        module.model(input_ids=batch, labels=batch, use_cache=False)
        plain.append(time.process_time() - start_s)
    stages = [
        {
            "stage": stage,
            "ghost_calls": cut.cut.first_call(stage),
            "own_calls": len(cut.cut.calls_of(stage)),
            "host_ms": 1e3 * statistics.median(run[stage][0] for run in runs),
            "units_ms": 1e3 * statistics.median(run[stage][1] for run in runs),
        }
        for stage in range(num_stages)
    ]
    return {
        "layers": num_layers,
        "trace_s": trace_s,
        "plain_forward_ms": 1e3 * statistics.median(plain),
        "stages": stages,
    }


def main() -> None:
    """Prints a table, and writes JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(arguments.layers, arguments.stages, arguments.repeats)
    table = Table(
        title=f"Host time of a {found['layers']}-layer Llama; plain forward "
        f"{found['plain_forward_ms']:.1f} ms, trace {found['trace_s']:.2f} s"
    )
    for column in ("stage", "ghosts", "own units", "host ms", "units ms", "host / plain forward"):
        table.add_column(column, justify="right")
    for stage in found["stages"]:
        share = stage["host_ms"] / found["plain_forward_ms"]
        table.add_row(
            *(str(stage["stage"]), str(stage["ghost_calls"]), str(stage["own_calls"])),
            *(f"{stage['host_ms']:.2f}", f"{stage['units_ms']:.2f}", f"{share:.0%}"),
        )
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
