"""One contender, in the processes that `python -m benchmarks.peers` starts for it.

python -m benchmarks.peers.contender NAME RANK WORLD STORE FOLDER SIZE STEPS START CUT
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from benchmarks.peers.gpt import SIZES, LitGPT, Size, batch_of, layers_of, loss_of, optimizer_of
from benchmarks.peers.measure import Steps
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.utils.data import DataLoader, Dataset

WARMUP = 3


def one_process(size: Size, steps: Steps, count: int, rank: int, cut: list[int]) -> None:
    """A plain loop."""
    model = nn.Sequential(*layers_of(size))
    optimizer = optimizer_of(model)
    for number in range(count):
        tokens, targets = batch_of(size, number)
        optimizer.zero_grad()
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        steps.done(loss.item())


def torch_pipeline(
    size: Size, steps: Steps, count: int, rank: int, cut: list[int], schedule: str
) -> None:
    """torch.distributed.pipelining by hand: stages of whole layers, shapes given."""
    kind: Any = getattr(torch_schedules, schedule)
    layers = layers_of(size)
    starts = [0]
    for layers_of_stage in cut:
        starts.append(starts[-1] + layers_of_stage)
    assert starts[-1] == len(layers), f"the cut {cut} is not of {len(layers)} layers"
    world = dist.get_world_size()
    v_shaped = "ZBV" in schedule
    own = [
        stage
        for stage in range(len(cut))
        if (rank == (min(stage, len(cut) - 1 - stage) if v_shaped else stage % world))
    ]
    modules = {s: nn.Sequential(*layers[starts[s] : starts[s + 1]]) for s in own}
    del layers
    rows = size.batch // size.microbatches
    tokens = torch.zeros(rows, size.sequence, dtype=torch.long)
    hidden = torch.zeros(rows, size.sequence, size.width, requires_grad=True)
    logits = torch.zeros(rows, size.sequence, size.vocabulary, requires_grad=True)
    last = len(cut) - 1
    stages = [
        PipelineStage(
            module,
            stage,
            len(cut),
            torch.device("cpu"),
            input_args=(hidden if stage else tokens,),
            output_args=(hidden if stage < last else logits,),
        )
        for stage, module in modules.items()
    ]
    given: Any = stages[0] if len(cut) == world else stages
    runs = kind(given, size.microbatches, loss_fn=loss_of)
    optimizer = optimizer_of(nn.ModuleList(modules.values()))
    for number in range(count):
        batch, targets = batch_of(size, number)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        first = (batch,) if 0 in own else ()
        rest = {"target": targets, "losses": losses} if last in own else {}
        runs.step(*first, **rest)
        optimizer.step()
        steps.done(torch.stack(losses).mean().item() if losses else None)


class _Batches(Dataset[tuple[Tensor, Tensor]]):
    """Rows of the batches of all steps, in their order."""

    def __init__(self, size: Size, count: int, part: slice) -> None:
        self._rows = [
            (tokens, targets)
            for number in range(count)
            for tokens, targets in zip(*(t[part] for t in batch_of(size, number)), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._rows[index]


class _Counts(pl.Callback):
    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        loss = trainer.callback_metrics["train_loss"].item() if trainer.is_global_zero else None
        self._steps.done(loss)


def _fit(size: Size, steps: Steps, count: int, part: slice, **arguments: Any) -> None:
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[_Counts(steps)],
        **arguments,
    )
    data = _Batches(size, count, part)
    rows = len(range(size.batch)[part])
    trainer.fit(LitGPT(size), DataLoader(data, batch_size=rows))


def lightning_ddp(size: Size, steps: Steps, count: int, rank: int, cut: list[int]) -> None:
    """Lightning's DDP: each process half of the rows."""
    world = dist.get_world_size()
    _fit(size, steps, count, slice(rank, None, world), strategy="ddp", devices=world)


def ours(
    size: Size, steps: Steps, count: int, rank: int, cut: list[int], schedule: str, virtual: Any
) -> None:
    """PipelineStrategy: Trainer, logging and all; cut by whole layers where a cut is given, and
    otherwise by FLOPs, or by the costs in the file that `PEERS_COSTS` names."""
    from lightning_pipe import PipelineStrategy

    strategy = PipelineStrategy(
        schedule=schedule,
        virtual_stages=virtual,
        num_microbatches=size.microbatches,
        balance=cut or "auto",
        costs=os.environ.get("PEERS_COSTS"),
    )
    _fit(size, steps, count, slice(None), strategy=strategy, devices=dist.get_world_size())


def _torch(schedule: str) -> Callable[..., None]:
    return lambda *args: torch_pipeline(*args, schedule)


def _ours(schedule: str, virtual: Any = 1) -> Callable[..., None]:
    return lambda *args: ours(*args, schedule, virtual)


def _deepspeed(*args: Any) -> None:
    from benchmarks.peers.deepspeed import deepspeed_pipeline

    deepspeed_pipeline(*args)


def _colossal(*args: Any) -> None:
    from benchmarks.peers.colossal import colossal_pipeline

    colossal_pipeline(*args)


CONTENDERS: dict[str, tuple[int, Callable[..., None]]] = {
    "one process": (1, one_process),
    "lightning ddp": (2, lightning_ddp),
    "torch gpipe": (2, _torch("ScheduleGPipe")),
    "torch 1f1b": (2, _torch("Schedule1F1B")),
    "torch interleaved": (2, _torch("ScheduleInterleaved1F1B")),
    "torch zbv": (2, _torch("ScheduleZBVZeroBubble")),
    "deepspeed 1f1b": (2, _deepspeed),
    "deepspeed 1f1b, its own cut": (2, _deepspeed),
    "colossalai 1f1b": (2, _colossal),
    "ours gpipe": (2, _ours("gpipe")),
    "ours 1f1b": (2, _ours("1f1b")),
    "ours interleaved": (2, _ours("interleaved_1f1b", 2)),
    "ours zbv": (2, _ours("zbv", 2)),
    "ours 1f1b by layers": (2, _ours("1f1b")),
    "ours auto": (2, _ours("auto", "auto")),
    "ours 1f1b, measured": (2, _ours("1f1b")),
    "ours zbv, measured": (2, _ours("zbv", 2)),
    "ours auto, measured": (2, _ours("auto", "auto")),
}
"""Processes, and what they run."""


def main() -> None:
    """Runs one process of one contender."""
    name, rank, world, store, folder, size, count, start_s, cut = sys.argv[1:]
    torch.set_num_threads(1)
    if int(world) > 1:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "peers"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        file = dist.FileStore(store, int(world))
        dist.init_process_group("gloo", store=file, rank=int(rank), world_size=int(world))
    steps = Steps(folder, int(rank), WARMUP, float(start_s))
    layers = [int(part) for part in cut.split(",") if part]
    CONTENDERS[name][1](SIZES[size], steps, WARMUP + int(count), int(rank), layers)
    steps.write()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
