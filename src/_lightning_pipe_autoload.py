"""The plug-in: makes `Trainer(strategy="pipeline")` work in a script that imports only `lightning`.

`import torch` calls `install` (entry point group `torch.backends`). All that it does is to wait for
`lightning.pytorch.strategies`, and to let lightning_pipe add its names right after that module ran.
It stands beside the package so that `import torch` runs this one file and nothing of the package;
it imports only what torch has loaded already, and an error here would be an error of
`import torch`, so none leaves. LIGHTNING_PIPE_AUTOREGISTER=0 switches it off.
"""

import os
import sys
from typing import Any

HOST = "lightning.pytorch.strategies"


def install() -> None:
    """What `import torch` calls."""
    if os.environ.get("LIGHTNING_PIPE_AUTOREGISTER", "1").lower() not in ("0", "false", "off"):
        listen()


def listen() -> None:
    """Registers the strategies now if Lightning is loaded, else as soon as it is. Never raises."""
    try:
        host = sys.modules.get(HOST)
        if hasattr(host, "StrategyRegistry"):
            _register(host)
        elif not any(type(finder) is Finder for finder in sys.meta_path):
            sys.meta_path.insert(0, Finder())
    except Exception as error:
        _report(error)


class Finder:
    """Finds one module, HOST, by asking the other finders, and listens to its loader."""

    asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != HOST or self.asking:
            return None
        self.asking = True  # a finder that asks sys.meta_path itself must not come back to us
        try:
            for finder in sys.meta_path:
                if finder is self or not hasattr(finder, "find_spec"):
                    continue
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self.attach(spec.loader)
                    return spec
            return None
        finally:
            self.asking = False

    def attach(self, loader: Any) -> None:
        """Shadows `exec_module` on this one object: the module keeps its real spec and loader."""
        run_module = loader.exec_module

        def exec_module(module: Any) -> None:
            run_module(module)
            try:
                del loader.exec_module
                sys.meta_path.remove(self)
                _register(module)
            except Exception as error:
                _report(error)

        try:
            loader.exec_module = exec_module
        except Exception as error:
            _report(error)


def _register(host: Any) -> None:
    from lightning_pipe.registration import register

    register(host.StrategyRegistry)


def _report(error: Exception) -> None:
    """Says on stderr that the names are missing (a warning could be turned into an exception)."""
    if sys.stderr is not None:
        sys.stderr.write(
            f"lightning-pipe: strategy='pipeline' is not registered ({type(error).__name__}: "
            f"{error}); pass strategy=lightning_pipe.PipelineStrategy(...) instead.\n"
        )
