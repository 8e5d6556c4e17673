"""What units cost on a device, with the backward that training runs and what the engine adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pipe.planning.costs import CostTable
from lightning_pipe.runtime.backward import backward_full, backward_input
from lightning_pipe.runtime.overhead import action_overhead_s
from lightning_pipe.split.measure import measure_units

__all__ = ["measured_costs"]


def measured_costs(
    root: nn.Module,
    step: Callable[[Any], Any],
    batch: Any,
    *,
    num_stages: int,
    device: torch.device,
    rows: int,
) -> CostTable:
    """Times the units of a step; see ``measure_units`` for the arguments."""
    table = measure_units(
        root,
        step,
        batch,
        num_stages=num_stages,
        device=device,
        rows=rows,
        backward=backward_full,
        halves=backward_input,
    )
    return replace(table, overhead_s=action_overhead_s(device))
