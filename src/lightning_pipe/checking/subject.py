"""What is checked: the model and the first batch of a config, and one training step of it in any
way.

Each step begins with the model built anew, with the same seeds, so that none sees what another has
changed. Nothing is written: no logger, no checkpoint, and a folder of its own that is thrown away.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe import _lightning as seam
from lightning_pipe.checking.numbers import Numbers
from lightning_pipe.checking.piecewise import Piecewise, Twice
from lightning_pipe.config_file import (
    ReadsConfig,
    count_devices,
    quietly,
    read_config,
    strategy_arguments,
)
from lightning_pipe.manners import refuse_training
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.batchnorm import batch_norms, least_rows
from lightning_pipe.split.joining import join_batches
from lightning_pipe.split.nest import copy_tensors, describe
from lightning_pipe.split.rows import count_rows, split_batch
from lightning_pipe.split.streams import DROPOUTS
from lightning_pipe.strategy import PipelineStrategy

SEED = 20
_ROWS = 2  # of a micro-batch


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be checked.

    Attributes:
        arguments: Those of `lightning-pipe fit`.
        accelerator: "cpu", or what to run on instead.
        rows: Rows of the batch that are used; None for as many as the micro-batches need.
    """

    arguments: tuple[str, ...]
    accelerator: str = "cpu"
    rows: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the config says, and its first batch.

    Attributes:
        batch: Some rows of it, as the hooks of the model made it.
        rows: How many.
        of_rows: How many it has.
        num_ranks: P.
        copies: D.
        virtual_stages: V.
        num_microbatches: M, or fewer where the batch has not as many rows.
        given: The other arguments of the strategy.
        precision: What the check runs in, and what the config says.
        norms: Batch norms that train.
        shown: The batch, as a text.
        sharers: Processes that are to share each stage; the check has one for it.
    """

    batch: Any
    rows: int
    of_rows: int
    num_ranks: int
    copies: int
    virtual_stages: int
    num_microbatches: int
    given: Mapping[str, Any]
    precision: tuple[str, str]
    norms: tuple[str, ...]
    shown: str
    sharers: int = 1


@dataclass(frozen=True, slots=True)
class Lay:
    """How a step is laid over ranks.

    Attributes:
        num_ranks: P.
        num_microbatches: M.
        copies: D; each takes its part of the batch.
        arguments: Further arguments of the strategy.
    """

    num_ranks: int
    num_microbatches: int
    copies: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """Ranks of all copies."""
        return self.num_ranks * self.copies


class Capture(Callback):
    """Takes down what a step leaves on this rank."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.loss = float("nan")
        self.weight: Any = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Before anything is clipped."""
        for name, parameter in pl_module.named_parameters():
            if not is_fake(parameter) and parameter.grad is not None:
                gradient = parameter.grad.detach()
                dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
                self.gradients[name] = dense.cpu().clone()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """What the step returned."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        self.weight = outputs.get("loss_weight") if isinstance(outputs, Mapping) else None
        self.loss = float(loss.detach())


