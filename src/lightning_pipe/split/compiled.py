"""SEAM: units whose forwards `torch.compile` compiles, one by one.

What runs on a stage is the user's step, in which some units are called and others stand in, so the
step cannot be compiled; a unit is plain torch code and can. Its forward is replaced while a stage
runs, and never between steps: hooks, copies and checkpoints find the module that the user made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.split.batchnorm import batch_norms
from lightning_pipe.split.patching import ENTRIES, Replacement
from lightning_pipe.split.units import is_metric

__all__ = ["CompiledUnits", "check_options"]

_ARGUMENTS = [
    name for name in inspect.signature(torch.compile).parameters if name not in ("model", "disable")
]
_GRAPHS = ("reduce-overhead", "max-autotune")


def check_options(given: bool | str | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Arguments for `torch.compile`; None where nothing is compiled.

    Args:
        given: Whether to compile; or a mode, or arguments of `torch.compile`.

    Raises:
        ConfigError: They are none, or need what a pipeline does not have.
    """
    if given is None or isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, (str, Mapping)):
        raise ConfigError(f"compile={given!r}: give True, a mode, or arguments of torch.compile")
    from torch._inductor import list_mode_options  # takes long to import

    options: dict[str, Any] = {"mode": given} if isinstance(given, str) else dict(given)
    unknown = [name for name in options if name not in _ARGUMENTS]
    if unknown:
        raise ConfigError(
            f"compile has {unknown[0]!r}: give True, a mode, or a dict of {', '.join(_ARGUMENTS)}"
        )
    mode, backend = options.get("mode"), options.get("backend", "inductor")
    modes = list_mode_options()
    if mode is not None and mode not in modes:
        raise ConfigError(f"compile={mode!r}: give True, or one of {', '.join(modes)}")
    if isinstance(backend, str) and backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile has backend={backend!r}: give one of {known}")
    graphs = (options.get("options") or {}).get("triton.cudagraphs", False)
    if mode in _GRAPHS or graphs or backend == "cudagraphs":
        raise ConfigError(
            f"compile={given!r} records CUDA graphs, whose runs write into the memory of the run "
            "before: a stage has several micro-batches under way. Give "
            "'max-autotune-no-cudagraphs', or True"
        )
    return options


class CompiledUnits:
    """The compiled forwards of the units of a module.

    Args:
        options: For `torch.compile`; None compiles nothing.
        deferred: Whether something notes what batch norms are given: it takes the place of their
            forwards while a step runs, so that compiled code has to call what is there.
    """

    def __init__(self, options: Mapping[str, Any] | None, *, deferred: bool = False) -> None:
        self._options = options
        self._deferred = deferred
        self._forwards: dict[Any, Callable[..., Any]] = {}

    def replacements(
        self, root: nn.Module, units: Collection[str], drawing: Collection[str]
    ) -> list[Replacement]:
        """What makes units run compiled for as long as it is in place.

        Args:
            root: The user's module.
            units: Their names.
            drawing: Names of the modules with random streams of their own.
        """
        if self._options is None:
            return []
        found: list[Replacement] = []
        noted = {name for name, _ in batch_norms(root)} if self._deferred else set()
        for name in units:
            module = root.get_submodule(name)
            if not name or is_metric(module) or isinstance(module, torch.jit.ScriptModule):
                continue
            if name in noted:
                continue
            parts = sorted(n for n in {*drawing, *noted} if n.startswith(f"{name}."))
            inside = tuple(root.get_submodule(part) for part in parts)
            if (module, inside) not in self._forwards:
                self._forwards[module, inside] = self._compiled(module, inside, len(units))
            found.append((module, "forward", self._forwards[module, inside]))
        return found

    def _compiled(
        self, module: nn.Module, inside: Sequence[nn.Module], num_units: int
    ) -> Callable[..., Any]:
        options = dict(self._options or {})
        if "recompile_limit" in _ARGUMENTS:  # equal code has one cache, and may depend on a number
            options.setdefault("recompile_limit", 8 + num_units)
        compiled: Any = torch.compile(module.forward, **options)
        parts = [_Uncompiled(part) for part in inside]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for part in parts:
                    stack.enter_context(part.called())
                return compiled(*args, **kwargs)

        return forward


class _Uncompiled:
    """A module in a compiled unit whose forward is another one while a step runs: one with a random
    stream of its own, or a batch norm that is noted. Compiled code calls it, so that it does what
    it does anywhere. What is called is always the same function, or a guard of the compiled code
    would fail.
    """

    def __init__(self, module: nn.Module) -> None:
        self._space = vars(module)
        self._plain = MethodType(type(module).forward, module)
        self._now: Callable[..., Any] = self._plain
        self._call = torch.compiler.disable(self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._now(*args, **kwargs)

    @contextmanager
    def called(self) -> Iterator[None]:
        """While its unit runs."""
        now = {entry: self._space.pop(entry) for entry in ENTRIES if entry in self._space}
        before, self._now = self._now, now.get("forward", self._plain)
        self._space["forward"] = self._call
        try:
            yield
        finally:
            self._now = before
            del self._space["forward"]
            self._space.update(now)
