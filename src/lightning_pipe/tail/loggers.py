"""What a step says to loggers directly, as in `self.logger.experiment.add_image(...)`.

The calls of all micro-batches are put together into those that the whole batch would have made, and
are made once, on the rank of the last stage: it is global rank 0, which owns the loggers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from lightning_pipe._lightning import loggers_of, loggers_replaced
from lightning_pipe.split.microbatch import NumberMemory, merge_values
from lightning_pipe.split.note_taker import NotedCall, NoteTaker
from lightning_pipe.split.patching import Replacement
from lightning_pipe.split.tree import map_tensors


@dataclass(frozen=True, slots=True)
class LoggerCall:
    """A call on one of the loggers, or on what it holds."""

    logger: int
    call: NotedCall


def noting(root: nn.Module, calls: list[LoggerCall]) -> Iterable[Replacement]:
    """The replacements that note in `calls` what is said to the loggers of a module's Trainer."""
    return loggers_replaced(
        root,
        lambda index, logger: NoteTaker(logger, lambda call: calls.append(LoggerCall(index, call))),
    )


def silenced_loggers(root: nn.Module, note: Callable[[Any], None]) -> Iterable[Replacement]:
    """The replacements that keep a step from talking to loggers.

    Args:
        root: The user's LightningModule.
        note: Is given the arguments of each call that is not made.
    """
    return loggers_replaced(
        root,
        lambda _, logger: NoteTaker(logger, lambda call: note((call.args, call.kwargs))),
    )


def detached(calls: list[LoggerCall]) -> None:
    """Lets the calls forget the graphs of what they were given, when the step has ended."""
    for index, noted in enumerate(calls):
        args, kwargs = map_tensors(Tensor.detach, (noted.call.args, noted.call.kwargs))
        calls[index] = replace(noted, call=replace(noted.call, args=args, kwargs=kwargs))


def merged_calls(
    calls: Sequence[Sequence[LoggerCall]],
    rows: Sequence[int],
    memory: NumberMemory | None = None,
) -> list[LoggerCall]:
    """The calls that the whole batch would have made, in the order of their first appearance."""
    columns: dict[Any, list[tuple[LoggerCall, int]]] = {}
    for noted, size in zip(calls, rows, strict=True):
        times: dict[Any, int] = {}
        for one in noted:
            names = tuple(value for value in one.call.args if isinstance(value, str))
            kind = (one.logger, repr(one.call.path), names, len(one.call.args), *one.call.kwargs)
            occurrence = times[kind] = times.get(kind, -1) + 1
            columns.setdefault((kind, occurrence), []).append((one, size))
    return [_merged(column, memory, kind) for kind, column in columns.items()]


def _merged(
    column: Sequence[tuple[LoggerCall, int]], memory: NumberMemory | None, kind: Hashable
) -> LoggerCall:
    first, sizes = column[0][0], [size for _, size in column]
    given = [(noted.call.args, noted.call.kwargs) for noted, _ in column]

    def merged(values: Sequence[Any], place: Hashable) -> Any:
        value = merge_values(values, sizes, memory=memory, place=("logger", kind, place))
        is_new = isinstance(value, list) and not isinstance(values[0], list)
        return values[0] if is_new else value

    positions = enumerate(zip(*(args for args, _ in given), strict=True))
    args = tuple(merged(values, index) for index, values in positions)
    kwargs = {
        name: merged([kwargs[name] for _, kwargs in given], name) for name in first.call.kwargs
    }
    return replace(first, call=replace(first.call, args=args, kwargs=kwargs))


def make_calls(root: nn.Module, calls: Iterable[LoggerCall]) -> None:
    """Makes the calls, on the rank that owns the loggers."""
    loggers = loggers_of(root)
    for noted in calls:
        noted.call.make(loggers[noted.logger])
