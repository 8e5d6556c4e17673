"""The hook by which a script that imports only `lightning` finds `strategy="pipeline"`."""

import importlib
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import _lightning_pipe_autoload as autoload
from lightning_pipe.registration import STRATEGIES

HOST = """
class Registry(dict):
    def register(self, name, strategy, description, **arguments):
        self[name] = arguments

StrategyRegistry = Registry()
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )


def finders() -> list[object]:
    return [finder for finder in sys.meta_path if type(finder) is autoload.Finder]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that plays `lightning.pytorch.strategies` and is not imported yet."""
    name = "played_strategies"
    (tmp_path / f"{name}.py").write_text(HOST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(autoload, "HOST", name)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if f not in finders()])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_torch_loads_the_plugin() -> None:
    (ours,) = (ep for ep in entry_points(group="torch.backends") if ep.name == "lightning_pipe")
    assert ours.load() is autoload.install


def test_a_script_that_imports_only_lightning_finds_the_strategy() -> None:
    code = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
print(*StrategyRegistry)
assert "lightning_pipe.strategy" not in sys.modules, "loaded for a script that does not use it"
trainer = Trainer(strategy="pipeline_gpipe", accelerator="cpu", devices=1, logger=False,
    enable_checkpointing=False)
print(type(trainer.strategy).__name__)
"""
    names, *_, strategy = run_python(code).stdout.splitlines()
    assert set(STRATEGIES) <= set(names.split())
    assert strategy == "PipelineStrategy"


def test_registers_when_the_host_is_imported(host: str) -> None:
    autoload.install()
    autoload.install()
    assert len(finders()) == 1
    module = importlib.import_module(host)
    assert module.StrategyRegistry == {name: dict(args) for name, args in STRATEGIES.items()}
    assert not finders()
    assert type(module.__spec__.loader) is SourceFileLoader
    assert "exec_module" not in vars(module.__spec__.loader)


def test_registers_at_once_if_the_host_is_there(host: str) -> None:
    module = importlib.import_module(host)
    autoload.install()
    assert set(module.StrategyRegistry) == set(STRATEGIES)
    assert not finders()


def test_a_name_that_is_taken_stays(host: str, tmp_path: Path) -> None:
    (tmp_path / f"{host}.py").write_text(HOST + "StrategyRegistry['pipeline'] = 'theirs'\n")
    autoload.install()
    registry = importlib.import_module(host).StrategyRegistry
    assert registry["pipeline"] == "theirs"
    assert registry["pipeline_gpipe"] == {"schedule": "gpipe"}


@pytest.mark.parametrize("value", ["0", "false", "OFF"])
def test_switched_off(host: str, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("LIGHTNING_PIPE_AUTOREGISTER", value)
    autoload.install()
    assert not finders()
    assert not importlib.import_module(host).StrategyRegistry


def test_import_of_the_package_registers_even_if_switched_off() -> None:
    code = """
import sys, lightning_pipe
assert [f for f in sys.meta_path if type(f).__name__ == "Finder"]
"""
    run_python(code, LIGHTNING_PIPE_AUTOREGISTER="0")


@pytest.mark.parametrize("source", ["", "StrategyRegistry = 5\n"])
def test_a_changed_host_is_reported_and_still_imported(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    (tmp_path / f"{host}.py").write_text(source + "answer = 42\n")
    autoload.install()
    assert importlib.import_module(host).answer == 42
    assert "strategy='pipeline' is not registered" in capsys.readouterr().err


def test_a_host_that_fails_to_import_fails_as_without_us(host: str, tmp_path: Path) -> None:
    file = tmp_path / f"{host}.py"
    file.write_text("raise KeyError('theirs')\n")
    autoload.install()
    with pytest.raises(KeyError, match="theirs"):
        importlib.import_module(host)
    file.write_text(HOST + "# now it works, and differs in size\n")
    importlib.invalidate_caches()
    assert set(importlib.import_module(host).StrategyRegistry) == set(STRATEGIES)


def test_a_missing_host_is_missing_as_without_us(host: str, tmp_path: Path) -> None:
    (tmp_path / f"{host}.py").unlink()
    importlib.invalidate_caches()
    autoload.install()
    with pytest.raises(ModuleNotFoundError, match=host):
        importlib.import_module(host)


def test_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    """Loading and calling it, once its bytecode is cached, in a process that has what torch has."""
    code = """
import importlib, os, sys, time, typing
times_s = []
for _ in range(10):
    sys.modules.pop("_lightning_pipe_autoload", None)
    before = set(sys.modules)
    start_s = time.perf_counter()
    importlib.import_module("_lightning_pipe_autoload").install()
    times_s.append(time.perf_counter() - start_s)
    assert set(sys.modules) - before == {"_lightning_pipe_autoload"}
    sys.meta_path.pop(0)
print(min(times_s))
"""
    cached = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    assert float(run_python(code, **cached).stdout) < 1e-3


def test_the_quickstart_lists_every_name() -> None:
    text = (Path(__file__).parents[1] / "docs" / "quickstart.md").read_text()
    for name, arguments in STRATEGIES.items():
        given = ", ".join(f"{k}={v!r}".replace("'", '"') for k, v in arguments.items())
        assert f'| `"{name}"` | `PipelineStrategy({given})`' in text
