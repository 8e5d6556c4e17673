"""SEAM: with `_loops`, the only file that touches Lightning's private names.

Whatever a new Lightning release renames is mended here. Nothing here knows of stages.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import (
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.optimizer import _optimizer_to_device, _optimizers_to_device
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero as lightning_rank_zero
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core import rank_zero
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_pipe.errors import BatchError
from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.parted import is_parted

#: What Lightning itself keeps in a LightningModule.
MODULE_SPACE = frozenset(vars(LightningModule())) | {"_metric_attributes"}

#: The barrier between the hooks and checkpoints of the start and the run itself.
RUN_STAGE = "run-stage"

optimizer_to_device = _optimizer_to_device
optimizers_to_device = _optimizers_to_device


def make_launcher(
    strategy: Strategy, start_method: str, environment: Any, num_processes: int, num_nodes: int
) -> Any:
    """Makes what starts the other processes: the script again, or children of this process."""
    if start_method == "popen":
        return _SubprocessScriptLauncher(environment, num_processes, num_nodes)
    return _MultiProcessingLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]


def connect_processes(
    environment: Any, backend: str | None, device: torch.device, timeout: Any
) -> str:
    """Makes the default process group if there is none yet; returns its backend."""
    backend = backend or _get_default_process_group_backend_for_device(device)
    if not _distributed_is_initialized():
        device_id = None if device.type == "cpu" else device
        _init_dist_connection(environment, backend, timeout=timeout, device_id=device_id)
        atexit.register(_disconnect)
    return backend


def _disconnect() -> None:
    if _distributed_is_initialized():
        torch.distributed.destroy_process_group()


def set_rank_zero(global_rank: int) -> None:
    """Tells `rank_zero_only` and its like which process this is."""
    for helpers in (rank_zero, lightning_rank_zero):
        helper: Any = vars(helpers)["rank_zero_only"]
        helper.rank = global_rank


def reads_outputs(trainer: Trainer, name: str) -> bool:
    """Whether anybody but Lightning itself gets to see what an evaluation step returned."""
    hook = f"on_{name.removesuffix('_step')}_batch_end"
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    callbacks = [c for c in callbacks if not isinstance(c, (ProgressBar, Checkpoint))]
    return is_overridden(hook, trainer.lightning_module) or any(
        getattr(type(callback), hook) is not getattr(Callback, hook) for callback in callbacks
    )


def set_mesh(module: LightningModule | None, mesh: Any) -> None:
    """Lets a module find the mesh of its processes as `self.device_mesh`."""
    if module is not None:
        module._device_mesh = mesh


def name_of_reduction(op: Any) -> str:
    """What Lightning calls a reduction, as a text: it also gives `ReduceOp`s, and None for a
    sum."""
    if op is None:
        return "sum"
    return (op if isinstance(op, str) else str(op).rpartition(".")[2]).lower()


def syncs_batch_norms(strategy: Any) -> bool:
    """Whether the Trainer was given `sync_batchnorm=True`."""
    return getattr(strategy, "_layer_sync", None) is not None


def takes_dataloader_iter(module: LightningModule, name: str) -> bool:
    """Whether a step wants to pull its batches itself."""
    return is_param_in_hook_signature(getattr(module, name), "dataloader_iter", explicit=True)


def loggers_of(module: torch.nn.Module) -> list[Any]:
    """The loggers of the Trainer that runs a module; none if there is no Trainer."""
    trainer = vars(module).get("_trainer")
    return [] if trainer is None else list(trainer.loggers)


def loggers_replaced(
    module: torch.nn.Module, wrap: Callable[[int, Any], Any]
) -> list[tuple[Any, str, Any]]:
    """What to set so that a step finds other loggers: owner, attribute, and value.

    Args:
        module: The LightningModule.
        wrap: Makes what stands for a logger from its number and itself.
    """
    loggers = [wrap(index, logger) for index, logger in enumerate(loggers_of(module))]
    return [(vars(module)["_trainer"], "_loggers", loggers)] if loggers else []


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Makes `module.device` say where the module is about to be."""
    for child in module.modules():
        if hasattr(child, "_device") and isinstance(child, LightningModule):
            child._device = device


