"""Predicted and measured, side by side, once the first steps have run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pipe.planning.attribution import MeasuredBubble, attribute_bubble, mean_bubble
from lightning_pipe.planning.plan import Prediction, columns, format_bytes, format_seconds
from lightning_pipe.planning.simulate import BubbleParts
from lightning_pipe.report import timeline
from lightning_pipe.runtime.accelerator import memory_stats
from lightning_pipe.runtime.share import gather_objects
from lightning_pipe.steps import Pipeline

__all__ = ["Follow", "compare"]

_SKIPPED = 3  # the first steps allocate, trace and connect
_MEASURED = 5
_LARGE_RATIO = 0.25  # of seconds and bytes
_LARGE_SHARE = 0.15  # of idle time
_SHARES = {
    "idle": "bubble_fraction",
    "  fill and drain": "fill_drain_fraction",
    "  imbalance": "imbalance_fraction",
    "  waiting and Python": "communication_fraction",
}


class Follow:
    """Watches the first training steps; tells when there is something to tell."""

    def __init__(self) -> None:
        self._steps = 0
        self._step_s: list[float] = []
        self._bubbles: list[MeasuredBubble] = []

    def after_step(self, pipeline: Pipeline) -> None:
        """Notes a training step; all ranks count the same ones, and share what they saw."""
        self._steps += 1
        plan, schedule = pipeline.plan, pipeline.schedule
        if plan is None or schedule is None or schedule.num_ranks == 1:
            return
        if not _SKIPPED < self._steps <= _SKIPPED + _MEASURED:
            return
        seen = timeline(pipeline, of_all_ranks=True)
        if seen is not None and seen.step_s:
            self._step_s.append(seen.step_s)
            self._bubbles.append(attribute_bubble(seen, schedule))
        if self._steps < _SKIPPED + _MEASURED or not self._bubbles:
            return
        peaks = gather_objects(pipeline.ranks, memory_stats(pipeline.device)["peak_bytes"])
        if pipeline.ranks.is_first:
            text = compare(
                statistics.median(self._step_s),
                mean_bubble(self._bubbles),
                peaks or [],
                plan.prediction,
                whole_process=pipeline.device.type == "cpu",
            )
            rank_zero_info(text)


def compare(
    step_s: float,
    bubble: MeasuredBubble,
    peak_bytes: Sequence[int],
    prediction: Prediction | None,
    *,
    whole_process: bool,
) -> str:
    """Prediction and measurement as a table; a large gap is said in words.

    Args:
        step_s: Measured seconds of a step.
        bubble: Where its idle time was from.
        peak_bytes: Memory of each rank at its peak.
        prediction: What the plan expected.
        whole_process: Whether measured memory is that of the process and not of the model.
    """
    parts = BubbleParts(
        bubble.fill_drain_fraction,
        bubble.imbalance_fraction,
        bubble.communication_fraction + bubble.host_fraction,
    )
    rows = [["", "predicted", "measured"]]
    expected_s = None if prediction is None else prediction.step_s
    rows.append(["step", "-" if expected_s is None else format_seconds(expected_s),
                 format_seconds(step_s)])  # fmt: skip
    for label, name in _SHARES.items():
        guess = "-" if prediction is None else f"{getattr(prediction, name):.1%}"
        rows.append([label, guess, f"{getattr(parts, name):.1%}"])
    memory = "process of rank" if whole_process else "peak of rank"
    # a process on the CPU holds Python and torch beside the model
    guesses = () if prediction is None or whole_process else prediction.peak_bytes
    for number, held in enumerate(peak_bytes):
        guess = format_bytes(guesses[number]) if number < len(guesses) else "-"
        rows.append([f"{memory} {number}", guess, format_bytes(held)])
    gaps = _gaps(step_s, parts, () if whole_process else peak_bytes, prediction)
    title = f"Pipeline, predicted and measured (median of {_MEASURED} steps)"
    return "\n".join([title, *columns(rows, left=0), *gaps])


def _gaps(
    step_s: float, parts: BubbleParts, peak_bytes: Sequence[int], prediction: Prediction | None
) -> list[str]:
    if prediction is None:
        return []
    gaps = []
    if prediction.step_s and abs(step_s / prediction.step_s - 1) > _LARGE_RATIO:
        gaps.append(f"a step takes {step_s / prediction.step_s:.2f} times what was predicted")
    more = parts.bubble_fraction - prediction.bubble_fraction
    if abs(more) > _LARGE_SHARE:
        causes = {
            "filling and draining": parts.fill_drain_fraction - prediction.fill_drain_fraction,
            "unequal stages": parts.imbalance_fraction - prediction.imbalance_fraction,
            "waiting and Python": parts.communication_fraction - prediction.communication_fraction,
        }
        cause = max(causes, key=lambda name: causes[name] if more > 0 else -causes[name])
        gaps.append(f"idle {abs(more):.0%} {'more' if more > 0 else 'less'} than predicted, most "
                    f"of it {cause}")  # fmt: skip
    for number, (held, guess) in enumerate(zip(peak_bytes, prediction.peak_bytes, strict=False)):
        if guess and abs(held / guess - 1) > _LARGE_RATIO:
            gaps.append(f"rank {number} holds {held / guess:.2f} times what was predicted")
    return [f"LARGE GAP: {gap}" for gap in gaps]
