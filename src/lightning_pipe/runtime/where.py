"""Where in the code a thread is, as users know it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_NOT_THEIRS = ("lightning_pipe", "lightning", "torch", "lightning_utilities")


def users_line(frame: FrameType | None) -> str:
    """The innermost line, from a frame outwards, that is neither ours, nor of torch, Lightning or
    Python itself: "forward, model.py:12"; empty if there is none."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if package not in _NOT_THEIRS and package not in sys.stdlib_module_names:
            return line_of(frame)
        frame = frame.f_back
    return ""


def line_of(frame: FrameType) -> str:
    """Function, file and line of a frame."""
    code = frame.f_code
    return f"{code.co_name}, {Path(code.co_filename).name}:{frame.f_lineno}"
