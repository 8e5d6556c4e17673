"""Batch norms that take their statistics from the same micro-batch of all copies of the pipeline.

torch's `SyncBatchNorm` runs on CUDA only and reduces over all processes; here the same stage of
each copy takes part. Its copies run the same actions in the same order, recomputation too, so that
what they send meets.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_pipe.errors import ConfigError
from lightning_pipe.home import CutStep
from lightning_pipe.replicas import Copies
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.split.batchnorm import batch_norms
from lightning_pipe.split.ends import Skipped
from lightning_pipe.statistics import DeferredStatistics

#: attribute of a batch norm: the processes that it reduces over, while stages run
_GROUP = "_synced_over"


class SyncedNorms:
    """The batch norms of a module, while they are those of all copies.

    Args:
        module: The user's module; its batch norms have another forward until :meth:`undo`.
        ranks: This rank.
        asked: Whether all batch norms take part; if not, those that are `SyncBatchNorm`s.

    Raises:
        ConfigError: One of them has processes of its own to reduce over.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, *, asked: bool) -> None:
        self._copies = ranks.copies
        self._before: list[tuple[dict[str, Any], Any]] = []
        self._norms = [
            (name, norm)
            for name, norm in batch_norms(module)
            if isinstance(norm, nn.SyncBatchNorm) or (asked and ranks.copies is not None)
        ]
        if ranks.world_size == 1:
            self._norms = []
        for name, norm in self._norms:
            if getattr(norm, "process_group", None) not in (None, dist.group.WORLD):
                raise ConfigError(
                    f"the SyncBatchNorm '{name}' has a process_group of its own, which knows "
                    "nothing of stages: leave it out, and it reduces over the copies of the "
                    "pipeline"
                )
        for _, norm in self._norms:
            space = vars(norm)
            self._before.append((space, space.get("forward")))
            # bound, so that a copy of the module has a method of its own
            space["forward"] = MethodType(_make_forward(), norm)

    def __bool__(self) -> bool:
        """Whether anything is sent."""
        return bool(self._norms) and self._copies is not None

    def undo(self) -> None:
        """Gives the modules their own forwards back."""
        while self._before:
            space, forward = self._before.pop()
            space.pop("forward", None)
            if forward is not None:
                space["forward"] = forward

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the stages run, and at no other time: a trace runs when it has to, on one copy."""
        group = None if self._copies is None else self._copies.pipeline_group
        for _, norm in self._norms:
            vars(norm)[_GROUP] = group
        try:
            yield
        finally:
            for _, norm in self._norms:
                vars(norm).pop(_GROUP, None)

    def refuse_ways(self) -> None:
        """Refuses steps that decide which units they call: copies decide otherwise than each other.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "sync_batchnorm in a step that calls other units for other batches or random numbers: "
            "a batch norm would wait for copies of the pipeline that do not call it. Use another "
            "norm, or call the same units always"
        )

    @contextmanager
    def needing_losses(self) -> Iterator[None]:
        """Refuses a micro-batch that has no loss: its backward is none, and copies wait for it.

        Raises:
            ConfigError: There was no loss.
        """
        try:
            yield
        except Skipped:
            raise ConfigError(
                "sync_batchnorm with a training step that returns None, or a 'loss_weight' of 0: "
                "the batch norms of the other copies of the pipeline wait for its backward. Return "
                "a loss always, or use another norm"
            ) from None

    def agree(self, copies: Copies, cuts: Sequence[CutStep]) -> None:
        """Makes sure that the copies are about to send the same.

        Raises:
            ConfigError: Their steps differ, on all of them.
        """
        calls = {id(cut): [call.unit for call in cut.cut.trace.calls] for cut in cuts}
        own = [zlib.crc32(repr(calls[id(cut)]).encode()) for cut in cuts]
        told = copies.told("compares its micro-batches", own)
        if any(other != own for other in told):
            numbers = [len(other) for other in told]
            raise ConfigError(
                "sync_batchnorm: the copies of the pipeline have other micro-batches than each "
                f"other ({numbers} of them, or with other units), and a batch norm needs the same "
                "of all. Give batches of one size (drop_last=True), or use another norm"
            )

    def compare(self, copies: Copies, correction: float) -> None:
        """Makes sure that the losses of all copies count the same: gradients went between them.

        Raises:
            ConfigError: They do not, on all of them.
        """
        told = copies.told("compares the weights of its losses", correction)
        if any(abs(other - correction) > 1e-12 * abs(correction) for other in told):
            raise ConfigError(
                "sync_batchnorm with losses that count differently in the copies of the pipeline: "
                "what a copy's loss counts is known after its backward, and the gradients of all "
                "have gone through the batch norms by then. Give batches of one size "
                "(drop_last=True) and no 'loss_weight', or use another norm"
            )

    def join(self, copies: Copies, statistics: DeferredStatistics) -> None:
        """Puts what deferred statistics noted on all copies together."""
        told = copies.told("joins its statistics", statistics.take([n for n, _ in self._norms]))
        for copy, noted in enumerate(told):
            statistics.put([replace(n, microbatch=n.microbatch * len(told) + copy) for n in noted])


