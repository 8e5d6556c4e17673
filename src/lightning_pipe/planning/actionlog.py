"""The logs of actions that the ranks of a run have written (`debug=True`), as one list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lightning_pipe.errors import ConfigError

__all__ = ["file_of", "merged"]


def file_of(global_rank: int | str) -> str:
    """The name of a rank's file; of all files with "*"."""
    return f"actions-rank-{global_rank}.jsonl"


def merged(folder: str | Path) -> Iterator[str]:
    """Yields what all ranks did, in the order of one clock, a line each.

    A line that was cut off when its process was killed is left out.

    Args:
        folder: Where the files are.

    Raises:
        ConfigError: There are none.
    """
    files = sorted(Path(folder).glob(file_of("*")))
    if not files:
        raise ConfigError(
            f"{folder}: no {file_of('*')} in it; train with PipelineStrategy(debug=True), which "
            "writes them"
        )
    lines = sorted(line for file in files for line in _lines(file))
    start_s = lines[0][0] if lines else 0.0
    for time_s, rank, _, text in lines:
        yield f"{time_s - start_s:12.6f} s  rank {rank}  {text}"


def _lines(file: Path) -> Iterator[tuple[float, int, int, str]]:
    rank, ahead_s = -1, 0.0
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines()):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "ahead_s" in line:
            rank, ahead_s = line["rank"], line["ahead_s"]
            told = f"is global rank {line['global_rank']}"
        else:
            told = f"step {line['step']}  {_told(line)}"
        yield line["time_s"] - ahead_s, rank, number, told


def _told(line: dict[str, object]) -> str:
    action, what = line.get("action"), str(line["what"])
    if what in ("starts", "ends"):
        what = f"{action} {what}"
    elif action is not None:
        what = f"{what} {action}"
    values = line.get("values")
    return f"{what}: {', '.join(values)}" if isinstance(values, list) and values else what
