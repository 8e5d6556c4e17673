"""ColossalAI's 1F1B on the same layers, batches and optimizer; its schedule alone, no booster."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.peers.gpt import Size, batch_of, layers_of, loss_of, optimizer_of
from benchmarks.peers.measure import Steps
from torch import Tensor, nn


class _Stage(nn.Module):
    """Layers of one stage; between stages its schedule wants dicts."""

    def __init__(self, layers: list[nn.Module], *, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.is_last = is_last

    def forward(
        self, tokens: Tensor, targets: Tensor, hidden: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        made: Tensor = self.layers(tokens if hidden is None else hidden)
        return made if self.is_last else {"hidden": made}


def colossal_pipeline(size: Size, steps: Steps, count: int, rank: int, cut: list[int]) -> None:
    """`OneForwardOneBackwardSchedule` over two processes."""
    from colossalai.cluster import ProcessGroupMesh
    from colossalai.interface import OptimizerWrapper
    from colossalai.pipeline.schedule.one_f_one_b import OneForwardOneBackwardSchedule
    from colossalai.pipeline.stage_manager import PipelineStageManager

    if not hasattr(torch.distributed, "is_hccl_available"):  # a name of another vendor's torch
        torch.distributed.is_hccl_available = lambda: False  # type: ignore[attr-defined]
    manager = PipelineStageManager(ProcessGroupMesh(2), pipeline_axis=0)
    runs = OneForwardOneBackwardSchedule(manager, num_microbatches=size.microbatches)
    begin = sum(cut[:rank])
    own = layers_of(size)[begin : begin + cut[rank]]
    stage = _Stage(own, is_last=manager.is_last_stage())
    optimizer = OptimizerWrapper(optimizer_of(stage))

    def criterion(logits: Tensor, batch: dict[str, Any]) -> Tensor:
        return loss_of(logits, batch["targets"])

    for number in range(count):
        tokens, targets = batch_of(size, number)
        batches = iter([{"tokens": tokens, "targets": targets}])
        optimizer.zero_grad()
        made = runs.forward_backward_step(stage, batches, criterion, optimizer, return_loss=True)
        optimizer.step()
        steps.done(None if made["loss"] is None else made["loss"].item())
    torch.distributed.barrier()
