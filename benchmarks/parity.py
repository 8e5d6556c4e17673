"""Writes docs/parity.md: every model of the zoo, cut into stages, against the uncut step.

    python -m benchmarks.parity [--stages 2 4] [names ...]

All stages run in one process, two micro-batches, single precision; the error is the largest one of
a gradient, relative to the largest entry of that gradient. Over processes and with every schedule,
the same is done by tests/test_zoo_processes.py and tests/test_transparency.py.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path

import torch
from tests.split.parity import compare, piece
from tests.zoo.catalogue import ZOO
from tests.zoo.unusual import UNUSUAL

from lightning_pipe.errors import PipelineError
from lightning_pipe.split.analyse import trace_step

OUT = Path(__file__).parents[1] / "docs" / "parity.md"
HEAD = f"""# Parity, model by model

Written by `python -m benchmarks.parity` with torch {torch.__version__} on a CPU: each model, in
tiny, is cut into stages that all run in one process, and the gradients of two micro-batches are
compared with those of the uncut step (single precision). *Error* is the largest difference of a
gradient, relative to that gradient's largest entry; 0 is equal to the last bit. *Boundary* is what
the widest cut sends, in bytes and tensors. *Trace* is seconds on a machine that was busy.

Over two processes, `tests/test_zoo_processes.py` trains 20 of these models with naive, gpipe, 1f1b
and zero_bubble (V = 1), and interleaved_1f1b, looped_bfs, zbv and dualpipev (V = 2), in double
precision to 1e-9; `tests/test_transparency.py` trains seven more over one, two and four.

| model | stages | calls | loss error | gradient error | boundary | trace (s) |
|---|---|---|---|---|---|---|
"""


def _row(name: str, num_stages: int) -> str:
    build = {**ZOO, **UNUSUAL}[name]
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


def main() -> None:
    """Runs the models and writes the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("names", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.out.write_text(HEAD)
    for name in options.names or [*ZOO, *UNUSUAL]:
        for num_stages in options.stages:
            with options.out.open("a") as file:
                file.write(_row(name, num_stages) + "\n")


if __name__ == "__main__":
    main()