def evaluates_first(trainer: Trainer) -> bool:
    """Whether `fit` begins with a sanity check."""
    return (
        trainer.state.fn == TrainerFn.FITTING
        and trainer.num_sanity_val_steps > 0
        and trainer.enable_validation
        and not trainer.fit_loop.epoch_loop.val_loop.restarting
    )


def first_training_batch(trainer: Trainer) -> tuple[bool, Any]:
    """Sets up the data of `fit` and looks at the first batch, which stays the first to be read.

    Returns:
        Whether there is one, and the batch as the loaders give it.
    """
    loop = trainer.fit_loop
    loop.setup_data()
    fetcher, loader = loop._data_fetcher, loop._combined_loader
    if fetcher is None or loader is None or loop.max_batches == 0:
        return False, None
    if isinstance(fetcher, _DataLoaderIterDataFetcher):
        return False, None
    if isinstance(fetcher, _PrefetchDataFetcher) and fetcher.batches:
        return True, fetcher.batches[0][0]
    if fetcher.done or loader._iterator is None:
        return False, None
    iterators: list[Any] = loader._iterator.iterators  # of `SharedLoader`s, or plain on one rank
    if any(not hasattr(iterator, "peek") for iterator in iterators):
        return False, None
    found = [iterator.peek() for iterator in iterators]
    if any(not there for there, _ in found):
        return False, None
    return True, pytree.tree_unflatten([batch for _, batch in found], loader._spec)


def is_running(strategy: Strategy) -> bool:
    """Whether a Trainer runs, and not a script around it."""
    module = strategy._lightning_module
    trainer = None if module is None else module._trainer
    return trainer is not None and trainer.state.status == TrainerStatus.RUNNING


def sets_up_training_data(trainer: Trainer) -> bool:
    """Whether a loader that is set up now is that of training."""
    return trainer.state.fn == TrainerFn.FITTING and trainer.state.stage == RunningStage.TRAINING


def reload_training_data(trainer: Trainer) -> None:
    """Lets the next epoch set up its loaders again."""
    trainer.fit_loop._combined_loader = None


def prepare_fit(trainer: Trainer, model: LightningModule, datamodule: Any) -> None:
    """Takes a Trainer as far as `fit` goes before the strategy is set up: data and model are there,
    nothing has moved and nothing runs."""
    trainer.strategy._lightning_module = model
    trainer.strategy.connect(model)
    model.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    trainer.state.stage = RunningStage.TRAINING
    trainer._data_connector.attach_data(model, datamodule=datamodule)
    trainer._data_connector.prepare_data()
    call._call_setup_hook(trainer)
    call._call_configure_model(trainer)


def one_training_batch(trainer: Trainer) -> Any:
    """Reads the first batch of the loaders of `fit`, once."""
    loop = trainer.fit_loop
    loop.setup_data()
    loader = loop._combined_loader
    assert loader is not None
    try:
        return next(iter(loader))[0]
    except StopIteration:
        raise BatchError("the training loader gives no batch to plan with") from None


def own_optimizers(trainer: Trainer) -> list[Optimizer]:
    """The optimizers that the module configures; none where its hook needs more than a plan has."""
    optimizers, _ = _init_optimizers_and_lr_schedulers(trainer.lightning_module)
    return [plain_optimizer(optimizer) for optimizer in optimizers]


