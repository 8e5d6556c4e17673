"""Gradients of a step that has already run backward, handed over when Lightning calls `backward`.

Lightning's closure is step, then zero_grad, then backward with the loss divided by the number of
accumulated batches (loops/optimization/automatic.py). A schedule runs its backwards inside the
step, so its gradients are set aside, and the returned loss is a leaf of a graph whose backward adds
them, times the gradient that reaches the loss: scaling, accumulation and a user's own `backward`
work unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.runtime._torch import SharedScaler
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.reduce import gather_values
from lightning_pipe.runtime.shards import laid_out_as
from lightning_pipe.split.parted import is_divided, part_of

#: torch's own; while an optimizer steps another one stands in its place, which sums over stages too
_own_norm = torch.nn.utils.get_total_norm
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class GradientStash:
    """Gradients of one step, kept away from `.grad`.

    Args:
        parameters: Those that the step may give gradients to.
        loss_scale: What the loss was multiplied with.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], loss_scale: float = 1.0) -> None:
        self._parameters = parameters
        self._loss_scale = loss_scale
        self.gradients: dict[str, Tensor] = {}
        #: called once they are in `.grad`
        self.then: Callable[[], None] | None = None

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Runs a step with empty gradients; afterwards the former ones are back in place."""
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self.gradients[name] = laid_out_as(parameter, parameter.grad)
                parameter.grad = before[name]

    def leave_out(self, names: Iterable[str]) -> None:
        """Forgets gradients of parameters that the loss does not depend on.

        A value that another rank has found no way to comes back as zeros, and an optimizer treats a
        gradient of zero, which decays a weight, otherwise than none.
        """
        for name in names:
            gradient = self.gradients.get(name)
            if gradient is None or gradient.layout != torch.strided:
                continue
            if not bool(part_of(gradient).any()):
                del self.gradients[name]

    def correct(self, factor: float) -> None:
        """Multiplies what will be handed over."""
        self._loss_scale /= factor

    def hand_over(self, factor: Tensor) -> None:
        """Adds the gradients, times a factor, to `.grad`."""
        factor = factor / self._loss_scale
        for name, gradient in self.gradients.items():
            parameter = self._parameters[name]
            scaled = gradient * factor.to(gradient.device)
            if parameter.grad is None:
                parameter.grad = scaled
            elif parameter.grad.is_sparse and not scaled.is_sparse:
                parameter.grad = parameter.grad + scaled
            else:
                parameter.grad += scaled
        if self.then is not None:
            self.then()

    def attach(self, loss: Tensor) -> Tensor:
        """The loss as the end of a graph whose backward hands the gradients over."""
        anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
        attached: Tensor = _HandOver.apply(anchor, loss.detach(), self)  # type: ignore[no-untyped-call]
        return attached


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, stash: GradientStash) -> Tensor:
        ctx.stash = stash
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            ctx.stash.hand_over(grads[0].sum())
        return torch.zeros_like(grads[0].sum()), None, None


def clip_by_norm_over_stages(
    ranks: Ranks, counted: Callable[[Tensor], bool]
) -> Callable[[Optimizer, float], None]:
    """Makes what clips by the norm over all stages; every rank calls it with its part.

    Args:
        ranks: This rank.
        counted: Whether this rank counts a parameter: one of all ranks that hold a copy does.
    """

    def clip(optimizer: Optimizer, clip_val: float) -> None:
        parameters: Sequence[Tensor] = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        counted_grads = [p.grad for p in parameters if counted(p) and p.grad is not None]
        norm = total_norm(
            counted_grads, ranks, (p.grad.dtype for p in parameters if p.grad is not None)
        )
        torch.nn.utils.clip_grads_with_norm_(local_gradients(parameters), clip_val, norm)

    return clip


def share_overflow(
    precision: Any, ranks: Ranks, device: torch.device, together: Callable[[str], Any] | None = None
) -> Callable[[], None] | None:
    """Lets all ranks skip a step in which any of them overflows, so that they keep one loss scale.

    Args:
        precision: A precision plug-in; if it has a `scaler`, that is replaced.
        ranks: This rank.
        device: Where the gradients are.
        together: Lets ranks that wait here answer those whose hooks still ask for gradients.

    Returns:
        What puts the plug-in's own scaler back, with the state of the other; None without one.
    """
    own = getattr(precision, "scaler", None)
    if own is None or ranks.world_size == 1:
        return None
    group = dist.group.WORLD if ranks.others else ranks.pipeline_group
    shared = SharedScaler(device.type, process_group=group)
    if together is not None:
        own_unscale = shared.unscale_

        def unscale_(optimizer: Optimizer) -> None:
            together("looks for an overflow in the gradients")
            own_unscale(optimizer)

        shared.unscale_ = unscale_  # type: ignore[method-assign]
    shared.load_state_dict(own.state_dict())
    precision.scaler = shared

    def undo() -> None:
        own.load_state_dict(shared.state_dict())
        precision.scaler = own

    return undo


def local_gradients(parameters: Iterable[Tensor]) -> list[Any]:
    """What has, in its `.grad`, the gradient or this copy's part of it: the same memory."""
    gradients = (parameter.grad for parameter in parameters)
    return [SimpleNamespace(grad=part_of(grad)) for grad in gradients if grad is not None]


