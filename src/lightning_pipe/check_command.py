"""`lightning-pipe check`: whether a run over stages is that of one device, before it costs
anything.

A training step of the user's own model and first batch is taken on one device, then over two
stages, with micro-batches, with the layout of the config and with recomputation, and compared
parameter by parameter. The processes are those of a real run (gloo on this machine), started once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence

from lightning_pipe.checking import jobs
from lightning_pipe.checking.subject import Asked, Facts
from lightning_pipe.checking.walk import Row, Walk
from lightning_pipe.checking.workers import Workers
from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.plan import columns
from lightning_pipe.runtime.accelerator import backend, count_of

__all__ = ["check"]

_KINDS = {"gpu": "cuda"}


def check(arguments: Sequence[str]) -> bool:
    """Checks a config, prints what was compared, and says whether all of it was right."""
    options, rest = _parser().parse_known_args(arguments)
    asked = Asked(tuple(rest), options.accelerator, options.rows)
    kind = _KINDS.get(options.accelerator, options.accelerator)
    backend(kind)  # refuses what is none
    _refuse_fewer(asked.accelerator, 2)
    with tempfile.TemporaryDirectory() as folder, Workers(2, folder, kind) as workers:
        rows = list(walk(workers, asked, timeout_s=options.timeout, on_row=_say))
    print("\n".join(_report(rows)))
    return all(row.is_right for row in rows)


def walk(
    workers: Workers,
    asked: Asked,
    *,
    timeout_s: float,
    on_row: Callable[[Row], None],
) -> list[Row]:
    """All steps of a check, up to the first that fails.

    Args:
        workers: Its processes.
        asked: What is checked.
        timeout_s: How long a step may take.
        on_row: Told of each step when it is over.
    """
    (answer,) = workers.run(1, jobs.facts_of, asked, timeout_s=timeout_s)
    if answer.error:
        said = workers.printed(0) if answer.error.startswith("SystemExit") else answer.trace
        what = "is refused" if answer.is_ours else "cannot be read"
        said = "" if answer.is_ours else f"\n{said}"
        name = "-  the config, its model and its first batch"
        return [Row(name, False, cause=f"{what}. {answer.error}{said}")]
    facts: Facts = answer.value
    _refuse_fewer(asked.accelerator, max(2, facts.num_ranks * facts.copies))
    print(_head(facts), flush=True)
    rows = []
    for row in Walk(workers, asked, facts, timeout_s).rows():
        rows.append(row)
        on_row(row)
    return rows


def _refuse_fewer(accelerator: str, wanted: int) -> None:
    """Refuses an accelerator of which there is less than one for each rank."""
    number = count_of(_KINDS.get(accelerator, accelerator))
    if number is not None and number < wanted:
        raise ConfigError(
            f"--accelerator {accelerator}: this machine has {number} such devices, and the check "
            f"needs {wanted}, one for each rank. Without the argument it runs on the CPU, in any "
            "number of processes"
        )


def _say(row: Row) -> None:
    print(f"{row.name}: {'right' if row.is_right else 'WRONG'}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe check",
        description="Takes one training step of your model on your first batch on one device and "
        "over stages, and compares loss, gradients, buffers and logged values. Stops at the first "
        "difference, with its cause. Writes nothing.",
        epilog="All other arguments are those of `lightning-pipe fit`: --config fit.yaml, ...",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--rows", type=int, metavar="N", help="rows of the batch; by default 2 per micro-batch")
    add("--accelerator", default="cpu", help="cpu, or one with a device for each rank")
    add("--timeout", type=float, default=120.0, metavar="S", help="seconds that a step may take")
    return parser


def _head(facts: Facts) -> str:
    used = f"{facts.rows} of {facts.of_rows} rows" if facts.rows < facts.of_rows else "all rows"
    ran, asked = facts.precision
    bits = f"precision {ran}" + ("" if ran.startswith(asked[:2]) else f" instead of {asked}")
    shared = "" if facts.sharers == 1 else f"; without tensor_parallel_size={facts.sharers}"
    return f"batch: {facts.shown}; {used}; {bits}{shared}"


def _report(rows: Sequence[Row]) -> list[str]:
    table = [["step", "values", "loss", "largest gradient error", "buffers", "logged", ""]]
    for row in rows:
        found, word = row.comparison, "right" if row.is_right else "WRONG"
        if found is None:
            table.append([row.name, "", "", "", "", "", word])
            continue
        where = f"{found.gradient_error:.0e} {found.parameter}".strip()
        table.append(
            [
                row.name,
                f"{found.values:,}",
                f"{found.loss_error:.0e}",
                where,
                f"{found.buffer_error:.0e}" if found.buffer else "-",
                f"{found.logged_error:.0e}" if found.logged else "-",
                word,
            ]
        )
    lines = columns(table, left=0)
    for row in rows:
        if row.remark:
            lines.append(f"{row.name.split('  ')[0]}: {row.remark}")
    if rows and not rows[-1].is_right:
        lines += ["", f"{rows[-1].name}: {rows[-1].cause}"]
    return lines
