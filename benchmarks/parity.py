"""Writes docs/parity.md: every model of the zoo, cut into stages, against the uncut step.

    python -m benchmarks.parity [--stages 2 4] [--no-schedules] [names ...]

The first table is made in one process, in about 5 minutes for each number of stages on a quiet
core; the second over two processes that are started once, in about 10.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tests import test_zoo_processes as processes
from tests.helpers import run_ranks
from tests.split.parity import compare, piece
from tests.zoo.catalogue import ZOO
from tests.zoo.unusual import UNUSUAL
from torch import Tensor

from lightning_pipe.errors import PipelineError
from lightning_pipe.split.analyse import trace_step

OUT = Path(__file__).parents[1] / "docs" / "parity.md"
MODELS = {**ZOO, **UNUSUAL}
HEAD = f"""# Parity, model by model

Written by `python -m benchmarks.parity` with torch {torch.__version__} on a CPU. The models are
tiny.

## Stages

Each model is cut into stages that all run in one process, and the gradients of two micro-batches
are compared with those of the uncut step (single precision). *Error* is the largest difference of
the loss, or of a gradient, relative to its largest entry; 0 is equal to the last bit. *Boundary* is
what the widest cut sends, in bytes and tensors. *Trace* is seconds on a machine that was busy.

"""
STAGES = """| model | stages | calls | loss error | gradient error | boundary | trace (s) |
|---|---|---|---|---|---|---|
"""
SCHEDULES = """
Known to differ: the running statistics of a BatchNorm that is called on two stages
(`siamese_batch_norm`). Refusals, among them fewer unit calls than stages, say why in their rows.

## Schedules

{count} of the models, chosen so that every rule of cutting is in one of them, trained for two steps
of AdamW over two processes, in double precision, four micro-batches a step. S is the number of
stages, P x V. The error is the largest difference of a weight, a buffer or the loss after that,
relative to its largest entry, from Lightning on one device (* from the same micro-batches on one
rank, where the model draws random numbers or its loss is no mean over rows).

"""


def stage_row(name: str, num_stages: int) -> str:
    """A row of the first table."""
    build = MODELS[name]
    case = build()
    start_s = time.perf_counter()
    try:
        trace_step(case.module, case.loss, piece(case.batch, 0), num_stages=num_stages)
        trace_s = time.perf_counter() - start_s
        result = compare(build, num_stages)
    except PipelineError as refusal:
        text = str(refusal).replace("\n", " ").replace("|", "/")
        return f"| {name} | {num_stages} | refused: {text} | | | | |"
    sizes = [
        (sum(torch.Size(v.shape).numel() * v.dtype.itemsize for v in b), len(b))
        for b in result.cut.boundaries
    ]
    size, count = max(sizes)
    wrong = f"; buffers differ: {len(result.wrong_buffers)}" if result.wrong_buffers else ""
    return (
        f"| {name} | {num_stages} | {len(result.cut.trace.calls)} | {result.loss_error:.0e} "
        f"| {result.gradient_error:.0e}{wrong} | {size} ({count}) | {trace_s:.1f} |"
    )


def schedule_row(name: str) -> str:
    """A row of the second table."""
    if name in processes.EXACT:
        expected, mark = processes._expected(name), ""
    else:
        alone = run_ranks(1, processes._over_stages, name, 1, 1, ("naive",), timeout=600)
        expected, mark = alone[0]["naive"], " *"
    cells = []
    for virtual_stages, schedules in processes.SCHEDULES.items():
        arguments = name, 2, virtual_stages, schedules
        ranks = run_ranks(2, processes._over_stages, *arguments, timeout=600)
        cells += [f"{error([rank[key] for rank in ranks], expected):.0e}" for key in schedules]
    return f"| {name}{mark} | {' | '.join(cells)} |"


def error(found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]) -> float:
    """The largest relative difference on any rank."""
    worst = 0.0
    for state in found:
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            if value.numel() and (value.is_floating_point() or value.is_complex()):
                scale = float(value.abs().max()) or 1.0
                worst = max(worst, float((state[key] - value).abs().max()) / scale)
            else:
                assert torch.equal(state[key], value), key
    return worst


def schedules_table(names: Sequence[str]) -> str:
    """The second table."""
    heads = [f"{s} S={2 * v}" for v, schedules in processes.SCHEDULES.items() for s in schedules]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        lines.append(schedule_row(name))
        print(lines[-1], flush=True, file=sys.stderr)
    return SCHEDULES.format(count=len(names)) + "\n".join(lines) + "\n"


def main() -> None:
    """Runs the models and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--no-schedules", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("names", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = options.names or list(MODELS)
    text = HEAD + STAGES
    for name in names:
        for num_stages in options.stages:
            text += stage_row(name, num_stages) + "\n"
            print(text.splitlines()[-1], flush=True, file=sys.stderr)
    if not options.no_schedules:
        known = (*processes.EXACT, *processes.SAME_MICROBATCHES)
        text += schedules_table([name for name in known if name in names])
    options.out.write_text(text)


if __name__ == "__main__":
    main()
