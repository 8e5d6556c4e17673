"""What code does to weights, shown to a blueprint while it does it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.split._fake import DispatchMode, TorchFunctionMode, plain_functions
from lightning_pipe.split.parted import part_of
from lightning_pipe.split.stored import StoredTensor
from lightning_pipe.split.tree import tensors

#: these read memory and are no operations
_READS = frozenset(
    ("numpy", "__array__", "tolist", "data_ptr", "__deepcopy__", "__reduce_ex__", "__dlpack__")
)


class Onlooker(Protocol):
    """Who is shown what is done: a blueprint."""

    @property
    def is_active(self) -> bool:
        """Whether operations are seen."""

    def serving(self) -> AbstractContextManager[None]:
        """Code reads and writes weights."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation."""

    def pin_all(self, values: Any) -> None:
        """Tensors in a nest are as any others from here on."""


class Operations(DispatchMode):
    """Shows operations to a blueprint."""

    def __init__(self, blueprint: Onlooker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._blueprint = blueprint

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if any(issubclass(kind, DTensor) for kind in types):
            # not made again: what a process has of it is little
            self._blueprint.pin_all([part_of(t) for t in tensors((args, kwargs))])
            return func(*args, **(kwargs or {}))
        if not all(map(_is_plain, types)):
            return NotImplemented  # what such a tensor is made of comes by itself
        return self._blueprint.operation(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Notices what reads memory and is no operation."""

    def __init__(self, blueprint: Onlooker) -> None:
        super().__init__()
        self._blueprint = blueprint

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if getattr(func, "__name__", "") in _READS:
            self._blueprint.pin_all((args, kwargs))
        return func(*args, **(kwargs or {}))


class ColdParameter(nn.Parameter):
    """A parameter that is made when somebody uses it."""

    blueprint: Onlooker

    @classmethod
    def __torch_function__(  # type: ignore[no-untyped-def]
        cls, func, types, args=(), kwargs=None
    ):
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        blueprint = next(vars(t)["blueprint"] for t in given if type(t) is ColdParameter)
        if blueprint.is_active:
            with plain_functions():
                return func(*args, **kwargs)
        with blueprint.serving(), plain_functions():
            result = func(*args, **kwargs)
            known = {id(tensor) for tensor in given}
            blueprint.pin_all([t for t in tensors(result) if id(t) not in known])
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        copied: nn.Parameter = memo[id(self)]
        return copied


def _is_plain(kind: type) -> bool:
    """Whether operations on such tensors are torch's own, or are done when somebody looks."""
    own: Any = Tensor.__torch_dispatch__
    return kind is StoredTensor or getattr(kind, "__torch_dispatch__", None) is own
