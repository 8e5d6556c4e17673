"""Stand between the step and its modules, for the length of one run of the step.

A unit is the whole ``module(...)``, hooks included, so ``_call_impl`` is replaced on the instance,
and ``forward`` for those who call it directly. Patches are never on during a backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import is_fake, without_modes
from lightning_pipe.split.tree import map_tensors
from lightning_pipe.split.units import is_metric, modules_of

Call = Callable[..., Any]
#: owner, name of the attribute, and what it is for the length of a run
Replacement = tuple[Any, str, Any]
#: makes the replacement of one method: (bound original, method name) -> replacement
Wrapper = Callable[[Call, str], Call]

#: how a module is called
ENTRIES = ("_call_impl", "forward")
_METRIC_ENTRIES = (*ENTRIES, "update", "compute")


@contextmanager
def attributes(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set instance attributes, bypassing ``nn.Module.__setattr__``, and put everything back on
    exit."""
    saved: list[tuple[dict[str, Any], str, bool, Any]] = []
    try:
        for owner, name, value in replacements:
            space = owner.__dict__
            saved.append((space, name, name in space, space.get(name)))
            space[name] = value
        yield
    finally:
        for space, name, existed, value in reversed(saved):
            if existed:
                space[name] = value
            else:
                space.pop(name, None)


def routed(units: Iterable[tuple[nn.Module, Wrapper]]) -> Iterator[tuple[Any, str, Any]]:
    """List the replacements that send every call of these units through their wrappers."""
    for module, wrapper in units:
        for name in ENTRIES:
            yield module, name, wrapper(getattr(module, name), name)


def outermost(is_busy: Callable[[], bool], call: Callable[..., Any]) -> Wrapper:
    """Make the wrapper of a unit: its calls go to ``call(original, entry, args, kwargs)``.

    Args:
        is_busy: Tells whether a unit runs already; what that one calls is its own affair.
        call: Stands for the unit.
    """

    def wrap(original: Call, entry: str) -> Call:
        def routed_call(*args: Any, **kwargs: Any) -> Any:
            if is_busy():
                return original(*args, **kwargs)
            return call(original, entry, args, kwargs)

        return routed_call

    return wrap


def find_metrics(root: nn.Module) -> list[nn.Module]:
    """Find torchmetrics objects among the submodules and in plain lists, tuples and dicts of
    ``root``."""
    found = [m for m in modules_of(root) if is_metric(m)]
    for value in list(vars(root).values()):
        for item in _in_containers(value):
            # `in` would compare, and metrics make a metric of a comparison
            known = any(item is metric for metric in found)
            if is_metric(item) and not known:
                found += [m for m in item.modules() if is_metric(m)]
    return found


def _in_containers(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    """The modules in plain containers; those of torch's own are its submodules anyway."""
    if not depth or type(value) not in (dict, list, tuple):
        return
    for item in list(value.values()) if isinstance(value, dict) else value:
        if isinstance(item, nn.Module):
            yield item
        else:
            yield from _in_containers(item, depth - 1)


#: what a metric gave for made-up arguments, by its id: its hash changes with its state
_GIVEN: dict[int, tuple[ReferenceType[nn.Module], Any]] = {}


def _stub_value(metric: nn.Module, args: Any, kwargs: Any) -> Any:
    """What stands for the value of a metric: of the same structure, such as a dict."""
    keys = getattr(metric, "keys", None)
    if callable(keys) and isinstance(metric, nn.ModuleDict):
        return {key: torch.zeros(()) for key in keys()}
    known = _GIVEN.get(id(metric))
    if known is None or known[0]() is not metric:
        value: Any = torch.zeros(())
        with without_modes(), suppress(Exception):  # it may not take these; most give one number
            args, kwargs = map_tensors(made_up, (args, kwargs))
            twin = copy.deepcopy(metric)
            for child in twin.modules():  # the copy is of a metric that is silent
                for name in ENTRIES:
                    vars(child).pop(name, None)
            value = twin(*args, **kwargs)
        number = id(metric)
        known = ref(metric, lambda _: _GIVEN.pop(number, None)), value
        _GIVEN[number] = known
    return known[1]


def made_up(tensor: Tensor) -> Tensor:
    """Stand for a tensor where its values do not matter; a real one keeps its own."""
    if not is_fake(tensor):
        return tensor.detach()
    value = 0.5 if tensor.is_floating_point() or tensor.is_complex() else 0
    return torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device=tensor.device)


def silent_metrics(
    metrics: Iterable[nn.Module], on_call: Callable[[Any], None]
) -> Iterator[tuple[Any, str, Any]]:
    """List the replacements that keep metrics from counting, and tell ``on_call`` what they were
    given."""

    def stub(metric: nn.Module, method: str) -> Call:
        def silent(*args: Any, **kwargs: Any) -> Any:
            on_call((args, kwargs))
            return None if method == "update" else _stub_value(metric, args, kwargs)

        return silent

    for metric in metrics:
        for name in _METRIC_ENTRIES:
            if hasattr(metric, name):
                yield metric, name, stub(metric, name)


def silent_talk(root: nn.Module, on_call: Callable[[Any], None]) -> Iterator[Replacement]:
    """List the replacements that keep ``root.log`` and ``root.print`` from talking, and tell
    ``on_call`` what they were given."""

    def silent(*args: Any, **kwargs: Any) -> None:
        on_call((args, kwargs))

    for name in ("log", "print"):
        if callable(getattr(root, name, None)):
            yield root, name, silent


def quiet_metrics(
    metrics: Iterable[nn.Module], unseen: Callable[[Call], Call]
) -> Iterator[tuple[Any, str, Any]]:
    """List the replacements that keep what metrics compute from being taken for the step's own."""
    for metric in metrics:
        for name in _METRIC_ENTRIES:
            if hasattr(metric, name):
                yield metric, name, unseen(getattr(metric, name))


@contextmanager
def noted_hooks(module: nn.Module) -> Iterator[list[int]]:
    """Note which forward hooks of a module give another output: the number up to the last one."""
    last = [0]

    def noted(place: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = hook(*args, **kwargs)
            if value is not None:
                last[0] = max(last[0], place + 1)
            return value

        return call

    hooks = module._forward_hooks
    own = list(hooks.items())
    for place, (identity, hook) in enumerate(own):
        hooks[identity] = noted(place, hook)
    try:
        yield last
    finally:
        for identity, hook in own:
            if identity in hooks:  # it may have taken itself away
                hooks[identity] = hook


def run_forward_hooks(module: nn.Module, args: Any, kwargs: Any, out: Any, done: int) -> None:
    """Run the forward hooks of a call that another stage makes, for what they collect.

    Args:
        module: The unit.
        args: What it is given.
        kwargs: By name.
        out: What stands for its output, which went through all hooks.
        done: Hooks up to the last one that gave another output: they were given what is not here.
    """
    for identity, hook in list(module._forward_hooks.items())[done:]:
        if identity in module._forward_hooks_with_kwargs:
            hook(module, args, kwargs, out)
        else:
            hook(module, args, out)
