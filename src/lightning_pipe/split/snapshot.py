"""Remember the plain state of all modules, and put it back: a trace leaves nothing behind."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.units import is_metric

_STRUCTURE = frozenset({"_parameters", "_modules", "_buffers"})
_PATCHES = frozenset({"forward", "_call_impl", "log", "update", "compute"})
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict, deque)


def _copied(value: Any) -> Any:
    """Copy a built-in container one level deep; anything else is remembered as the object
    itself."""
    return value.copy() if type(value) in _CONTAINERS else value


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(content)
    else:
        container.update(content)


def _same(value: Any, before: Any, content: Any) -> bool:
    """Tell whether an attribute still is what it was; containers are compared element by
    identity."""
    if value is not before:
        plain = isinstance(value, (int, float, str, bool, type(None)))
        return plain and type(value) is type(before) and bool(value == before)
    if isinstance(value, dict) and type(value) in _CONTAINERS:
        return list(value) == list(content) and all(value[k] is content[k] for k in value)
    if type(value) in (list, deque):
        return len(value) == len(content) and all(
            a is b for a, b in zip(value, content, strict=True)
        )
    if type(value) is set:
        return bool(value == content)
    return True


def holds_fake(value: Any) -> bool:
    """Tell whether ``value`` is a fake tensor or a built-in container that holds one."""
    if isinstance(value, Tensor):
        return is_fake(value)
    if isinstance(value, dict):
        return any(holds_fake(item) for item in value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return any(holds_fake(item) for item in value)
    return False


class Snapshot:
    """The attributes and buffers of every module below ``root``, metrics excepted, at one moment.

    Args:
        root: The user's module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._modules: list[tuple[str, nn.Module, dict[str, tuple[Any, Any]]]] = []
        self._buffers: list[tuple[str, nn.Module, str, Tensor | None, Tensor | None]] = []
        for name, module in root.named_modules():
            if is_metric(module):
                continue
            state = {
                key: (value, _copied(value))
                for key, value in vars(module).items()
                if key not in _STRUCTURE
            }
            self._modules.append((name, module, state))
            for key, buffer in module._buffers.items():
                copy = buffer.detach().clone() if isinstance(buffer, Tensor) else None
                full = f"{name}.{key}" if name else key
                self._buffers.append((full, module, key, buffer, copy))

    def changed_attributes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (module name, attribute, value now) of everything that is not what it was."""
        for name, module, state in self._modules:
            for key, value in vars(module).items():
                if key in _STRUCTURE or key in _PATCHES or key.startswith("_forward_"):
                    continue
                if key not in state or not _same(value, *state[key]):
                    yield name, key, value

    def changed_buffers(self) -> Iterator[str]:
        """Yield the names of buffers that were replaced by another tensor or written in place."""
        for name, module, key, buffer, copy in self._buffers:
            now = module._buffers.get(key)
            written = buffer is not None and copy is not None and not torch.equal(buffer, copy)
            if now is not buffer or written:
                yield name

    def restore(self) -> None:
        """Put every attribute, container content and buffer value back."""
        for _, module, state in self._modules:
            space = vars(module)
            for key in [k for k in space if k not in state and k not in _STRUCTURE]:
                del space[key]
            for key, (value, content) in state.items():
                space[key] = value
                if type(value) in _CONTAINERS:
                    _refill(value, content)
        for _, module, key, buffer, copy in self._buffers:
            module._buffers[key] = buffer
            if isinstance(buffer, Tensor) and copy is not None and not is_fake(buffer):
                with torch.no_grad():
                    buffer.copy_(copy)


class AttributeKeeper:
    """Remembers a few named attributes only; cheap enough for every run of a step.

    Args:
        root: The user's module.
        names: (module name, attribute) pairs that the trace saw change.
    """

    def __init__(self, root: nn.Module, names: frozenset[tuple[str, str]]) -> None:
        self._saved: list[tuple[dict[str, Any], str, bool, Any, Any]] = []
        for module_name, key in sorted(names):
            space = vars(root.get_submodule(module_name))
            value = space.get(key)
            self._saved.append((space, key, key in space, value, _copied(value)))

    def restore(self, *, only_fakes: bool = False) -> None:
        """Put the attributes back; with ``only_fakes`` only those that hold a tensor without data
        now."""
        for space, key, existed, value, content in self._saved:
            if only_fakes and not holds_fake(space.get(key)):
                continue
            if not existed:
                space.pop(key, None)
                continue
            space[key] = value
            if type(value) in _CONTAINERS:
                _refill(value, content)