@cache
def _make_forward() -> Callable[..., Tensor]:
    """Made when it is needed: `torch.compiler` takes seconds to import."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(norm: Any, values: Tensor) -> Tensor:
        group = vars(norm).get(_GROUP)
        if group is None or not (norm.training or norm.running_mean is None):
            # that of any batch norm; SyncBatchNorm's own looks for CUDA
            return nn.BatchNorm1d.forward(norm, values)
        norm._check_input_dim(values)
        given = (values, norm.weight, norm.bias, norm.eps, group)
        normal, count, mean, squares = _Normalise.apply(*given)  # type: ignore[no-untyped-call]
        if norm.training and norm.track_running_stats and norm.running_mean is not None:
            _update(norm, count, mean, squares)
        return cast(Tensor, normal)

    return cast(Callable[..., Tensor], forward)


@torch.no_grad()
def _update(norm: Any, count: Tensor, mean: Tensor, squares: Tensor) -> None:
    """Running statistics, with the unbiased variance."""
    norm.num_batches_tracked.add_(1)
    factor = norm.momentum
    if factor is None:
        factor = 1.0 / float(norm.num_batches_tracked)
    variance = squares / (count - 1).clamp(min=1)
    for buffer, found in ((norm.running_mean, mean), (norm.running_var, variance)):
        buffer.mul_(1 - factor).add_(found.to(buffer), alpha=factor)


class _Normalise(torch.autograd.Function):
    """Normalises by mean and variance of what all processes of a group have."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        exact = values if values.dtype is torch.float64 else values.float()
        dims = [dim for dim in range(values.dim()) if dim != 1]
        variance, mean = torch.var_mean(exact, dim=dims, correction=0)
        own = mean.new_tensor([exact.numel() // exact.shape[1]])
        packed = torch.cat([own, mean, variance])
        parts = [torch.empty_like(packed) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, packed, group=group)
        counts, means, variances = torch.stack(parts).split([1, len(mean), len(mean)], dim=1)
        count = counts.sum()  # Chan et al., as in `statistics`
        mean = (counts * means).sum(0) / count
        squares = (counts * (variances + (means - mean) ** 2)).sum(0)
        scale = torch.rsqrt(squares / count + eps)
        shape = [1, -1, *[1] * (values.dim() - 2)]
        hat = (exact - mean.view(shape)) * scale.view(shape)
        normal = hat if weight is None else hat * weight.to(hat.dtype).view(shape)
        normal = normal if bias is None else normal + bias.to(hat.dtype).view(shape)
        ctx.save_for_backward(values, weight, mean, scale, count)
        ctx.group, ctx.shape, ctx.dims = group, shape, dims
        ctx.bias_type = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(count, mean, squares)
        return normal.to(values.dtype), count, mean, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:
        values, weight, mean, scale, count = ctx.saved_tensors
        shape, dims = ctx.shape, ctx.dims
        grad = grad.to(mean.dtype)
        hat = (values.to(mean.dtype) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([grad.sum(dims), (grad * hat).sum(dims)])
        of_bias, of_weight = sums.clone()
        dist.all_reduce(sums, group=ctx.group)
        if weight is not None:
            sums = sums * weight.to(sums.dtype)
            grad = grad * weight.to(sums.dtype).view(shape)
        of_values = (grad - (sums[0].view(shape) + hat * sums[1].view(shape)) / count) * scale.view(
            shape
        )
        return (
            of_values.to(values.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(ctx.bias_type) if ctx.bias_type else None,
            None,
            None,
        )
