"""The plug-in: makes `Trainer(strategy="pipeline")` work in a script that imports only `lightning`.

`import torch` calls `install` (entry point group `torch.backends`). All it does is to put a finder in
`sys.meta_path` that waits for `lightning.pytorch.strategies` and adds our names to its registry
right after that module has run. The names lead to a function, so our own strategy (and torch.distributed with it) is
imported only by the script that asks for it.

This module must import nothing but what the interpreter has loaded anyway, must cost microseconds, and must never
raise: an error here would be an error of `import torch` for a user who may not even know about us.
`LIGHTNING_PIPE_AUTOREGISTER=0` switches it off.
"""

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

HOST = "lightning.pytorch.strategies"
SWITCH = "LIGHTNING_PIPE_AUTOREGISTER"

# Strategy name -> the arguments of PipelineStrategy that it stands for.
STRATEGIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pipeline": {},
        "pipeline_naive": {"schedule": "naive"},
        "pipeline_gpipe": {"schedule": "gpipe"},
        "pipeline_1f1b": {"schedule": "1f1b"},
        "pipeline_interleaved": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
    }
)


def make_strategy(**arguments: Any) -> Any:
    """Builds a `PipelineStrategy`; what the registered names call."""
    from lightning_pipe.strategy import PipelineStrategy

    return PipelineStrategy(**arguments)


def register(strategies: ModuleType) -> None:
    """Adds our names to the registry of `lightning.pytorch.strategies`; a name that is taken stays as it is."""
    registry = strategies.StrategyRegistry
    for name, arguments in STRATEGIES.items():
        if name not in registry:
            description = f"Pipeline parallelism (lightning-pipe), schedule {arguments.get('schedule', 'auto')}"
            registry.register(name, make_strategy, description, **arguments)


def install() -> None:
    """Registers the strategies now if Lightning is loaded, else when it will be. Never raises."""
    try:
        if os.environ.get(SWITCH, "1").strip().lower() in {"0", "false", "off", "no"}:
            return
        host = sys.modules.get(HOST)
        if hasattr(host, "StrategyRegistry") and host is not None:
            register(host)
        elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _report(error)


class _Finder:
    """Finds one module, `lightning.pytorch.strategies`, by asking the other finders, and listens to its loader."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != HOST or self._asking:
            return None
        self._asking = True
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec = find_spec(name, path, target) if find_spec and finder is not self else None
                if spec is not None:
                    self._listen(spec.loader)
                    return spec
            return None
        finally:
            self._asking = False

    def _listen(self, loader: Any) -> None:
        """Shadows `exec_module` on this one loader object: the module keeps its real loader and spec."""
        run_module = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run_module(module)
            try:
                del loader.exec_module
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                register(module)
            except Exception as error:
                _report(error)

        try:
            loader.exec_module = exec_module
        except Exception as error:
            _report(error)


def _report(error: Exception) -> None:
    """Says on stderr that the names are missing; a warning could be turned into an exception."""
    try:
        message = (
            f"lightning-pipe: strategy='pipeline' is not registered ({type(error).__name__}: {error}); "
            "pass strategy=lightning_pipe.PipelineStrategy(...) instead.\n"
        )
        sys.stderr.write(message)
    except Exception:  # no stderr: nothing left to say it to
        return
