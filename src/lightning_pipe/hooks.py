"""Code between steps may use every weight, as on one device: values of other ranks are fetched.

While a hook of the user runs, two modes of torch see what it does with parts of the spread model
(`Parts`): a dispatch mode its operations, a function mode what is no operation (`p.grad`,
`p.numpy()`, `copy.deepcopy(p)`). All ranks run the same hook, so they come to the same operations
in the same order, and one of these happens on each:

- only parts are written, from parts that are where they are (`p.mul_(0.9)`, an average of weights
  beside its source): ranks that have them compute, the others do nothing;
- a part is read (`p.norm()`, `net(x)`, `copy.deepcopy(net)`): all are given its value, or what a
  reduction makes of it, by the rank that has it;
- only its shape matters (`randn_like(p)`, `p.normal_()`): a tensor of that shape is made, so that
  the random generators of all ranks move alike.

A hook that runs on one rank only gets its values too: the others answer where they meet next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.parts import Found, Part, Parts
from lightning_pipe.runtime._torch import total_norm_replaced
from lightning_pipe.split._fake import (
    TorchDispatchMode,
    TorchFunctionMode,
    blank,
    is_fake,
    popped,
    without_modes,
)
from lightning_pipe.split.schemas import mutated_arguments, reads_nothing
from lightning_pipe.split.stand_ins import with_stand_ins
from lightning_pipe.split.tree import map_tensors, tensors

_LIKE = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("randint_like", "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    )
)
_REDUCTIONS = frozenset(
    (
        *("linalg_vector_norm", "norm", "sum", "mean", "amax", "amin", "max", "min", "prod"),
        *("std", "var", "all", "any", "count_nonzero"),
    )
)
#: these return no tensor and yet need values
_VALUES = frozenset(("_local_scalar_dense", "equal", "is_nonzero", "allclose"))


class Hooks:
    """Lets hooks of the user see the whole model.

    Args:
        parts: What is spread.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._modes: tuple[_Operations, _Functions] | None = None
        self._suspended = 0

    @property
    def passes(self) -> bool:
        """Whether the modes let everything through."""
        return bool(self._suspended)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A hook runs."""
        if self._modes is not None and not self._suspended:
            yield
            return
        outer, suspended = self._modes, self._suspended
        self._modes, self._suspended = (_Operations(self), _Functions(self)), 0
        self.parts.forget()
        try:
            with total_norm_replaced(self._total_norm), self._modes[0], self._modes[1]:
                yield
        finally:
            self._modes, self._suspended = outer, suspended
            self.parts.forget()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within a hook, what is none begins: a step, the optimizer, a checkpoint."""
        if self._modes is None:
            yield
            return
        self._suspended += 1
        with ExitStack() as stack:
            if self._suspended == 1:
                stack.enter_context(popped(*self._modes))
                self.parts.forget()
            try:
                yield
            finally:
                self._suspended -= 1
                self.parts.forget()

    # ------------------------------------------------------------------ operations

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Does an operation as on one device."""
        if self.parts.parted is not None:
            written = mutated_arguments(func, args, kwargs)
            with without_modes():
                done, args, kwargs = self.parts.parted.operation(func, args, kwargs, written)
            if done:
                return args
            if written:
                result = self._operation(func, args, kwargs)
                return written[0] if len(written) == 1 else result
        return self._operation(func, args, kwargs)

    def _operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors((args, kwargs))
        found = {id(t): f for t in given if (f := self.parts.find(t)) is not None}
        if not found:
            return self._call(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name in _LIKE:
            return self._onblanks(func, args, kwargs)
        written = mutated_arguments(func, args, kwargs)
        if not written and name not in _VALUES and reads_nothing(func):
            return func(*args, **kwargs)
        if name.startswith("_foreach"):
            if written:
                return self._write_lists(func, args, kwargs, found)
            if name == "_foreach_norm":
                return self._norms(args[0], found, *args[1:], **kwargs)
        if written:
            return self._write(func, args, kwargs, written, found)
        if name == "equal":
            return self._equal(args[0], args[1], found)
        if self._is_reduction(name, args, kwargs, given, found):
            view, rest = args[0], _hashable(args[1:])
            with without_modes():
                (result,) = self.parts.computed([(found[id(view)], view)], str(func), rest)
                return map_tensors(lambda t: t.to(view.device), result)
        return self._with_values(func, args, kwargs, found, list(found.values()))

    def _is_reduction(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        found: Mapping[int, Found],
    ) -> bool:
        return (
            name in _REDUCTIONS
            and not kwargs
            and len(given) == 1
            and args[0] is given[0]
            and args[0].numel() > 16
            and not self.parts.is_everywhere(found[id(args[0])].part)
        )

    def _with_values(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        found: Mapping[int, Found],
        needed: Sequence[Found],
    ) -> Any:
        return self._call(func, *self._valued(args, kwargs, found, needed))

    def _valued(
        self, args: Any, kwargs: Any, found: Mapping[int, Found], needed: Sequence[Found]
    ) -> Any:
        """Arguments with the values of parts that are not here."""
        values = self._fetch(f.part for f in needed)

        def real(tensor: Tensor) -> Tensor:
            known = found.get(id(tensor))
            if known is None or known.part not in values:
                return tensor
            return known.view(values[known.part], tensor)

        with without_modes():
            return map_tensors(real, (args, kwargs))

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls an operation with values; a user's own tensors may be in parts beside them."""
        parted = self.parts.parted
        if parted is None or not parted.are_mixed(args, kwargs):
            return func(*args, **kwargs)
        written = mutated_arguments(func, args, kwargs)
        if written and isinstance(args[0], (list, tuple)) and (count := len(args[0])) > 1:
            for place in range(count):  # one may be in parts, and the next one not
                self._call(func, *_only([place], count, args, kwargs))
            return None
        with without_modes():
            args, kwargs = parted.alike(args, kwargs, written)
        return func(*args, **kwargs)

    def _onblanks(self, func: Any, args: Any, kwargs: Any) -> Any:
        with without_modes():
            args, kwargs = map_tensors(blank, (args, kwargs))
        return func(*args, **kwargs)

    def _fetch(self, parts: Any) -> dict[Part, Tensor]:
        with without_modes():
            return self.parts.values(parts)

    def _write(
        self, func: Any, args: Any, kwargs: Any, written: list[Tensor], found: Mapping[int, Found]
    ) -> Any:
        targets = [found.get(id(tensor)) for tensor in written]
        targets_ids = {id(tensor) for tensor in written}
        sources = [f for key, f in found.items() if key not in targets_ids]
        needed = [s for s in sources if not all(s.is_beside(t) for t in targets)]
        args, kwargs = self._valued(args, kwargs, found, needed)
        if all(t is not None and not self.parts.is_here(t.part) for t in targets):
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._onblanks(func, args, kwargs)
            return written[0] if len(written) == 1 else tuple(written)
        return self._call(func, args, kwargs)

    def _write_lists(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, found: Mapping[int, Found]
    ) -> Any:
        """An operation on lists of tensors: each element for itself, those of others not at all."""
        count = len(args[0])
        targets = [found.get(id(tensor)) for tensor in args[0]]
        needed = []
        for value in [*args[1:], *kwargs.values()]:
            beside = _is_list(value, count)
            for index, tensor in enumerate(tensors(value)):
                source = found.get(id(tensor))
                if source is not None and not (beside and source.is_beside(targets[index])):
                    needed.append(source)
        args, kwargs = self._valued(args, kwargs, found, needed)
        kept = [i for i, t in enumerate(targets) if t is None or self.parts.is_here(t.part)]

        return self._call(func, *_only(kept, count, args, kwargs)) if kept else None

    def _norms(
        self, tensors: Sequence[Tensor], found: Mapping[int, Found], ord: Any = 2, dtype: Any = None
    ) -> list[Tensor]:
        views = [
            (f, t)
            for t in tensors
            if (f := found.get(id(t))) is not None and not self.parts.is_everywhere(f.part)
        ]
        rest = (ord, None, False)
        with without_modes():
            answers = views and self.parts.computed(views, "aten.linalg_vector_norm.default", rest)
        known = {id(t): a.to(t.device) for (_, t), a in zip(views, answers, strict=True)}
        norm = torch.ops.aten.linalg_vector_norm.default
        norms = [known[id(t)] if id(t) in known else norm(t, ord) for t in tensors]
        return norms if dtype is None else [value.to(dtype) for value in norms]

    def _total_norm(
        self, own: Any, tensors: Any, norm_type: float = 2.0, *rest: Any, **options: Any
    ) -> Tensor:
        """`get_total_norm`, which `clip_grad_norm_` uses too: one question for all tensors."""
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        assert self._modes is not None
        with popped(*self._modes):
            if self.parts.parted is not None:
                values = self.parts.parted.wholes(given)
                given = [values.get(id(t), t) for t in given]
            found = {id(t): f for t in given if (f := self.parts.find(t)) is not None}
            norms = self._norms(given, found, norm_type) if found else given
        total: Tensor = own(norms, norm_type, *rest, **options)
        return total

    def _equal(self, a: Tensor, b: Tensor, found: Mapping[int, Found]) -> bool:
        if a.shape != b.shape:
            return False
        one, other = found.get(id(a)), found.get(id(b))
        same = one is not None and other is not None and one.base is other.base
        if same and (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset()):
            return True
        func = torch.ops.aten.equal.default
        return bool(self._with_values(func, (a, b), {}, found, list(found.values())))

    # ------------------------------------------------------------------ what is no operation

    def whole(self, tensor: Tensor) -> Tensor:
        """The value of a tensor, if it is a part; itself if it is none."""
        if self.parts.parted is not None:
            with without_modes():
                tensor = self.parts.parted.whole(tensor)
        found = self.parts.find(tensor)
        if found is None:
            return tensor
        values = self._fetch([found.part])
        return found.view(values[found.part], tensor) if found.part in values else tensor

    def set_data(self, parameter: Tensor, value: Tensor) -> None:
        """`parameter.data = value`, which ranks that do not have it leave out."""
        parted = self.parts.parted
        if parted is not None and isinstance(parameter, DTensor):
            value = self.whole(value)
            with without_modes():
                if parted.set_data(parameter, value):
                    return
        found = self.parts.find(parameter)
        if found is None or self.parts.is_here(found.part):
            parameter.data = self.whole(value)
            self.parts.moved()
        else:
            self.whole(value)