def read(asked: Asked) -> Facts:
    """Reads the config and its first batch."""
    cli = _build(asked)
    trainer, module = cli.trainer, cli.model
    refuse_training(module)
    with quietly():
        seam.prepare_fit(trainer, module, cli.datamodule)
        batch = seam.one_training_batch(trainer)
        batch = seam.ready_batch(trainer, batch, torch.device("cpu"))
    given = dict(strategy_arguments(cli.asked["strategy"]))
    sharers = int(given.pop("tensor_parallel_size", 1))
    devices = count_devices(cli.asked["devices"]) * int(cli.asked["num_nodes"]) // sharers
    wanted_ranks, copies = (
        given.pop("pipeline_parallel_size", None),
        given.pop("data_parallel_size", 1),
    )
    num_ranks = wanted_ranks or max(1, devices // (copies or 1))
    copies = copies or max(1, devices // num_ranks)
    rules = given.get("split_batch") or {}
    rows = count_rows(batch, rules)
    drawn = given.pop("microbatch_size", None)
    wanted = given.pop("num_microbatches", None) or 4 * num_ranks
    if drawn and wanted * drawn > rows:
        times = -(-wanted * drawn // rows)
        batch, rows = join_batches([batch] * times, rules), rows * times
    norms = batch_norms(module)
    pieces = min(wanted, max(1, rows // least_rows(norms)))
    shown = describe(batch)
    batch, kept = _shortened(batch, rows, asked.rows or pieces * _ROWS, rules)
    precision = str(cli.asked["precision"])
    return Facts(
        batch=copy_tensors(batch),
        rows=kept,
        of_rows=rows,
        num_ranks=num_ranks,
        copies=copies,
        virtual_stages=given.pop("virtual_stages", 1),
        num_microbatches=max(1, min(pieces, kept // least_rows(norms))),
        given=given,
        precision=("64-true" if precision in ("64", "64-true") else "32-true", precision),
        norms=tuple(name for name, norm in norms if norm.training),
        shown=shown,
        sharers=sharers,
    )


def _shortened(batch: Any, rows: int, wanted: int, rules: Any) -> tuple[Any, int]:
    if wanted >= rows:
        return batch, rows
    pieces = split_batch(batch, max(1, rows // wanted), rules)
    return pieces.batches[0], pieces.rows[0]


def one_device(
    asked: Asked,
    batch: Any,
    precision: str,
    *,
    rank: int | None = None,
    piecewise: Piecewise | Twice | None = None,
) -> Numbers:
    """One step without the strategy.

    Args:
        asked: What is checked.
        batch: The batch.
        precision: As the Trainer takes it.
        rank: What code that asks for its rank is told; None where there is one process.
        piecewise: Takes the micro-batches one by one; the whole batch if None.
    """
    strategy: Strategy | str = "auto"
    if rank is not None:
        strategy = SingleDeviceStrategy(torch.device("cpu"))
        strategy.global_rank = rank
    return _step(asked, [batch], precision, strategy, 1, piecewise)[0]


def over_stages(asked: Asked, facts: Facts, lay: Lay, precision: str) -> Numbers:
    """One step with the strategy, in each of its processes; the gradients of this one."""
    strategy = PipelineStrategy(**_arguments(facts, lay))
    parts = split_batch(facts.batch, lay.copies, facts.given.get("split_batch") or {}).batches
    numbers, module = _step(asked, parts, precision, strategy, lay.processes, None)
    numbers.drawing, glue = strategy.randomness
    numbers.draws = glue or any(_draws(module, name) for name in numbers.drawing if name)
    return numbers


#: what a plan decides
_PLANNED = ("virtual_stages", "schedule", "balance", "split_points", "activation_checkpointing")


def _arguments(facts: Facts, lay: Lay) -> dict[str, Any]:
    """Those of the strategy: the user's, and what this step is to have instead."""
    found = {
        **facts.given,
        "virtual_stages": facts.virtual_stages,
        "pipeline_parallel_size": lay.num_ranks,
        "data_parallel_size": lay.copies,
        "num_microbatches": lay.num_microbatches,
        **lay.arguments,
    }
    if found.pop("chunks_are_free", False):
        found["virtual_stages"] = "auto"
    if found.get("plan") is not None:
        for name in ("num_microbatches", *_PLANNED):
            del found[name]
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _draws(module: LightningModule, name: str) -> bool:
    """Whether a module that may draw does: dropout at a rate of zero does not."""
    part = module.get_submodule(name)
    if isinstance(part, DROPOUTS):
        return part.p > 0
    return not isinstance(part, torch.nn.MultiheadAttention) or part.dropout > 0


def _build(asked: Asked) -> ReadsConfig:
    seed_everything(SEED, verbose=False)
    return read_config(asked.arguments, "check", ReadsConfig)


def _step(
    asked: Asked,
    batches: Sequence[Any],
    precision: str,
    strategy: Any,
    devices: int,
    piecewise: Piecewise | Twice | None,
) -> tuple[Numbers, LightningModule]:
    """One optimizer step of a Trainer that writes nothing."""
    cli = _build(asked)
    module, capture = cli.model, Capture()
    with tempfile.TemporaryDirectory() as folder, quietly():
        trainer = Trainer(
            accelerator=asked.accelerator,
            devices=devices,
            strategy=strategy,
            precision=precision,  # type: ignore[arg-type]
            max_steps=1,
            limit_train_batches=1,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            callbacks=[capture],
            logger=DummyLogger(),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        data: Any = [copy_tensors(batch) for batch in batches]
        loader: Any = DataLoader(data, batch_size=None, collate_fn=_same)
        if cli.datamodule is not None:
            cli.datamodule.train_dataloader = lambda: loader
            source: dict[str, Any] = {"datamodule": cli.datamodule}
        else:
            source = {"train_dataloaders": loader}
        _skip_batch_hooks(module)
        if piecewise is not None:
            piecewise.install(module)
        seed_everything(SEED, verbose=False)
        trainer.fit(module, **source)
    buffers = {n: b.detach().cpu().clone() for n, b in module.named_buffers() if not is_fake(b)}
    logged = {n: float(v) for n, v in trainer.callback_metrics.items() if v.numel() == 1}
    numbers = Numbers(capture.loss, capture.gradients, buffers, logged, weight=capture.weight)
    return numbers, module


def _same(batch: Any) -> Any:
    return batch


def _skip_batch_hooks(module: LightningModule) -> None:
    """The batch went through them when it was read; they may draw random numbers."""
    for name in ("on_before_batch_transfer", "on_after_batch_transfer"):
        setattr(module, name, _unchanged_batch)


def _unchanged_batch(batch: Any, dataloader_idx: int) -> Any:
    return batch
