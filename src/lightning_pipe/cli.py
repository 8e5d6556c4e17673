"""The command line: `lightning-pipe fit --config run.yaml`, `lightning-pipe draw --schedule gpipe`.

`fit`, `validate`, `test` and `predict` are LightningCLI with `strategy=pipeline` as the default;
torch and Lightning are imported for them alone.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_pipe.errors import PipelineError
from lightning_pipe.planning.actionlog import merged
from lightning_pipe.planning.costs import StageCosts
from lightning_pipe.planning.doctor import examine
from lightning_pipe.planning.evidence import read_evidence
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.plan import format_bytes
from lightning_pipe.planning.render import chrome_trace, schedule_figure, schedule_text
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.planning.simulate import held_over_time, simulate

__all__ = ["check", "consolidate", "debug_merge", "doctor", "draw", "link", "main", "plan", "train"]

_SLOT_S = 1e-3  # a drawing has no clock: in a trace, one forward is a millisecond


def main() -> None:
    """Runs the command in `sys.argv`."""
    own = {
        "check": check,
        "debug-merge": debug_merge,
        "consolidate": consolidate,
        "doctor": doctor,
        "draw": draw,
        "link": link,
        "plan": plan,
    }
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command not in own:
        train()
        return
    try:
        own[command](sys.argv[2:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (PipelineError, OSError) as error:
        sys.exit(f"lightning-pipe {command}: {error}")


def plan(arguments: Sequence[str]) -> None:
    """Says whether a model fits and how to spread it, from the YAML of `fit`."""
    _find_classes_here()
    from lightning_pipe import plan_command

    plan_command.plan(arguments)


def check(arguments: Sequence[str]) -> None:
    """Says whether a run over stages gives the numbers of one device, from the YAML of `fit`."""
    _find_classes_here()
    from lightning_pipe import check_command

    if not check_command.check(arguments):
        sys.stdout.flush()
        sys.exit(1)


def link(arguments: Sequence[str]) -> None:
    """Measures how fast values get from one process to another."""
    from lightning_pipe import link_command

    link_command.link(arguments)


def consolidate(arguments: Sequence[str]) -> None:
    """Makes one plain checkpoint file of a folder that ranks have written."""
    parser = argparse.ArgumentParser(
        prog="lightning-pipe consolidate",
        description="Makes one ordinary Lightning checkpoint of a folder that was written with "
        "save_distributed_checkpoint. Takes host memory for the model and its optimizer.",
    )
    parser.add_argument("folder", help="the folder")
    parser.add_argument("file", help="the file to write")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="also load what is not tensors and plain data, which can run code of who made it",
    )
    options = parser.parse_args(arguments)
    from lightning_pipe.sharded import consolidate

    consolidate(options.folder, options.file, weights_only=not options.trusted)
    print(f"wrote {options.file}")


def _find_classes_here() -> None:
    """As with `python -m`: class paths start in this folder."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def train() -> Any:
    """LightningCLI: model and data by class path, the trainer by its arguments."""
    _find_classes_here()
    _refuse_unreadable(sys.argv[1:])
    from lightning.pytorch.cli import LightningCLI

    return LightningCLI(
        trainer_defaults={"strategy": "pipeline"},
        parser_kwargs={
            "prog": "lightning-pipe",
            "description": "Trains an ordinary LightningModule in a pipeline of processes.",
            "epilog": "Also: check, consolidate, debug-merge, doctor, draw, link and plan",
        },
    )


