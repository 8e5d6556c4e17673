"""What a run left behind for the doctor: a trace, the monitor's file, or a table of metrics."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lightning_pipe.errors import PipelineError, PlanError
from lightning_pipe.planning.attribution import (
    LinkWait,
    MeasuredBubble,
    attribute_bubble,
    mean_bubble,
)
from lightning_pipe.planning.doctor import Loss, Run
from lightning_pipe.planning.ir import Action, Schedule
from lightning_pipe.planning.plain import check_fields
from lightning_pipe.planning.timeline import Span, Timeline

__all__ = ["FILE_NAME", "Evidence", "read_evidence", "to_text"]

FILE_NAME = "pipeline.json"
"""What `BubbleMonitor` keeps in the log directory, beside what it gives to loggers."""

#: what values of the wrong kind raise
_WRONG = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
_PARTS = ("fill_drain", "imbalance", "communication", "host")
_ABOUT = "lightning_pipe"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was found.

    Attributes:
        run: The sizes of the run.
        found: Its bubble, the mean over what was measured; None if there was no measurement.
        losses: Of consecutive steps.
        source: The files that this is from.
    """

    run: Run
    found: MeasuredBubble | None
    losses: tuple[Loss, ...] = ()
    source: tuple[str, ...] = ()


def to_text(run: Run, found: MeasuredBubble) -> str:
    """What goes into the monitor's file."""
    return json.dumps({"run": run.to_dict(), "found": asdict(found)}, indent=1) + "\n"


def read_evidence(path: str | Path) -> Evidence:
    """Reads a trace that `TimelineRecorder` wrote, or a log directory.

    Raises:
        PlanError: There is nothing of a pipeline there, or it cannot be read.
    """
    path = Path(path)
    if not path.exists():
        raise PlanError(f"{path}: there is no such file or directory")
    try:
        if path.is_dir():
            return _read_directory(path)
        return _read_trace(path) if path.name != FILE_NAME else _read_directory(path.parent)
    except PipelineError:
        raise
    except (*_WRONG, csv.Error, OSError) as error:
        raise PlanError(f"{path} cannot be read: {error!r}") from None


def _read_directory(directory: Path) -> Evidence:
    own = _newest(directory, FILE_NAME)
    table = _newest(own.parent if own is not None else directory, "metrics.csv")
    if own is not None:
        run, found = _read_own(own)
        losses = () if table is None else _losses(_rows(table), run.num_microbatches)
        sources = tuple(str(file) for file in (own, table) if file is not None)
        return Evidence(run, found, losses, sources)
    if table is not None:
        rows = _rows(table)
        if any("pipeline/bubble_fraction" in row for row in rows):
            run, found = _from_table(rows)
            return Evidence(run, found, _losses(rows, run.num_microbatches), (str(table),))
    trace = _newest(directory, "timeline_step*.json")
    if trace is None:
        raise PlanError(
            f"{directory}: no {FILE_NAME}, no metrics.csv with a pipeline's bubble and no "
            "timeline_step*.json; train with callbacks=[BubbleMonitor()] and a logger that writes "
            "files, or with TimelineRecorder()"
        )
    return _read_trace(trace)


def _newest(directory: Path, pattern: str) -> Path | None:
    files = list(directory.rglob(pattern))
    return max(files, key=lambda file: file.stat().st_mtime, default=None)


def _read_own(path: Path) -> tuple[Run, MeasuredBubble]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = dict(values["found"])
        links = found.pop("links")
        check_fields(MeasuredBubble, found, ("links",), what="its bubble", signed=True)
        for link in links:
            check_fields(LinkWait, link, what="a link")
        found = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        run = _run(values["run"])
        if len(found["rank_fractions"]) != run.num_ranks:
            raise PlanError(f"{len(found['rank_fractions'])} bubbles of {run.num_ranks} ranks")
        if len(found["stage_utilisations"]) != len(run.stage_to_rank):
            raise PlanError("not one utilisation for each stage")
        if any(max(link["source"], link["target"]) >= len(run.stage_to_rank) for link in links):
            raise PlanError("a link of a stage that is not there")
        return run, MeasuredBubble(**found, links=tuple(LinkWait(**link) for link in links))
    except _WRONG as error:
        raise PlanError(f"{path} cannot be read: {error!r}; BubbleMonitor writes it anew") from None


def _run(values: Any) -> Run:
    """The sizes of a run, with one rank and one stage at least."""
    optional = {field.name for field in fields(Run)} - {"schedule_name", "stage_to_rank"}
    check_fields(Run, values, optional - {"num_microbatches"}, what="its run")
    run = Run.from_dict(values)
    ranks = set(run.stage_to_rank)
    if ranks != set(range(len(ranks))) or not ranks or run.num_microbatches < 1:
        raise PlanError(
            f"its run has stages on ranks {list(run.stage_to_rank)} and {run.num_microbatches} "
            "micro-batches"
        )
    for name in ("unit_counts", "boundary_bytes"):
        if len(getattr(run, name)) not in (0, len(run.stage_to_rank)):
            raise PlanError(f"its run has {name} of {len(getattr(run, name))} stages")
    return run


# ---------------------------------------------------------------------- traces


