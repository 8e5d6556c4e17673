"""The exception tree: a user can correct a ValueError, and errors travel between processes."""

from __future__ import annotations

import pickle

import pytest

from lightning_pipe import errors

USER_MISTAKES = {
    *("BatchError", "ConfigError", "CutError", "MeetingError", "PlanError", "ScheduleError")
}


@pytest.mark.parametrize("name", errors.__all__)
def test_tree(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.PipelineError)
    assert issubclass(kind, ValueError) == (name in USER_MISTAKES)


def test_the_drawing_at_the_top_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = {line.split()[0].split("(")[0] for line in errors.__doc__.splitlines() if "  " in line}
    assert drawn == set(errors.__all__)


def test_schedule_error_survives_pickling() -> None:
    error = errors.ScheduleError("no 2F0", rank=1, step=3, action="2F0")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.rank, copy.step, copy.action) == ("no 2F0", 1, 3, "2F0")
