"""What the package shows to the outside, and what importing it costs."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import lightning_pipe

ROOT = Path(__file__).parents[1]


def run_python(code: str, *options: str) -> str:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def test_exported_names_exist() -> None:
    names = lightning_pipe.__all__  # ruff sorts them: constants, classes, the rest
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(lightning_pipe, name) is not None
        assert name in dir(lightning_pipe)


def test_every_error_is_exported() -> None:
    from lightning_pipe import errors

    assert set(errors.__all__) <= set(lightning_pipe.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'lightning_pipe' has no attribute 'Pipeline'"):
        lightning_pipe.Pipeline  # type: ignore[attr-defined]  # noqa: B018


def test_version_is_the_same_everywhere() -> None:
    assert version("lightning-pipe") == lightning_pipe.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d[^\]]*)\]", changelog, flags=re.MULTILINE)
    assert released[0] == lightning_pipe.__version__


def test_package_says_that_it_is_typed() -> None:
    assert Path(lightning_pipe.__file__).with_name("py.typed").is_file()


def test_planning_is_light() -> None:
    """100 ms and no torch, so that a laptop can plan a job of 1000 ranks."""
    code = """
import sys, time
start_s = time.process_time()
import lightning_pipe.planning
import lightning_pipe.planning.schedules
print(time.process_time() - start_s)
heavy = {"torch", "lightning", "numpy", "networkx", "rich", "jsonargparse"} & set(sys.modules)
assert not heavy, heavy
"""
    assert min(float(run_python(code)) for _ in range(3)) < 0.1


def test_drawing_needs_no_torch() -> None:
    code = """
import sys
sys.argv = ["lightning-pipe", "draw", "--stages", "2", "--microbatches", "3"]
from lightning_pipe.cli import main
main()
assert "torch" not in sys.modules
"""
    assert "rank 1 | .  F1 B1 F2 B2 F3 B3 ." in run_python(code)
