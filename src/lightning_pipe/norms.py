"""Norms of gradients that an optimizer takes within its own `step`, over all stages.

Hooks see all gradients. An optimizer sees those of its rank, and treats them one by one; only a
norm over all of them (`clip_grad_norm_`) needs the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.errors import CutError
from lightning_pipe.gradients import norm_of_parts, promoted
from lightning_pipe.runtime import share
from lightning_pipe.runtime._torch import total_norm_replaced
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks


@contextmanager
def over_all_stages(
    ranks: Ranks, optimizer: Optimizer, counted: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Lets `clip_grad_norm_` and `get_total_norm` count the gradients of all ranks.

    Args:
        ranks: This rank.
        optimizer: It holds all parameters.
        counted: Whether this rank counts a parameter: one of all ranks that hold a copy does.
    """

    def total_norm(
        own: Any,
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = {id(p.grad): p for p in parameters if p.grad is not None}
        if {id(tensor) for tensor in given} != gradients.keys():
            if len(given) > 1 and any(id(tensor) in gradients for tensor in given):
                raise CutError(
                    f"{type(optimizer).__name__}.step takes the norm of {len(given)} of its "
                    f"{len(gradients)} gradients on this rank, and which of other ranks belong to "
                    "them is not known there. Clip in `on_before_optimizer_step`, which sees the "
                    "gradients of all stages"
                )
            alone: Tensor = own(given, norm_type, error_if_nonfinite, foreach)
            return alone
        mine = [tensor for tensor in given if counted(gradients[id(tensor)])]
        part = float(norm_of_parts(mine, norm_type, ranks.sharers, own)) if mine else 0.0
        with at(ranks, "takes the norm of all gradients in the optimizer"):
            told = share.gather_objects(ranks, (part, {tensor.dtype for tensor in given})) or []
        norms = torch.tensor([norm for norm, _ in told], dtype=torch.float64)
        total: Tensor = own(norms, norm_type, error_if_nonfinite)
        dtype = promoted(kind for _, kinds in told for kind in kinds)
        return total.to(given[0].device if given else "cpu", dtype)

    with total_norm_replaced(total_norm):
        yield
