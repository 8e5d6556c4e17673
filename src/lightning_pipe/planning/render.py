"""Pictures of schedules and timelines: text, a matplotlib figure, a Chrome trace.

matplotlib is imported when a figure is asked for (``pip install 'lightning-pipe[plot]'``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_pipe.errors import ConfigError
from lightning_pipe.planning.costs import StageCosts
from lightning_pipe.planning.ir import Action, Op, Schedule
from lightning_pipe.planning.simulate import Links, ideal_bubble_fraction, simulate
from lightning_pipe.planning.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "chrome_trace",
    "comparison_figure",
    "schedule_figure",
    "schedule_summary",
    "schedule_text",
    "timeline_figure",
]

_MEANINGS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT: "input gradient",
    Op.WEIGHT: "weight gradient",
}
_COLORS = {  # Okabe and Ito's palette, which people of all colour visions can tell apart
    Op.FORWARD: "#56B4E9",
    Op.BACKWARD: "#009E73",
    Op.INPUT: "#F0E442",
    Op.WEIGHT: "#E69F00",
}
_READABLE_TRANSFERS = 200  # up to which a figure draws them
_READABLE_BOXES = 600  # up to which a figure numbers them


def schedule_text(schedule: Schedule, *, legend: bool = True) -> str:
    """Draws who computes what when, one slot per action.

    Args:
        schedule: A schedule that passes its ``check``.
        legend: Put a line of numbers above and the meaning of the letters below.

    >>> from lightning_pipe.planning.schedules import make_schedule
    >>> print(schedule_text(make_schedule("1f1b", num_ranks=2, num_microbatches=4)))
    1f1b: 2 ranks, 4 micro-batches, bubble 20.0%, in flight 2 1
    <BLANKLINE>
    rank 0 | F1 F2 .  B1 F3 B2 F4 B3 .  B4
    rank 1 | .  F1 B1 F2 B2 F3 B3 F4 B4 .
    <BLANKLINE>
    F1 forward, B1 backward of micro-batch 1; . idle
    """
    rows = schedule.aligned().orders
    letters = _chunk_letters(schedule)
    cells = [["." if a is None else _label(a, letters) for a in row] for row in rows]
    slots = max((len(row) for row in cells), default=0)
    width = max((len(cell) for row in cells for cell in row), default=1)
    rank_width = len(str(max(schedule.num_ranks - 1, 0)))
    lines = [
        f"rank {rank:>{rank_width}} | "
        + " ".join(f"{cell:<{width}}" for cell in [*row, *["."] * (slots - len(row))]).rstrip()
        for rank, row in enumerate(cells)
    ]
    if not legend:
        return "\n".join(lines)
    return "\n".join([schedule_summary(schedule), "", *lines, "", _legend(schedule, letters)])


def schedule_summary(schedule: Schedule) -> str:
    """One line: the size, the bubble with equal stages, and the activations held per rank."""
    chunks = max((len(schedule.stages(rank)) for rank in range(schedule.num_ranks)), default=1)
    parts = [_plural(schedule.num_ranks, "rank")]
    if chunks > 1:
        parts[0] += f" x {chunks} chunks"
    parts.append(_plural(schedule.num_microbatches, "micro-batch"))
    parts.append(f"bubble {ideal_bubble_fraction(schedule):.1%}")
    if schedule.has_backward:
        parts.append(f"in flight {' '.join(map(str, schedule.in_flight()))}")
    return f"{schedule.name}: {', '.join(parts)}"


def schedule_figure(
    schedule: Schedule, costs: Sequence[StageCosts] | None = None, link: Links | None = None
) -> Figure:
    """Draws a schedule to scale: boxes are actions, thin lines are transfers.

    Args:
        schedule: A schedule that passes its ``check``.
        costs: One entry per stage; by default equal stages with F = 1, B = 2, I = W = 1.
        link: What sending costs; nothing by default.

    Returns:
        A figure without a window; ``figure.savefig("name.svg")`` writes PNG, SVG or PDF.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    equal = [StageCosts(1, 1, 1)] * schedule.num_stages
    timeline = simulate(schedule, costs if costs is not None else equal, link)
    title = schedule_summary(schedule)
    return timeline_figure(timeline, title=title, time_unit="s" if costs is not None else "F")


def timeline_figure(timeline: Timeline, *, title: str = "", time_unit: str = "s") -> Figure:
    """Draws a predicted or measured timeline; see ``schedule_figure``."""
    return comparison_figure({title or f"bubble {timeline.bubble_fraction:.1%}": timeline},
                             time_unit=time_unit)  # fmt: skip


