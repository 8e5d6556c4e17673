"""DeepSpeed's `PipelineModule` on the same layers, batches and optimizer.

`partition_method` gives it the cut that the others have by hand, or its own ("parameters"). Its
`gradient_clipping` is 0.0: the default of 1.0 would train something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.peers.gpt import Size, batch_of, layers_of, loss_of, optimizer_of
from benchmarks.peers.measure import Steps
from torch import Tensor


def _microbatches(size: Size, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    for number in range(count):
        tokens, targets = batch_of(size, number)
        yield from zip(
            tokens.chunk(size.microbatches), targets.chunk(size.microbatches), strict=True
        )


def deepspeed_pipeline(size: Size, steps: Steps, count: int, rank: int, cut: list[int]) -> None:
    """Its 1F1B ("TrainSchedule") over two processes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.pipe import PipelineModule

    class Cut(PipelineModule):  # type: ignore[misc]
        """Stages of the layers that are given, where they are."""

        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers(method=method)
            if cut:
                self.parts = [sum(cut[:stage]) for stage in range(len(cut) + 1)]
                stage = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    deepspeed.init_distributed(dist_backend="gloo")
    model = Cut(
        layers=layers_of(size), num_stages=2, loss_fn=loss_of, partition_method="parameters"
    )
    config: dict[str, Any] = {
        "train_batch_size": size.batch,
        "train_micro_batch_size_per_gpu": size.batch // size.microbatches,
        "gradient_accumulation_steps": size.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    batches = _microbatches(size, count)
    for _ in range(count):
        steps.done(float(engine.train_batch(batches)))
    torch.distributed.barrier()
