"""What a unit's call does while a step is traced: it runs on fakes or, where its code cannot, on
random inputs, and each of its outputs is told to be new, a written argument or what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import (
    DEVICE_OF,
    GHOSTS,
    DispatchMode,
    as_fake,
    is_fake,
    storage_key,
    without_modes,
)
from lightning_pipe.split.memo import Elsewhere
from lightning_pipe.split.operators import OperatorLedger, Sources
from lightning_pipe.split.provenance import ValueLedger
from lightning_pipe.split.streams import Streams
from lightning_pipe.split.trace import (
    Alias,
    Constant,
    Leaf,
    Meta,
    NewTensor,
    SideAttribute,
    WrittenArgument,
    WrittenOutput,
)
from lightning_pipe.split.tree import TreeSpec, flatten, map_tensors, unflatten


class _Inside(DispatchMode):
    """Puts the operator ledger above the fake mode while a unit runs."""

    def __init__(self, ledger: OperatorLedger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if func is DEVICE_OF:
            return func(*args)
        return self._ledger.inside_unit(func, args, kwargs or {})


class UnitRunner:
    """Runs the units of one trace.

    Args:
        operators: The operator ledger of the trace.
        values: Its value ledger.
        streams: Its random streams.
        real: Run everything for real instead of on fakes.
    """

    def __init__(
        self, operators: OperatorLedger, values: ValueLedger, streams: Streams, *, real: bool
    ) -> None:
        self._operators = operators
        self._values = values
        self._streams = streams
        self._real = real
        self.notes: list[str] = []
        #: units that cannot run on fakes and ran on made-up values
        self.on_random: set[str] = set()
        #: the values that have each storage
        self.memory: dict[int, set[Any]] = {}

    def execute(
        self,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        arguments: list[Any],
        structure: TreeSpec,
    ) -> tuple[Any, set[int]]:
        """Run the unit; return its output and the positions of the arguments that it wrote."""
        if self._real:
            versions = _versions(arguments)
            args, kwargs = unflatten(arguments, structure)
            return original(*args, **kwargs), _written(arguments, versions)
        fakes = [as_fake(a) if isinstance(a, Tensor) else a for a in arguments]
        versions = _versions(fakes)
        args, kwargs = unflatten(fakes, structure)
        used, counts = fakes, self._streams.counts()
        try:
            self._operators.on_fakes = True
            with GHOSTS, _Inside(self._operators):
                out = original(*args, **kwargs)
        except Exception as error:
            if any(is_fake(p) for p in module.parameters()):
                raise Elsewhere(
                    f"unit '{name}' cannot be traced: its code needs values "
                    f"({type(error).__name__}: "
                    f"{error}) and its weights are on another rank; give batches of one shape."
                ) from error
            self.notes.append(f"{name} ran on random inputs ({type(error).__name__})")
            self.on_random.add(name)
            used = [_random_like(a) for a in arguments]
            self._streams.rewind(counts)
            versions = _versions(used)
            args, kwargs = unflatten(used, structure)
            self._operators.on_fakes = False
            out = original(*args, **kwargs)
        finally:
            self._operators.on_fakes = False
        originals = {
            id(u): a for u, a in zip(used, arguments, strict=True) if isinstance(u, Tensor)
        }
        leaves, out_structure = flatten(out)
        leaves = [
            originals[id(x)] if id(x) in originals else as_fake(x) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        return unflatten(leaves, out_structure), _written(used, versions)

    def outputs(
        self,
        index: int,
        module: nn.Module,
        out: Any,
        arguments: list[Any],
        written: set[int],
        before: dict[tuple[str, str], int],
    ) -> tuple[tuple[Leaf, ...], int, TreeSpec]:
        """Classify every output, and the extra outputs, and record where they come from."""
        values, structure = flatten(out)
        position = {id(a): n for n, a in enumerate(arguments) if isinstance(a, Tensor)}
        leaves: list[Leaf] = []
        returned: set[int] = set()
        for value in values:
            key = frozenset({(index, len(leaves))})
            if not isinstance(value, Tensor):
                leaves.append(Constant(value))
            elif id(value) not in position:
                leaves.append(NewTensor(Meta.of(value)))
                self.memory.setdefault(storage_key(value), set()).update(key)
                self._operators.set(value, key)
                self._values.set(value, key)
            elif position[id(value)] in written:
                leaves.append(WrittenOutput(position[id(value)], Meta.of(value)))
                returned.add(position[id(value)])
                self._overwrite(value, key)
            else:
                leaves.append(Alias(position[id(value)]))
        num_outputs = len(leaves)
        for n in sorted(written - returned):
            self._operators.write(arguments[n], frozenset({(index, len(leaves))}))
            leaves.append(WrittenArgument(n, Meta.of(arguments[n])))
        for (inner, attribute), identity in tensor_attributes(module).items():
            value = getattr(module.get_submodule(inner), attribute)
            if before.get((inner, attribute)) != identity and id(value) not in position:
                key = frozenset({(index, len(leaves))})
                leaves.append(SideAttribute(inner, attribute, Meta.of(value)))
                self._operators.set(value, key)
                self._values.set(value, key)
        return tuple(leaves), num_outputs, structure

    def _overwrite(self, tensor: Tensor, key: Sources) -> None:
        """An in-place unit returned its input: the tensor now *is* the unit's output."""
        before = self._operators.of(tensor)
        self._operators.write(tensor, key)
        self._operators.set(tensor, key | before)


def _versions(values: list[Any]) -> list[int | None]:
    return [v._version if isinstance(v, Tensor) and not v.is_inference() else None for v in values]


def _written(values: list[Any], before: list[int | None]) -> set[int]:
    return {
        n
        for n, (value, version) in enumerate(zip(values, before, strict=True))
        if version is not None and value._version != version
    }


def _random_like(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not is_fake(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if value.is_floating_point():
        made = torch.randn(value.shape, device=value.device).to(value.dtype)
        return made.requires_grad_(value.requires_grad)
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def tensor_attributes(module: nn.Module) -> dict[tuple[str, str], int]:
    """Identify the tensors that are plain attributes of ``module`` or of anything inside it."""
    return {
        (name, key): id(value)
        for name, inner in module.named_modules()
        for key, value in vars(inner).items()
        if isinstance(value, Tensor)
    }


def own_objects(out: Any, module: nn.Module, arguments: list[Any]) -> Any:
    """What a unit that draws returns, in objects of its own that need a gradient if they may.

    Another draw may let it return what it was given, or not: the other stages must not go by
    what happened here.
    """
    given = [a for a in arguments if isinstance(a, Tensor)]
    learns = torch.is_grad_enabled() and any(
        t.requires_grad for t in (*given, *module.parameters())
    )

    def own(tensor: Tensor) -> Tensor:
        known = any(tensor is t for t in given)
        floats = tensor.is_floating_point() or tensor.is_complex()
        missing = learns and floats and not tensor.requires_grad
        if not (known or missing):
            return tensor
        made = tensor.clone()
        return made.requires_grad_().clone() if missing else made

    with without_modes():
        return map_tensors(own, out)