def comparison_figure(timelines: Mapping[str, Timeline], *, time_unit: str = "s") -> Figure:
    """Draws timelines one above the other, on one scale, under their titles.

    Args:
        timelines: Title to timeline, the topmost first.
        time_unit: What a time of 1 is called.

    Returns:
        A figure, as from ``schedule_figure``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a figure needs matplotlib, which is not installed; pip install 'lightning-pipe[plot]'"
        ) from error
    most = max(len(t.spans) / max(t.num_ranks, 1) for t in timelines.values())
    height = sum(0.7 + 0.45 * timeline.num_ranks for timeline in timelines.values())
    figure = Figure(figsize=(min(max(6.0, 0.32 * most), 40.0), 0.5 + height), layout="constrained")
    rows = figure.subplots(len(timelines), squeeze=False, sharex=True)
    end_s = max(timeline.step_s for timeline in timelines.values()) or 1.0
    for (axes,), (title, timeline) in zip(rows, timelines.items(), strict=True):
        _draw_timeline(axes, timeline)
        axes.set_xlim(0, end_s)
        axes.set_title(title, loc="left", fontsize=9)
    rows[-1][0].set_xlabel(f"time ({time_unit})")
    handles, labels = rows[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_timeline(axes: Axes, timeline: Timeline) -> None:
    _draw_boxes(axes, timeline)
    if len(timeline.spans) <= _READABLE_BOXES:
        _draw_numbers(axes, timeline.spans)
    transfers = _transfers(timeline)
    if len(transfers) <= _READABLE_TRANSFERS:
        for source, target in transfers:
            ends_s, ranks = (source.end_s, target.start_s), (source.rank, target.rank)
            axes.plot(ends_s, ranks, color="#444444", linewidth=0.6, alpha=0.5)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)


def chrome_trace(timeline: Timeline, about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The timeline as a Chrome trace, with arrows for transfers.

    Args:
        timeline: Predicted or measured.
        about: What else to keep in it; `lightning-pipe doctor` reads a `planning.doctor.Run` there,
            and that the waits of the spans were measured.

    Returns:
        What ``json.dump`` writes and chrome://tracing or https://ui.perfetto.dev opens. One thread
        per rank, times in microseconds.
    """
    events: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        name = {"name": f"rank {rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": name})
    for span in timeline.spans:
        action = span.action
        events.append(
            {
                "ph": "X",
                "name": str(action),
                "cat": _MEANINGS[action.op],
                "pid": 0,
                "tid": span.rank,
                "ts": span.start_s * 1e6,
                "dur": span.duration_s * 1e6,
                "args": {
                    "stage": action.stage,
                    "microbatch": action.microbatch,
                    **({} if about is None else {"wait_us": span.wait_s * 1e6}),
                },
            }
        )
    for flow, (source, target) in enumerate(_transfers(timeline)):
        route = f"{source.action} to {target.action}"
        shared = {"name": route, "cat": "transfer", "id": flow, "pid": 0}
        # a flow binds to the slice that its time is in: the middle of either
        leave_us = (source.start_s + source.end_s) / 2 * 1e6
        arrive_us = (target.start_s + target.end_s) / 2 * 1e6
        events.append({**shared, "ph": "s", "tid": source.rank, "ts": leave_us})
        events.append({**shared, "ph": "f", "bp": "e", "tid": target.rank, "ts": arrive_us})
    trace: dict[str, Any] = {"traceEvents": events, "displayTimeUnit": "ms"}
    if about is not None:
        trace["otherData"] = {"lightning_pipe": dict(about)}
    return trace


def _transfers(timeline: Timeline) -> list[tuple[Span, Span]]:
    """The pairs of spans, on different ranks, of which one sends to the other."""
    forward: dict[tuple[int, int], Span] = {}
    backward: dict[tuple[int, int], Span] = {}
    for span in timeline.spans:
        if span.action.op is not Op.WEIGHT:
            kept = forward if span.action.op is Op.FORWARD else backward
            kept[span.action.stage, span.action.microbatch] = span
    pairs = []
    for kept, step in ((forward, 1), (backward, -1)):
        for (stage, microbatch), source in kept.items():
            target = kept.get((stage + step, microbatch))
            if target is not None and target.rank != source.rank:
                pairs.append((source, target))
    return pairs


def _draw_boxes(axes: Axes, timeline: Timeline) -> None:
    """One box per action, coloured by its op; the later chunks of a rank are paler."""
    chunks: dict[int, set[int]] = {}
    for span in timeline.spans:
        chunks.setdefault(span.rank, set()).add(span.action.stage)
    alpha = {
        stage: 1.0 - 0.5 * chunk / max(len(stages) - 1, 1)
        for stages in chunks.values()
        for chunk, stage in enumerate(sorted(stages))
    }
    for op, color in _COLORS.items():
        spans = [span for span in timeline.spans if span.action.op is op]
        if spans:
            boxes = axes.barh(
                [span.rank for span in spans],
                [span.duration_s for span in spans],
                left=[span.start_s for span in spans],
                height=0.8,
                color=[(color, alpha[span.action.stage]) for span in spans],
                edgecolor="white",
            )
            strongest = max(range(len(spans)), key=lambda box: alpha[spans[box].action.stage])
            boxes[strongest].set_label(_MEANINGS[op])


def _draw_numbers(axes: Axes, spans: Sequence[Span]) -> None:
    for span in spans:
        middle_s = (span.start_s + span.end_s) / 2
        number = str(span.action.microbatch + 1)
        axes.text(middle_s, span.rank, number, ha="center", va="center", fontsize=7, clip_on=True)


def _chunk_letters(schedule: Schedule) -> list[str]:
    """A letter for each stage, its place among the stages of its rank; empty if no rank has two."""
    letters = [""] * schedule.num_stages
    chunks = [schedule.stages(rank) for rank in range(schedule.num_ranks)]
    if all(len(stages) <= 1 for stages in chunks):
        return letters
    for stages in chunks:
        for chunk, stage in enumerate(stages):
            letters[stage] = chr(ord("a") + chunk) if chunk < 26 else f"_{chunk}"
    return letters


def _label(action: Action, letters: Sequence[str]) -> str:
    return f"{action.op.value}{action.microbatch + 1}{letters[action.stage]}"


def _legend(schedule: Schedule, letters: Sequence[str]) -> str:
    used = {action.op for rank in range(schedule.num_ranks) for action in schedule.actions(rank)}
    ops = ", ".join(f"{op.value}1 {meaning}" for op, meaning in _MEANINGS.items() if op in used)
    chunks = "; a, b, ... the chunk of the rank" if any(letters) else ""
    return f"{ops} of micro-batch 1{chunks}; . idle"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"