def seen_rows(loader: Any, *, reset: bool = False) -> list[Any] | None:
    """The row numbers of each batch that a loader of `predict` has read; None for other loaders.

    Args:
        loader: The loader.
        reset: Begin anew, as iterating it does.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return None
    if reset or not hasattr(sampler, "seen_batch_indices"):
        sampler.seen_batch_indices = []
    seen: list[Any] = sampler.seen_batch_indices
    return seen


def restore_loaders(trainer: Trainer) -> None:
    """Gives stateful loaders their states from the checkpoint; `fit`'s data is set up before it is
    read."""
    loop = trainer.fit_loop
    if not getattr(loop, "_combined_loader_states_to_load", None) or loop._combined_loader is None:
        return
    loop._load_combined_loader_states()
    assert loop._data_fetcher is not None
    iter(loop._data_fetcher)


def takes_batch_idx(module: LightningModule, name: str = "training_step") -> bool:
    """Whether a step has a parameter for the index of the batch."""
    return bool(is_param_in_hook_signature(getattr(module, name), "batch_idx", min_args=2))


def with_default_io(strategy: Strategy, default: Callable[[], CheckpointIO]) -> CheckpointIO:
    """The plug-in that writes checkpoints; `default` where the user has not chosen one."""
    if strategy._checkpoint_io is None:
        strategy._checkpoint_io = default()
    elif isinstance(strategy._checkpoint_io, _WrappingCheckpointIO):
        strategy._checkpoint_io.checkpoint_io = default()
    return strategy._checkpoint_io


def teardown(strategy: Strategy, parent: Callable[[], None]) -> None:
    """Tears a strategy down; parameters that are fakes, or parts that belong to a mesh of devices,
    cannot be moved to the host and stay."""
    module = strategy._lightning_module
    if module is not None and any(is_fake(p) or is_parted(p) for p in module.parameters()):
        strategy._lightning_module = None
    try:
        parent()
    finally:
        strategy._lightning_module = module


def data_of(trainer: Trainer) -> Any:
    """The LightningDataModule of a run, or None."""
    return getattr(trainer, "datamodule", None)


def ready_batch(trainer: Trainer, batch: Any, device: torch.device) -> Any:
    """Takes a loader's batch through the hooks that Lightning calls before a step."""
    module = trainer.lightning_module
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    return module._apply_batch_transfer_handler(batch, device=device, dataloader_idx=0)


def batch_index(trainer: Trainer) -> tuple[int, ...]:
    """Numbers that tell this batch from every other of the run, equal after a resume."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.training:
        return (0, loop.total_batch_idx)
    if trainer.state.fn == TrainerFn.FITTING:
        return (1, loop.total_batch_idx, loop.val_loop.batch_progress.total.ready)
    active = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return (2 + trainer.predicting, active.batch_progress.total.ready)


def step_context(precision: Precision, name: str) -> AbstractContextManager[Any]:
    """The precision's context of a step, by the name of its method."""
    short = {"training": "train", "validation": "val"}.get(name.removesuffix("_step"))
    found = getattr(precision, f"{short or name.removesuffix('_step')}_step_context")
    context: AbstractContextManager[Any] = found()
    return context


@contextmanager
def step_name(module: LightningModule, name: str) -> Iterator[None]:
    """Tells the module which hook runs, as the Trainer does around a step."""
    before = module._current_fx_name
    module._current_fx_name = name
    try:
        yield
    finally:
        module._current_fx_name = before


def plain_optimizer(optimizer: Any) -> Optimizer:
    """The user's optimizer, out of Lightning's wrapper."""
    found: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found


def replace_clip(
    precision: Precision, clip: Callable[[Optimizer, float], None]
) -> Callable[[], None]:
    """Lets `gradient_clip_val` use `clip` for the norm, and leave alone a rank that has no
    gradient to clip by value; returns what undoes it."""
    by_value = precision.clip_grad_by_value

    def clip_by_value(optimizer: Optimizer, clip_val: float) -> None:
        if any(parameter.grad is not None for parameter in precision.main_params(optimizer)):
            by_value(optimizer, clip_val)

    precision.clip_grad_by_norm = clip  # type: ignore[method-assign, assignment]
    precision.clip_grad_by_value = clip_by_value  # type: ignore[method-assign]

    def undo() -> None:
        precision.__dict__.pop("clip_grad_by_norm", None)
        precision.__dict__.pop("clip_grad_by_value", None)

    return undo
