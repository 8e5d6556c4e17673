"""SEAM: the only file of ``split`` that touches torch's private names.

``GHOSTS`` is the one fake-tensor mode of the process: fakes of two modes cannot meet in an
operation, and a stage's foreign parameters outlive any single step. It is a FakeTensorMode with one
hole closed: when a fake is written in place into a real tensor, torch drops the write silently and
later readers would see a stale value. The mode remembers the storages that lost a write
("tainted").
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.autograd import forward_ad
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)

from lightning_pipe.errors import CutError
from lightning_pipe.split.parted import is_parted, part_of, parted_like
from lightning_pipe.split.rng import is_draw
from lightning_pipe.split.schemas import mutated_arguments
from lightning_pipe.split.tree import tensors

#: what `fake.device` is to a dispatch mode: more than half of all operators of a trace
DEVICE_OF = torch.ops.prim.device.default

#: What a fake raises when somebody asks for its value.
VALUE_NEEDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that is called directly, not through torch.compile's wrapper."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def storage_key(tensor: Tensor) -> int:
    """Identify the storage of ``tensor``: aliases have the same key, as long as one of them
    lives."""
    tensor = part_of(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return id(tensor)


def _is_hidden_graph(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, FakeTensor)
        and value.requires_grad
        and not value.is_leaf
    )


class GhostMode(FakeTensorMode):
    """FakeTensorMode that accepts real tensors beside fakes and records lost writes."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        #: storage key -> a tensor of it, kept so that the key stays valid
        self.tainted: dict[int, Tensor] = {}
        #: storage key of a fake -> the name of the parameter that it stands for
        self.names: dict[int, str] = {}
        #: steps that are running; outside of them nobody watches what becomes of a fake
        self.steps = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper costs as much as many an operator on fakes

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if func is DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        leaves = tensors((args, kwargs))
        if (
            schema is not None
            and schema.is_mutable
            and any(isinstance(leaf, FakeTensor) for leaf in leaves)
        ):
            for tensor in mutated_arguments(func, args, kwargs):
                if not isinstance(tensor, FakeTensor):
                    if not self.steps:
                        raise CutError(self._outside(func, leaves))
                    self.tainted[storage_key(tensor)] = tensor
        if any(_is_hidden_graph(leaf) for leaf in leaves):
            # fakeification refuses a real tensor that has a history; its values do not matter here
            args, kwargs = pytree.tree_map(_fake_without_history, (args, kwargs))
        if self.steps:
            return self._inside(func, types, args, kwargs)
        if func is torch.ops.aten.equal.default:  # "is this parameter in that group?"
            return args[0] is args[1]
        try:
            return self.dispatch(func, types, args, kwargs)
        except VALUE_NEEDED as error:
            raise CutError(self._outside(func, leaves)) from error

    def _inside(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of a step; one that draws a single number draws it for real, so that code
        that branches on it can run on fakes."""
        made = self.dispatch(func, types, args, kwargs)
        if not is_draw(func) or not isinstance(made, Tensor) or made.numel() != 1:
            return made
        if tensors((args, kwargs)):
            return made
        with _disable_current_modes():
            real = func(*args, **kwargs)
        return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)

    def _outside(self, func: Any, leaves: Iterable[Any]) -> str:
        fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
        known = [self.names[key] for key in map(storage_key, fakes) if key in self.names]
        return _OUTSIDE.format(func, ", ".join(known[:3]) or "a weight")


#: what is said when a weight of another rank is used where no step watches
_OUTSIDE = (
    "{} needs the value of {}, which lives on another rank of the pipeline. Hooks and callbacks of "
    "the Trainer are given such values; other code (a thread, a data loader, code after a run with "
    'restore_model="none" or "rank_zero") has only the weights of its own stages: do this in a '
    'hook, or with restore_model="all" after the run.'
)


@contextmanager
def inside_step() -> Iterator[None]:
    """A step runs or is traced: lost writes are recorded and judged by who reads them."""
    GHOSTS.steps += 1
    try:
        yield
    finally:
        GHOSTS.steps -= 1


def _fake_without_history(value: Any) -> Any:
    if not _is_hidden_graph(value):
        return value
    with _disable_current_modes():
        return GHOSTS.from_tensor(value.detach())


GHOSTS = GhostMode()


def is_fake(value: Any) -> bool:
    """Tell whether ``value`` is a tensor without data."""
    return isinstance(part_of(value), FakeTensor)


def is_foreign(value: Any) -> bool:
    """Tell whether ``value`` lacks data, or lost a write of a value that lacked data."""
    if is_fake(value):
        return True
    return (
        bool(GHOSTS.tainted) and isinstance(value, Tensor) and storage_key(value) in GHOSTS.tainted
    )


def taint(wrong: Iterable[Tensor]) -> None:
    """Mark real tensors whose values cannot be trusted."""
    for tensor in wrong:
        GHOSTS.tainted[storage_key(tensor)] = tensor


def as_fake(tensor: Tensor) -> Tensor:
    """Return a fake of the same shape, dtype, device and ``requires_grad``; fakes are returned as
    they are."""
    if is_fake(tensor):
        return tensor
    if is_parted(tensor):
        part = as_fake(part_of(tensor.detach()))
        return parted_like(tensor, part).requires_grad_(tensor.requires_grad)
    if tensor.layout is torch.strided and tensor.numel() and not tensor.untyped_storage().nbytes():
        made = empty_fake(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        return made.requires_grad_(tensor.requires_grad)  # its data is away
    with _disable_current_modes():
        if _is_hidden_graph(tensor):
            fake: Tensor = GHOSTS.from_tensor(tensor.detach())
            return fake.requires_grad_()
        return GHOSTS.from_tensor(tensor)


def blank(tensor: Tensor) -> Tensor:
    """A tensor of zeros in the place of a fake."""
    if not is_fake(tensor):
        return tensor
    blank = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return blank.zero_()


def empty_fake(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Make a fake from scratch."""
    with _disable_current_modes(), GHOSTS:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _LargeAsFakes(TorchDispatchMode):
    """Lets a constructor make its large tensors as fakes; small ones keep their values."""

    def __init__(self, least_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with GHOSTS:  # makes a tensor of nothing: how large is it?
            made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.numel() * made.element_size() >= self._least_bytes:
            return made
        return func(*args, **kwargs)


@contextmanager
def large_as_fakes(least_bytes: int = 2**16) -> Iterator[None]:
    """Builds a module without the memory of its weights: tensors that are made from nothing and are
    at least so large become fakes."""
    with _LargeAsFakes(least_bytes):
        yield


def to_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Converts floating-point parameters and buffers, fakes too, which ``module.to`` cannot."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    data = parameter.detach().to(dtype)
                    made[id(parameter)] = nn.Parameter(data, parameter.requires_grad)
                child._parameters[name] = made[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


def without_data(kind: type[Any], shape: torch.Size, dtype: torch.dtype) -> Any:
    """Make a tensor of a subclass that says what to do with it when it is used."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype)


def without_modes() -> AbstractContextManager[Any]:
    """Switch all dispatch modes off, for our own bookkeeping inside a traced region."""
    return _disable_current_modes()


def plain_functions() -> AbstractContextManager[Any]:
    """Switch off what subclasses of tensors do with torch's functions."""
    off: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return off


def num_users(storage: Any) -> int:
    """Count who has a storage: tensors, and handles such as this one."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def inside_transform() -> bool:
    """Tell whether ``vmap``, ``grad``, ``jvp`` or forward-mode differentiation is at work here:
    tensors then carry more than their data."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


@contextmanager
def popped(dispatch: TorchDispatchMode, function: TorchFunctionMode) -> Iterator[None]:
    """Pop two modes for a while, if no other is above them."""
    if _get_current_dispatch_mode() is not dispatch or (
        _get_current_function_mode() is not function
    ):
        yield
        return
    with _pop_mode_temporarily(), _disable_current_modes():
        yield


@contextmanager
def function_mode_off(mode: TorchFunctionMode | None) -> Iterator[None]:
    """Pop ``mode`` while a unit runs, at full speed, unless the user's code put one above it."""
    stack = _get_current_function_mode_stack()
    if mode is None or not stack or stack[-1] is not mode:
        yield
        return
    with _pop_mode_temporarily():
        yield


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep torch from logging a traceback for each operator that has no fake; we have a way out."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def run_eagerly(root: nn.Module) -> Callable[[], None]:
    """Let modules that `torch.compile` made run what they were made of; return what undoes it.

    Compiled code does not call the units inside it, so a stage could not take its part of them.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # imported by whoever compiles
    compiled: list[Any] = [
        m for m in root.modules() if dynamo is not None and isinstance(m, dynamo.OptimizedModule)
    ]
    forwards = [vars(module)["forward"] for module in compiled]
    for module in compiled:
        vars(module)["forward"] = module._orig_mod.__call__

    def undo() -> None:
        for module, forward in zip(compiled, forwards, strict=True):
            vars(module)["forward"] = forward

    return undo


__all__ = [
    "DEVICE_OF",
    "GHOSTS",
    "VALUE_NEEDED",
    "DispatchMode",
    "FakeTensor",
    "GhostMode",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "as_fake",
    "blank",
    "empty_fake",
    "function_mode_off",
    "inside_step",
    "inside_transform",
    "is_fake",
    "is_foreign",
    "large_as_fakes",
    "num_users",
    "plain_functions",
    "popped",
    "quiet_fakes",
    "run_eagerly",
    "storage_key",
    "taint",
    "to_dtype",
    "without_modes",
]