def _refuse_unreadable(arguments: Sequence[str]) -> None:
    """Ends with the name of a config file that is no text: of it, jsonargparse says but a byte."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name = argument.removeprefix("--config=") if "=" in argument else argument
        is_config = argument.startswith("--config=") or before in ("--config", "-c")
        if is_config and Path(name).is_file():
            try:
                Path(name).read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                sys.exit(f"lightning-pipe: the config {name} is no text in UTF-8: {error}")


def doctor(arguments: Sequence[str]) -> None:
    """Says what limited the speed of a run that is over, from its trace or its log directory."""
    parser = argparse.ArgumentParser(
        prog="lightning-pipe doctor",
        description="Says what limited the speed of a run, and what to change: what the callback "
        "PipelineDoctor says, in the same order.",
    )
    parser.add_argument(
        "path",
        metavar="TRACE_OR_LOGDIR",
        help="a trace of TimelineRecorder, or a log directory of a run with BubbleMonitor",
    )
    evidence = read_evidence(parser.parse_args(arguments).path)
    print(f"from {' and '.join(evidence.source)}")
    for verdict in examine(evidence.found, evidence.run, evidence.losses):
        print(f"\n{verdict.cause}: {verdict}")


def debug_merge(arguments: Sequence[str]) -> None:
    """Merges the files of a run with `debug=True` into one list, on one clock."""
    parser = argparse.ArgumentParser(
        prog="lightning-pipe debug-merge",
        description="Prints what all ranks of a run with PipelineStrategy(debug=True) did, in the "
        "order of one clock. The last line of each rank says where it was when the run ended.",
    )
    parser.add_argument("folder", metavar="DIR", help="where the files actions-rank-*.jsonl are")
    for line in merged(parser.parse_args(arguments).folder):
        print(line)


def draw(arguments: Sequence[str]) -> None:
    """Draws who computes what when, as a table, a picture or a trace."""
    options = _draw_parser().parse_args(arguments)
    costs = None
    if options.plan:
        schedule, costs = _of_plan(options.plan)
    else:
        schedule = make_schedule(
            options.schedule,
            num_ranks=options.stages,
            num_microbatches=options.microbatches,
            virtual_stages=options.virtual_stages,
        )
    files = {kind: getattr(options, kind) for kind in ("png", "svg", "trace")}
    if options.text or not any(files.values()):
        print(schedule_text(schedule))
        if costs is not None:
            print(_in_flight(schedule, costs))
    for kind, name in files.items():
        if name:
            _write(schedule, kind, Path(name), costs)


def _of_plan(path: str) -> tuple[Schedule, list[StageCosts]]:
    """The schedule of a plan and its stages, whose lengths are in proportion to their FLOPs."""
    from lightning_pipe.planfile import read_plan

    plan = read_plan(path)
    schedule = make_schedule(
        plan.schedule_name,
        num_ranks=plan.num_ranks,
        num_microbatches=plan.num_microbatches,
        virtual_stages=plan.virtual_stages,
        strict=False,
    )
    mean = sum(stage.flops for stage in plan.stages) / len(plan.stages) or 1.0
    lengths_s = [_SLOT_S * (stage.flops / mean or 1.0) for stage in plan.stages]
    costs = [
        StageCosts(length_s, length_s, length_s, stage.activation_bytes, stage.boundary_bytes)
        for length_s, stage in zip(lengths_s, plan.stages, strict=True)
    ]
    return schedule, costs


def _in_flight(schedule: Schedule, costs: Sequence[StageCosts]) -> str:
    """Bytes of activations that each rank holds at its peak, and when that is."""
    lines = ["", "bytes in flight at the peak, and when in the step"]
    timeline = simulate(schedule, costs)
    for rank, moments in enumerate(held_over_time(timeline, costs)):
        time_s, held = max(moments, key=lambda moment: (moment[1], -moment[0]), default=(0.0, 0))
        share = time_s / timeline.step_s if timeline.step_s else 0.0
        lines.append(f"rank {rank} | {format_bytes(held)} at {share:.0%}")
    return "\n".join(lines)


def _draw_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-pipe draw",
        description="Draws who computes what when, for equal stages whose backward takes as long "
        "as two forwards. Prints a table unless a file is asked for.",
    )
    names = ", ".join(SCHEDULES)
    parser.add_argument("--schedule", default="1f1b", help=f"{names}, or the path of a CSV file")
    parser.add_argument("--stages", type=int, default=4, metavar="P", help="ranks of the pipeline")
    parser.add_argument(
        "--microbatches", type=int, default=8, metavar="M", help="micro-batches per step"
    )
    parser.add_argument(
        "--virtual-stages", type=int, default=1, metavar="V", help="chunks of the model per rank"
    )
    parser.add_argument(
        "--plan", metavar="FILE", help="draw a plan that `lightning-pipe plan` wrote, to its scale"
    )
    parser.add_argument("--text", action="store_true", help="print the table")
    parser.add_argument("--png", metavar="FILE", help="write a picture")
    parser.add_argument("--svg", metavar="FILE", help="write a vector picture")
    parser.add_argument(
        "--trace", metavar="FILE", help="write a Chrome trace, which https://ui.perfetto.dev opens"
    )
    return parser


def _write(
    schedule: Schedule, kind: str, path: Path, costs: Sequence[StageCosts] | None = None
) -> None:
    if kind == "trace":
        equal = [StageCosts(_SLOT_S, _SLOT_S, _SLOT_S)] * schedule.num_stages
        path.write_text(json.dumps(chrome_trace(simulate(schedule, costs or equal))))
    else:
        schedule_figure(schedule, costs).savefig(path, format=kind, dpi=150)
    print(f"wrote {path}")


if __name__ == "__main__":  # torchrun -m lightning_pipe.cli
    main()
