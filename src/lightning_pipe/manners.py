"""Small services of the strategy: what it refuses, how it shows its plan, how it writes files."""

from __future__ import annotations

import errno
import glob
import os
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelPruning
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from lightning_pipe import _lightning as seam
from lightning_pipe.errors import CheckpointError, ConfigError
from lightning_pipe.planning.plan import Plan
from lightning_pipe.split._fake import is_fake


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place and moves it there when it is complete."""

    def load_mapped(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        """Loads a checkpoint of which each tensor is read when it is used."""
        if "://" in str(path) or not zipfile.is_zipfile(path):
            return super().load_checkpoint(path, weights_only=weights_only)
        loaded: dict[str, Any] = torch.load(
            path, map_location="cpu", weights_only=weights_only, mmap=True
        )
        return loaded

    def load_checkpoint(
        self, path: Any, map_location: Any = lambda storage, loc: storage, weights_only: Any = None
    ) -> dict[str, Any]:
        """Loads a checkpoint.

        Raises:
            CheckpointError: The file is damaged.
        """
        loaded: dict[str, Any]
        try:
            loaded = super().load_checkpoint(path, map_location, weights_only)
        except (RuntimeError, EOFError, OSError, zipfile.BadZipFile) as error:
            is_missing = isinstance(error, OSError) and error.errno != errno.EINVAL
            if is_missing or "://" in str(path) or zipfile.is_zipfile(path):
                raise
            num_bytes = Path(path).stat().st_size
            raise CheckpointError(
                f"{path} is damaged: it has {num_bytes} bytes and no end, as a file of which a "
                f"part is missing ({error}). Take another checkpoint; an older one, or a copy"
            ) from error
        return loaded

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Saves a checkpoint; a crash leaves the old file or the new one, never a part."""
        if "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        for left in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
            left.unlink(missing_ok=True)  # of a process that was killed while it wrote
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            super().save_checkpoint(checkpoint, part, storage_options)
            to_disk(part)
            os.replace(part, target)
        except OSError as error:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"{target} cannot be written; what was there before is as it was")
            raise
        finally:
            part.unlink(missing_ok=True)


def to_disk(path: Path) -> None:
    """Makes sure that the contents are on the disk before the name is: after a loss of power there
    is else a name without contents."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def refuse_training(module: LightningModule) -> None:
    """Refuses modules whose training a schedule cannot run.

    Raises:
        ConfigError: With the reason and the alternative.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} sets automatic_optimization=False: a pipeline runs "
            "forward and "
            "backward of a step by its schedule, so the step cannot call "
            "manual_backward itself. Use "
            "automatic optimization, or train on one device"
        )
    if seam.takes_dataloader_iter(module, "training_step"):
        raise ConfigError(
            f"{type(module).__name__}.training_step(dataloader_iter) reads its batches "
            "itself, but all "
            "stages must be given the same one. Use training_step(batch, batch_idx)"
        )


def refuse_tuners(callbacks: Iterable[Callback]) -> None:
    """Refuses callbacks that train for a while, take it back and begin anew.

    Raises:
        ConfigError: With the reason and the alternative.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ConfigError(
                "ModelPruning replaces weights by others while it trains, which have no stage. "
                "Prune before (torch.nn.utils.prune in __init__ or setup), or on one device"
            )
        if isinstance(callback, (BatchSizeFinder, LearningRateFinder)):
            raise ConfigError(
                f"{type(callback).__name__} trains for some steps and takes them back, which needs "
                "the whole model and its optimizer in one process. Run it before, on one device "
                "(`Tuner(Trainer(devices=1)).lr_find(model)` or `.scale_batch_size(model)`), and "
                "train with what it found"
            )


#: what one device runs with and a pipeline cannot, and why
_PRECISIONS: dict[type[Precision], str] = {
    TransformerEnginePrecision: (
        "at the end of its fp8_autocast, Transformer Engine reduces the scales of all layers that "
        "ran over all processes, but each stage has other layers and ends it once for each "
        "micro-batch"
    ),
    BitsandbytesPrecision: (
        "bitsandbytes quantizes a weight when its module is moved to the GPU, but a stage moves "
        "the tensors of its own layers only"
    ),
    DeepSpeedPrecision: "it calls the engine of Lightning's DeepSpeedStrategy",
    XLAPrecision: "it is that of Lightning's XLAStrategy",
}


def refuse_precision(plugin: Any) -> None:
    """Refuses precision plug-ins that cannot work over stages or micro-batches.

    Raises:
        ConfigError: With the reason and the alternative.
    """
    for kind, reason in _PRECISIONS.items():
        if isinstance(plugin, kind):
            raise ConfigError(
                f"{type(plugin).__name__} in a pipeline: {reason}. Use precision='bf16-mixed' or "
                "'bf16-true' (or 16-mixed, 16-true, 32-true, 64-true), or one device"
            )


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that need all parameters in one process.

    Raises:
        ConfigError: With the reason and the alternative.
    """
    if len(optimizers) > 1:
        raise ConfigError(
            f"configure_optimizers returns {len(optimizers)} optimizers: a pipeline step has one "
            "backward. Put all parameters into the groups of one optimizer, or train on one device"
        )
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise ConfigError(
                "LBFGS needs products over all parameters, which are on different "
                "ranks, within its "
                "step. Use an optimizer that treats parameters one by one, such as "
                "AdamW, or train on "
                "one device"
            )


def move_own(module: nn.Module, device: torch.device) -> None:
    """Moves what has data: the parameters of this rank, buffers and metrics."""
    for parameter in module.parameters():
        if not is_fake(parameter):
            parameter.data = parameter.data.to(device)
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
            continue
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.device != device:
                child._buffers[name] = buffer.to(device)
    seam.set_device(module, device)


def show_plan(plan: Plan, shown: Plan | None) -> Plan:
    """Shows a plan as a table, on the console of this process, or that it is the last again.

    Returns:
        The plan whose table was shown last.
    """
    if shown is not None and _stages_of(shown) == _stages_of(plan):
        rank_zero_info("Pipeline: the stages are those shown before")
        return shown
    rank_zero_info(f"Pipeline {plan.describe()}")
    return plan


def _stages_of(plan: Plan) -> list[tuple[int, str, str, int]]:
    return [(s.rank, s.first_unit, s.last_unit, s.parameters) for s in plan.stages]