class NoHooks:
    """In the place of `Hooks` before the model is cut."""

    def running(self) -> AbstractContextManager[None]:
        """A hook runs."""
        return nullcontext()

    suspended = running


class _Operations(TorchDispatchMode):
    def __init__(self, hooks: Hooks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hooks = hooks

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        if self._hooks.passes:
            return func(*args, **(kwargs or {}))
        return self._hooks.operation(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ):
        args, kwargs = with_stand_ins(args, kwargs or {})
        handler = None if self._hooks.passes else _HANDLERS.get(func)
        return func(*args, **kwargs) if handler is None else handler(self._hooks, func, args)


def _get_grad(hooks: Hooks, func: Any, args: Any) -> Tensor | None:
    return hooks.parts.gradient(args[0])


def _set_grad(hooks: Hooks, func: Any, args: Any) -> None:
    value = None if args[1] is None else hooks.whole(args[1])
    if hooks.parts.set_gradient(args[0], value):
        if hooks.parts.parted is not None and value is not None:
            with without_modes():
                value = hooks.parts.parted.part_like(args[0], value)
        args[0].grad = value


def _set_data(hooks: Hooks, func: Any, args: Any) -> None:
    hooks.set_data(*args)


def _on_value(hooks: Hooks, func: Any, args: Any) -> Any:
    return func(hooks.whole(args[0]), *args[1:])


def _deepcopy(hooks: Hooks, func: Any, args: Any) -> Any:
    tensor, memo = args
    is_buffer = not isinstance(tensor, nn.Parameter) and hooks.parts.find(tensor) is not None
    # a buffer of another stage has data, but not its own
    if not (is_fake(tensor) or is_buffer or isinstance(tensor, DTensor)):
        return func(tensor, memo)
    if id(tensor) not in memo:
        value = hooks.whole(tensor).detach().clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return memo[id(tensor)]


_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_HANDLERS: dict[Any, Callable[[Hooks, Any, Any], Any]] = {
    _GRAD.__get__: _get_grad,
    _GRAD.__set__: _set_grad,
    _DATA.__set__: _set_data,
    Tensor.numpy: _on_value,
    Tensor.tolist: _on_value,
    Tensor.__array__: _on_value,
    Tensor.__repr__: _on_value,
    Tensor.__reduce_ex__: _on_value,
    Tensor.__deepcopy__: _deepcopy,
}


def _is_list(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _only(places: Sequence[int], count: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments of an operation on lists, of which only some elements are meant."""

    def take(value: Any) -> Any:
        return [value[place] for place in places] if _is_list(value, count) else value

    return tuple(map(take, args)), {name: take(value) for name, value in kwargs.items()}


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


__all__ = ["Hooks", "NoHooks"]
