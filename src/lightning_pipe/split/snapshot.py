"""Remember the plain state of all modules, and put it back: a trace leaves nothing behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe.split._fake import is_fake, storage_key
from lightning_pipe.split.frozen import Frozen, Name, fingerprint, holds_fake, is_data, same_plain
from lightning_pipe.split.frozen import frozen as freeze
from lightning_pipe.split.units import is_metric

_STRUCTURE = frozenset({"_parameters", "_modules", "_buffers"})
_PATCHES = frozenset({"forward", "_call_impl", "log", "print", "update", "compute"})
_HOOKS = "_hooks"  # the attributes of a module that hold its hooks have this in their names


def _is_mark(value: Any) -> bool:
    """Tell whether a value may say that hooks are installed: a flag, or their handles."""
    if isinstance(value, (dict, list, tuple)):
        items = list(value.values()) if isinstance(value, dict) else value
        return bool(items) and all(_is_mark(item) for item in items)
    return isinstance(value, (bool, RemovableHandle))


class Snapshot:
    """The attributes and buffers of every module below ``root``, metrics excepted, at one moment.

    Args:
        root: The user's module.
        leave_out: Modules that are left alone, with all inside of them.
    """

    def __init__(self, root: nn.Module, leave_out: Collection[str] = ()) -> None:
        self._modules: list[tuple[str, nn.Module, dict[str, Any], dict[str, Frozen | Name]]] = []
        self._buffers: list[tuple[str, nn.Module, str, Tensor | None, Tensor | None]] = []
        self._foreign: list[tuple[str, Any, bytes]] = []
        memo: dict[int, Any] = {}
        left_out = tuple(f"{name}." for name in leave_out)
        for name, module in root.named_modules():
            if is_metric(module) or f"{name}.".startswith(left_out):
                continue
            state = {key: value for key, value in vars(module).items() if key not in _STRUCTURE}
            frozen = {
                key: freeze(value, all_data=True, memo=memo)
                for key, value in state.items()
                if is_data(value)
            }
            self._modules.append((name, module, state, frozen))
            for key, value in state.items():
                print_before = fingerprint(value)
                if print_before is not None:
                    self._foreign.append((f"{name}.{key}".strip("."), value, print_before))
            for key, buffer in module._buffers.items():
                copy = buffer.detach().clone() if isinstance(buffer, Tensor) else None
                full = f"{name}.{key}" if name else key
                self._buffers.append((full, module, key, buffer, copy))

    def changed_attributes(
        self, written: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, str, Any]]:
        """Yield (module name, attribute, value now) of everything that is not what it was.

        Args:
            written: Storages that were written; a fake that is written into a tensor leaves no
                other mark.
        """
        for name, module, state, frozen in self._modules:
            for key, value in vars(module).items():
                if key in _STRUCTURE or key in _PATCHES or key.startswith("_forward_"):
                    continue
                if key not in state:
                    yield name, key, value
                elif value is not state[key]:
                    if not same_plain(value, state[key]):
                        yield name, key, value
                elif key in frozen and frozen[key].differs(written):
                    yield name, key, value

    def changed_buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, tensor now) of buffers that were replaced or written in place."""
        for name, module, key, buffer, copy in self._buffers:
            now = module._buffers.get(key)
            written = buffer is not None and copy is not None and not torch.equal(buffer, copy)
            if now is not buffer or written:
                yield name, now

    def changed_objects(self) -> Iterator[str]:
        """Say of objects that cannot be put back that they changed."""
        for name, value, before in self._foreign:
            if fingerprint(value) != before:
                yield (
                    f"the step changes {name}, a {type(value).__name__}, which cannot be put back: "
                    "it sees every micro-batch and every trace, on each rank"
                )

    def buffers_in(self, storages: frozenset[int]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the buffers whose data is in one of these storages."""
        for name, _, _, buffer, _ in self._buffers:
            if buffer is not None and storage_key(buffer) in storages:
                yield name, buffer

    def keep_installed(self) -> tuple[str, ...]:
        """Keep the hooks that the step added to modules, and what it noted about them.

        Libraries install hooks in the first step and set a flag. Put back, they would be installed
        again in each run that starts from the old flag, and twice where only one of the two is.

        Returns:
            The names of the modules that have new hooks.
        """
        grown = []
        for name, module, state, frozen in self._modules:
            for key, value in vars(module).items():
                known = frozen.get(key)
                before = known.content if isinstance(known, Frozen) else None
                if _HOOKS in key and isinstance(before, dict) and value.keys() > before.keys():
                    state[key], frozen[key] = value, Frozen(value, all_data=True)
                    grown.append(name)
        if not grown:
            return ()
        for _, module, state, frozen in self._modules:
            for key, value in vars(module).items():
                if key not in _STRUCTURE and key not in _PATCHES and _is_mark(value):
                    state[key] = value
                    if is_data(value):
                        frozen[key] = Frozen(value, all_data=True)
        return tuple(dict.fromkeys(grown))

    def restore(self) -> None:
        """Put every attribute, container content and buffer value back."""
        for _, module, state, frozen in self._modules:
            space = vars(module)
            for key in [k for k in space if k not in state and k not in _STRUCTURE]:
                del space[key]
            space.update(state)
            for kept in frozen.values():
                kept.reset()
        for _, module, key, buffer, copy in self._buffers:
            module._buffers[key] = buffer
            if isinstance(buffer, Tensor) and copy is not None and not is_fake(buffer):
                if torch.equal(buffer, copy):  # it may be saved for a backward
                    continue
                with torch.no_grad():
                    buffer.copy_(copy)


class AttributeKeeper:
    """Remembers a few named attributes only; cheap enough for every run of a step.

    Args:
        root: The user's module.
        names: (module name, attribute) pairs that the trace saw change.
    """

    def __init__(self, root: nn.Module, names: frozenset[tuple[str, str]]) -> None:
        self._saved: list[tuple[dict[str, Any], str, bool, Any, Frozen | Name | None]] = []
        memo: dict[int, Any] = {}
        for module_name, key in sorted(names):
            space = vars(root.get_submodule(module_name))
            value = space.get(key)
            frozen = freeze(value, all_data=True, memo=memo) if is_data(value) else None
            self._saved.append((space, key, key in space, value, frozen))

    def restore(self, *, only_fakes: bool = False) -> None:
        """Put the attributes back; with ``only_fakes`` only those that hold a tensor without data
        now."""
        for space, key, existed, value, frozen in self._saved:
            if only_fakes and not holds_fake(space.get(key)):
                continue
            if not existed:
                space.pop(key, None)
                continue
            space[key] = value
            if frozen is not None:
                frozen.reset()


@contextmanager
def unchanged(*owners: Any) -> Iterator[None]:
    """Put the attributes of some objects back on exit; None among them is skipped."""
    memo: dict[int, Any] = {}
    saved = []
    for owner in owners:
        if owner is not None:
            state = dict(vars(owner))
            data = {key: value for key, value in state.items() if is_data(value)}
            kept = [freeze(value, all_data=True, memo=memo) for value in data.values()]
            saved.append((vars(owner), state, kept))
    try:
        yield
    finally:
        for space, state, kept in saved:
            for key in space.keys() - state.keys():
                del space[key]
            space.update(state)
            for value in kept:
                value.reset()