def norm_of_parts(
    gradients: Sequence[Tensor],
    norm_type: float,
    sharers: Ranks | None,
    own_norm: Callable[..., Tensor] = _own_norm,
) -> Tensor:
    """The norm of gradients of which other processes may hold parts; all have to call it.

    Args:
        gradients: Of one rank of the pipeline; parts are `DTensor`s.
        norm_type: Which norm.
        sharers: The processes that hold the other parts.
        own_norm: torch's function for it.
    """
    whole = [part_of(gradient) for gradient in gradients if not is_divided(gradient)]
    parts = [gradient for gradient in gradients if is_divided(gradient)]
    norm = own_norm(whole, norm_type) if whole or not parts else None
    if not parts:
        assert norm is not None
        return norm
    of_parts = own_norm([part_of(gradient) for gradient in parts], norm_type)
    assert sharers is not None
    with at(sharers, "takes the norm of gradients"):
        all_parts = gather_values(sharers, of_parts)
    norms = [*all_parts, *([] if norm is None else [norm.to(of_parts.device)])]
    joined: Tensor = torch.linalg.vector_norm(torch.stack([n.double() for n in norms]), norm_type)
    return joined.to(promoted(norm.dtype for norm in norms))


def promoted(types: Iterable[torch.dtype]) -> torch.dtype:
    """The type of a norm of gradients of these types, as torch promotes them."""
    real = [kind.to_real() for kind in types]
    return reduce(torch.promote_types, real) if real else torch.float32


def total_norm(gradients: Sequence[Tensor], ranks: Ranks, types: Iterable[torch.dtype]) -> Tensor:
    """The 2-norm of the gradients of all ranks of a pipeline, the same number on all of them.

    Args:
        gradients: Those that this rank counts.
        ranks: This rank.
        types: Of all gradients that it has: the norm is of the type that all ranks' promote to.
    """
    own = norm_of_parts(gradients, 2.0, ranks.sharers) if gradients else torch.zeros(())
    has = {kind.to_real() for kind in types}
    told = torch.tensor([0.0, *(kind in has for kind in _TYPES)], dtype=torch.float64)
    told[0] = own.detach().to("cpu", torch.float64) ** 2
    if ranks.control_group is not None:
        with at(ranks, "clips gradients"):
            dist.all_reduce(told, group=ranks.control_group)
    there = [kind for kind, count in zip(_TYPES, told[1:].tolist(), strict=True) if count]
    return told[0].sqrt().to(own.device, promoted(there))