def _read_trace(path: Path) -> Evidence:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        events = [e for e in values["traceEvents"] if e["ph"] == "X"]
        spans = [_span(event) for event in sorted(events, key=lambda e: e["ts"])]
        about = values.get("otherData", {}).get(_ABOUT)
    except _WRONG as error:
        raise PlanError(f"{path} is no trace of a pipeline's step: {error!r}") from None
    if not spans:
        raise PlanError(f"{path} is no trace of a pipeline's step: no action is in it")
    num_ranks = len({span.rank for span in spans})
    if {span.rank for span in spans} != set(range(num_ranks)):
        raise PlanError(f"{path} is no trace of a whole step: ranks are missing")
    try:
        timeline = Timeline.from_spans(_with_waits(spans, events, num_ranks), num_ranks)
        schedule = _schedule_of(timeline, "the schedule" if about is None else about)
        found = attribute_bubble(timeline, schedule)
        run = Run.of(schedule) if about is None else _run(about)
    except PipelineError as error:
        raise PlanError(f"{path} is no trace of a whole step: {error}") from None
    if (run.stage_to_rank, run.num_microbatches) != (
        schedule.stage_to_rank,
        schedule.num_microbatches,
    ):
        raise PlanError(f"{path}: its actions are not those of the run that it is said to be of")
    return Evidence(run, found, source=(str(path),))


def _span(event: Mapping[str, Any]) -> Span:
    start_s = event["ts"] / 1e6
    wait_s = event.get("args", {}).get("wait_us", 0.0) / 1e6
    action = Action.parse(event["name"])
    if not all(map(math.isfinite, (start_s, wait_s, event["dur"]))) or event["dur"] < 0:
        raise ValueError(f"{event['name']} from {event['ts']} for {event['dur']} us")
    return Span(int(event["tid"]), action, start_s, start_s + event["dur"] / 1e6, wait_s)


def _with_waits(
    spans: Sequence[Span], events: Sequence[Mapping[str, Any]], num_ranks: int
) -> list[Span]:
    """The spans; where a trace does not tell waits, as a drawing, ranks are taken to wait."""
    if all("wait_us" in event.get("args", {}) for event in events):
        return list(spans)
    ends_s = [0.0] * num_ranks
    found = []
    for span in spans:
        wait_s = max(0.0, span.start_s - ends_s[span.rank])
        found.append(Span(span.rank, span.action, span.start_s, span.end_s, wait_s))
        ends_s[span.rank] = span.end_s
    return found


def _schedule_of(timeline: Timeline, about: Any) -> Schedule:
    name = about if isinstance(about, str) else str(about["schedule_name"])
    orders = tuple(
        tuple(span.action for span in timeline.spans_of(rank)) for rank in range(timeline.num_ranks)
    )
    actions = [span.action for span in timeline.spans]
    return Schedule(
        name,
        orders,
        1 + max(action.stage for action in actions),
        1 + max(action.microbatch for action in actions),
    ).check()


# ---------------------------------------------------------------------- tables


def _rows(path: Path) -> list[dict[str, float]]:
    """The numbers of a table of metrics, by row; what is no number is left out."""
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            numbers = {}
            for name, text in row.items():
                try:
                    numbers[name] = float(text)
                except (TypeError, ValueError):
                    continue
            rows.append(numbers)
    return rows


def _from_table(rows: Sequence[Mapping[str, float]]) -> tuple[Run, MeasuredBubble]:
    measured = [row for row in rows if "pipeline/bubble_fraction" in row]
    found = mean_bubble(
        [
            MeasuredBubble(
                *_parts(row),
                rank_fractions=_numbered(row, "pipeline/bubble_fraction/rank_"),
                stage_utilisations=_numbered(row, "pipeline/utilisation/stage_"),
            )
            for row in measured
        ]
    )
    num_ranks, num_stages = len(found.rank_fractions), len(found.stage_utilisations)
    # without the schedule, stages are taken to go round the ranks
    rank_of = tuple(stage % num_ranks for stage in range(num_stages))
    pieces = int(measured[-1].get("pipeline/num_microbatches", 4 * num_ranks))
    return Run("the schedule", rank_of, pieces), found


def _parts(row: Mapping[str, float]) -> tuple[float, float, float, float]:
    fill_drain, imbalance, communication, host = (row[f"pipeline/bubble_{p}"] for p in _PARTS)
    return fill_drain, imbalance, communication, host


def _numbered(row: Mapping[str, float], start: str) -> tuple[float, ...]:
    found = {
        int(name[len(start) :]): value for name, value in row.items() if name.startswith(start)
    }
    return tuple(found[number] for number in sorted(found))


def _losses(rows: Sequence[Mapping[str, float]], pieces: int) -> tuple[Loss, ...]:
    """The training losses in order, each with the sizes that were logged last."""
    name = _loss_name(rows)
    if name is None:
        return ()
    sizes = [row["pipeline/num_microbatches"] for row in rows if "pipeline/num_microbatches" in row]
    current, samples = int(sizes[0]) if sizes else pieces, 0
    found = []
    for row in sorted(rows, key=lambda row: row.get("step", 0)):
        current = int(row.get("pipeline/num_microbatches", current))
        samples = int(row.get("pipeline/effective_batch", samples))
        if name in row:
            found.append((current, samples, row[name]))
    return tuple(found)


def _loss_name(rows: Sequence[Mapping[str, float]]) -> str | None:
    names = dict.fromkeys(name for row in rows for name in row)
    fitting = [
        name
        for name in names
        if "loss" in name and not any(word in name for word in ("val", "test", "_epoch"))
    ]
    return min(fitting, key=lambda name: ("train" not in name, len(name)), default=None)
