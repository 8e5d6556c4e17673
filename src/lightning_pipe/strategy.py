"""`PipelineStrategy`: Lightning's life cycle, translated into the pipeline's. No algorithms.

Trainer.__init__      the launcher; arguments are checked
setup_environment     processes, groups
setup                 equal weights, optimizers, one batch to trace, the cut
*_step                one step over all stages
teardown              the module is whole again
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import _lightning as seam
from lightning_pipe import states
from lightning_pipe.data import SharedLoader
from lightning_pipe.errors import CheckpointError, ConfigError, PeerError, PipelineError
from lightning_pipe.gradients import clip_by_norm_over_stages
from lightning_pipe.layout import Layout
from lightning_pipe.manners import (
    AtomicCheckpointIO,
    move_own,
    refuse_optimizers,
    refuse_training,
    show_plan,
)
from lightning_pipe.planning.plan import Plan
from lightning_pipe.planning.simulate import ideal_bubble_fraction
from lightning_pipe.planning.timeline import Timeline
from lightning_pipe.runtime import share
from lightning_pipe.runtime.ranks import Ranks, make_ranks
from lightning_pipe.runtime.watchdog import guard
from lightning_pipe.split.microbatch import copy_tensors
from lightning_pipe.split.rng import preserved
from lightning_pipe.split.tree import tensors
from lightning_pipe.steps import Home, Pipeline

Size = Literal["auto"] | int

_CONTEXTS = {
    "training_step": "train_step_context",
    "validation_step": "val_step_context",
    "test_step": "test_step_context",
    "predict_step": "predict_step_context",
}
_RESTORE = ("auto", "all", "rank_zero", "none")
_START_METHODS = ("popen", "spawn", "fork", "forkserver")


@dataclass(frozen=True, slots=True)
class Bubble:
    """How much of a step this rank was idle.

    Attributes:
        measured_fraction: Idle over total time of the last step on this rank, 0 to 1.
        ideal_fraction: What the schedule has with equal stages and free transfers.
    """

    measured_fraction: float
    ideal_fraction: float


class _Doing:
    """What this rank is doing, for the watchdog; the engine that knows comes later than it."""

    def __init__(self, strategy: PipelineStrategy) -> None:
        self._strategy = strategy
        self._start_s = time.monotonic()

    @property
    def text(self) -> str:
        pipeline = self._strategy._pipeline
        return "sets up" if pipeline is None else pipeline.engine.progress.text

    @property
    def since_s(self) -> float:
        pipeline = self._strategy._pipeline
        return self._start_s if pipeline is None else pipeline.engine.progress.since_s


class PipelineStrategy(ParallelStrategy):
    """Trains one model over several devices, each of which holds some of its layers.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where the processes are; found by the Trainer.
        checkpoint_io: How checkpoint files are written and read.
        precision_plugin: Set by the Trainer from its ``precision``.
        pipeline_parallel_size: Number of ranks that share a model. "auto" takes all devices.
        num_microbatches: Pieces that a batch is split into. "auto" takes 4 per rank, or as many as
            the batch has rows.
        schedule: "auto", "gpipe", "1f1b", "interleaved_1f1b", "naive", ... or the path of a CSV
            file.
        virtual_stages: Chunks of the model on each rank.
        balance: What makes stages equal: "auto", "flops", "parameters", "uniform", or the number of
            units of each stage.
        split_points: Names of modules after which to cut, instead of a balance.
        restore_model: Which ranks hold the whole model again afterwards: "all", "rank_zero",
            "none", or "auto": all if the host has the memory.
        process_group_backend: Backend of ``torch.distributed``; that of the device if None.
        timeout: How long a rank may wait for another.
        start_method: How processes are started: "popen" runs the script again, "spawn" and "fork"
            as in ``multiprocessing``.

    Raises:
        ConfigError: An argument is not legal, or not with this number of devices.
        ScheduleError: The schedule is unknown or cannot run so.

    Example::

        trainer = Trainer(strategy=PipelineStrategy(num_microbatches=8), devices=4)
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        pipeline_parallel_size: Size = "auto",
        num_microbatches: Size = "auto",
        schedule: str = "auto",
        virtual_stages: int = 1,
        balance: str | list[int] = "auto",
        split_points: list[str] | None = None,
        restore_model: str = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        start_method: str = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        _check_choice("restore_model", restore_model, _RESTORE)
        _check_choice("start_method", start_method, _START_METHODS)
        self._num_nodes = 1
        self._pipeline_parallel_size = pipeline_parallel_size
        self._num_microbatches = num_microbatches
        self._arguments: dict[str, Any] = {
            "virtual_stages": virtual_stages,
            "num_microbatches": None if num_microbatches == "auto" else num_microbatches,
            "schedule": os.fspath(schedule),
            "balance": balance if isinstance(balance, str) else tuple(balance),
            "split_points": None if split_points is None else tuple(split_points),
        }
        self._restore_model = restore_model
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._start_method = start_method
        self._layout: Layout | None = None
        self._ranks: Ranks | None = None
        self._pipeline: Pipeline | None = None
        self._last: Pipeline | None = None
        self._buffers: states.BufferWatch | None = None
        self._parameter_names: dict[int, str] = {}
        self._optimizer_home: Home | None = None
        self._plan: Plan | None = None
        self._undo_clip: Any = None
        self._guard = ExitStack()
        self._restored_mode = "all"
        self._failed = False
        self._postponed = False
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Checks what can be checked before the number of devices is known."""
        size = self._pipeline_parallel_size
        if size != "auto":
            Layout(size, **self._arguments)

    # ------------------------------------------------------------------ processes

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """Machines of the job."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """Whether there are copies of the pipeline that should see other data: there are none."""
        return False

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": 1, "rank": 0}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    @override
    def _configure_launcher(self) -> None:
        self._layout = self._make_layout()
        if self._layout.num_ranks > 1:
            self._launcher = seam.make_launcher(
                self,
                self._start_method,
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
            )

    def _make_layout(self) -> Layout:
        world_size = self.num_processes * self.num_nodes
        size = self._pipeline_parallel_size
        num_ranks = world_size if size == "auto" else size
        layout = Layout(num_ranks, **self._arguments)
        if num_ranks != world_size:
            raise ConfigError(
                f"pipeline_parallel_size={num_ranks} on {world_size} devices: one copy "
                "of the pipeline "
                f"needs {num_ranks}, and several copies are not supported yet; give "
                f"devices={num_ranks}, or leave pipeline_parallel_size at 'auto'"
            )
        return layout

    def set_world_ranks(self) -> None:
        """Tells the cluster environment and the rank-zero helpers who this process is."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        seam.set_rank_zero(self.global_rank)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        layout = self._get_layout()
        self._failed = False
        if layout.num_ranks > 1:
            if self._start_method != "popen":
                reset_seed()  # a process that runs the script itself is where one device would be
            self.set_world_ranks()
            self._process_group_backend = seam.connect_processes(
                self.cluster_environment,
                self._process_group_backend,
                self.root_device,
                self._timeout,
            )
        if self._ranks is None:
            self._ranks = make_ranks(layout.stage_to_rank(), layout.num_ranks)
        self._guard = ExitStack()
        self._guard.enter_context(guard(self._ranks, _Doing(self)))
        self._make_whole()

    # ------------------------------------------------------------------ setup

    @override
    def setup(self, trainer: Trainer) -> None:
        if self._passes_through:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._optimizer_home = None
        self._postponed = False
        module, ranks = self._module, self._get_ranks()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            refuse_training(module)
        self.model = self.precision_plugin.convert_module(module)
        states.share_initial_state(module, ranks)
        self._pipeline = Pipeline(
            module,
            self._get_layout(),
            ranks,
            self.root_device,
            context=lambda name: getattr(self.precision_plugin, _CONTEXTS[name])(),
            seed=share.broadcast_object(ranks, torch.initial_seed(), ranks.first_position),
        )
        self._last = self._pipeline
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            self._cut_for_training(trainer)
        self.setup_precision_plugin()
        if fitting:
            seam.optimizers_to_device(self.optimizers, self.root_device)
            self._undo_clip = seam.replace_clip(
                self.precision_plugin,
                clip_by_norm_over_stages(ranks, self._counts),
            )

    @property
    def _passes_through(self) -> bool:
        """Whether there is nothing to pipeline: one rank, one stage, and nobody asked for micro-
        batches."""
        layout = self._get_layout()
        return layout.num_stages == 1 and layout.num_microbatches is None

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    def _cut_for_training(self, trainer: Trainer) -> None:
        found, batch = seam.first_training_batch(trainer)
        if not found:
            return
        with preserved(self.root_device.type):
            batch = seam.ready_batch(trainer, batch, self.root_device)
        args = (batch, 0) if seam.takes_batch_idx(self._module) else (batch,)
        with seam.step_name(self._module, "training_step"):
            try:
                self._cut("training_step", args, training=True)
            except PipelineError:
                raise
            except Exception:
                # It may need what `on_fit_start` or `on_train_start` makes, and these come later:
                # the first step is traced when it comes, and raises what it does on one device.
                self._postponed = True
                self.model_to_device()

    def _cut(self, name: str, args: tuple[Any, ...], *, training: bool) -> None:
        """Cuts the model on its first batch; parameters of other ranks leave the optimizer as
        well."""
        pipeline, module = self._get_pipeline(), self._module
        originals = dict(module.named_parameters())
        pipeline.cut(name, args, training=training)
        current = dict(module.named_parameters())
        self._parameter_names = {id(p): n for n, p in current.items()}
        swaps = {id(p): current[n] for n, p in originals.items() if p is not current[n]}
        for optimizer in self.optimizers:
            states.swap_parameters(optimizer, swaps)
        self.model_to_device()
        self._buffers = states.BufferWatch(module)
        self._optimizer_home = pipeline.home if self.optimizers else None
        self._plan = pipeline.plan
        if self._plan is not None and pipeline.ranks.is_first:
            show_plan(self._plan)

    @override
    def model_to_device(self) -> None:
        if self._passes_through or not self._get_pipeline().is_cut:
            self._module.to(self.root_device)
        else:
            move_own(self._module, self.root_device)

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._passes_through:
            return super().training_step(*args, **kwargs)
        if self._postponed and not self._is_cut:
            with self._ending_all():
                self._cut("training_step", args, training=True)
        if not self._is_cut:
            raise ConfigError(
                f"{type(self._module).__name__}.training_step reads batches itself "
                "(`dataloader_iter`): a pipeline splits each batch and needs it as an "
                "argument. Take "
                "`batch` instead, or train on one device without num_microbatches"
            )
        output, stash = self._run("training_step", args, training=True)
        assert stash is not None
        if isinstance(output, Tensor):
            return stash.attach(output)
        output = copy.copy(output)
        output["loss"] = stash.attach(output["loss"])
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", args)

    def _evaluate(self, name: str, args: tuple[Any, ...]) -> Any:
        if self._passes_through or (self._postponed and not self._is_cut):
            return getattr(super(), name)(*args)
        # A tensor made in inference mode could never be sent or written to again.
        with torch.inference_mode(False), torch.no_grad():
            if any(tensor.is_inference() for tensor in tensors(args[0])):
                args = (copy_tensors(args[0]), *args[1:])
            with self._ending_all():
                if not self._is_cut:
                    self._cut(name, args, training=False)
            return self._run(name, args, training=False)[0]

    def _run(self, name: str, args: tuple[Any, ...], *, training: bool) -> Any:
        trainer = self._module.trainer
        index = seam.batch_index(trainer)
        share_output = training or seam.reads_outputs(trainer, name)
        with self._ending_all():
            return self._get_pipeline().run(
                name, args, index, training=training, share_output=share_output
            )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._passes_through:
            return dataloader
        return SharedLoader(dataloader, self._get_ranks(), self.root_device)

    @override
    def on_validation_start(self) -> None:
        self._find_metrics()

    @override
    def on_test_start(self) -> None:
        self._find_metrics()

    @override
    def on_train_start(self) -> None:
        self._find_metrics()

    def _find_metrics(self) -> None:
        if self._pipeline is not None:
            self._pipeline.tail.find_metrics()

    # ------------------------------------------------------------------ between processes

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the copies of the pipeline, of which there is one."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers from the copies of the pipeline, of which there is one."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._ranks is None or self._ranks.num_positions == 1:
            return decision
        decisions = share.gather_objects(self._ranks, bool(decision)) or []
        return False not in decisions if all else True in decisions

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._ranks is None or self._ranks.num_positions == 1:
            return obj
        return share.broadcast_object(self._ranks, obj, self._ranks.order.index(src))

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._ranks is not None and self._ranks.control_group is not None:
            dist.barrier(group=self._ranks.control_group)

    # ------------------------------------------------------------------ checkpoints

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return seam.with_default_io(self, AtomicCheckpointIO)

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model under its own names, on the first rank; all ranks have to call this."""
        if not self._is_cut:
            return super().lightning_module_state_dict()
        self._refuse_if_failed()
        module, pipeline = self._module, self._get_pipeline()
        assert self._buffers is not None
        ranks, home = pipeline.ranks, pipeline.home
        buffers = states.gather_buffers(self._buffers, home, ranks)
        parameters = states.gather_parameters(module, home, ranks, everywhere=False)
        if not ranks.is_first:
            return module.state_dict()
        with states.whole(module, parameters, buffers):
            return module.state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state, numbered as on one device, on the first rank; all ranks have to call
        this."""
        if self._optimizer_home is None:
            return super().optimizer_state(optimizer)
        self._refuse_if_failed()
        return states.gather_optimizer_state(
            seam.plain_optimizer(optimizer),
            self._parameter_names,
            self._optimizer_home,
            self._get_ranks(),
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._optimizer_home is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        seam.restore_loaders(self._module.trainer)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            own = states.own_optimizer_state(
                optimizer, state, self._parameter_names, self._optimizer_home
            )
            optimizer.load_state_dict(own)
            seam.optimizer_to_device(optimizer, self.root_device)

    # ------------------------------------------------------------------ the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fail(exception)

    @override
    def teardown(self) -> None:
        if self._undo_clip is not None:
            self._undo_clip()
            self._undo_clip = None
        if self._pipeline is not None:
            self._pipeline.tail.release()
            if self._pipeline.is_cut and not self._failed:
                self._restored_mode = self._restore_mode()
                self._restore(self._restored_mode)
        self._guard.close()
        seam.teardown(self, super().teardown)

    def _restore_mode(self) -> str:
        if self._restore_model != "auto":
            return self._restore_model
        pipeline = self._get_pipeline()
        num_bytes = sum(p.numel() * p.element_size() for p in self._module.parameters())
        fits = num_bytes * self.num_processes < 0.5 * psutil.virtual_memory().available
        return "all" if all(share.gather_objects(pipeline.ranks, fits) or ()) else "rank_zero"

    def _restore(self, mode: str) -> None:
        """Brings the weights of other ranks back into the very parameters that they were taken
        from."""
        if mode == "none":
            return
        pipeline, module = self._get_pipeline(), self._module
        assert self._buffers is not None
        ranks, home = pipeline.ranks, pipeline.home
        buffers = states.gather_buffers(self._buffers, home, ranks)
        values = states.gather_parameters(module, home, ranks, everywhere=mode == "all")
        if mode == "all" or ranks.is_first:
            self._put_back(values)
            states.set_buffers(module, buffers)
        if mode == "all":
            self._pipeline = None

    def _put_back(self, values: Mapping[str, Tensor]) -> None:
        ownership = self._get_pipeline().home.ownership
        originals = ownership.fakes_to_originals()
        for optimizer in self.optimizers:
            states.swap_parameters(optimizer, originals)
        ownership.restore(values)
        self._parameter_names = {id(p): n for n, p in self._module.named_parameters()}

    def _make_whole(self) -> None:
        """Before another run: what the last one left on other ranks comes back."""
        pipeline = self._pipeline
        if pipeline is None or not pipeline.is_cut:
            self._pipeline = None
            return
        if pipeline.module is not self._module:
            self._pipeline = None
            return
        if self._failed:
            raise PipelineError(
                "the last run of this module failed and its other stages are lost; "
                "build the module "
                "anew and load a checkpoint"
            )
        if self._restored_mode == "none":
            self._restore("all")
        elif not pipeline.ranks.is_first:  # the first rank gives its weights to all in `setup`
            names = pipeline.home.ownership.foreign
            shapes = {n: self._module.get_parameter(n) for n in names}
            self._put_back({n: torch.empty(p.shape, dtype=p.dtype) for n, p in shapes.items()})
        self._pipeline = None

    # ------------------------------------------------------------------ what users read

    @property
    def plan(self) -> Plan | None:
        """Which stage holds what; known from the first batch on."""
        return self._plan

    @property
    def bubble(self) -> Bubble | None:
        """How idle this rank was in the last step; None before the first."""
        pipeline = self._last
        if pipeline is None or pipeline.schedule is None or not pipeline.step_s:
            return None
        busy_s = sum(span.duration_s for span in pipeline.spans)
        return Bubble(1 - busy_s / pipeline.step_s, ideal_bubble_fraction(pipeline.schedule))

    @property
    def last_timeline(self) -> Timeline | None:
        """What this rank did in the last step; None before the first."""
        pipeline = self._last
        if pipeline is None or pipeline.schedule is None:
            return None
        return Timeline.from_spans(pipeline.spans, pipeline.ranks.num_positions)

    def gather_timeline(self) -> Timeline | None:
        """What all ranks did in the last step; all ranks have to call this."""
        pipeline = self._last
        if pipeline is None or pipeline.schedule is None:
            return None
        parts = share.gather_objects(pipeline.ranks, list(pipeline.spans)) or []
        spans = [span for part in parts for span in part]
        return Timeline.from_spans(spans, pipeline.ranks.num_positions)

    # ------------------------------------------------------------------ pieces

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process, or of the Trainer, starts before `setup_environment`
        state: dict[str, Any] = super().__getstate__()
        nothing = {"_ranks": None, "_pipeline": None, "_last": None, "_undo_clip": None}
        return {**state, **nothing, "_buffers": None, "_guard": ExitStack()}

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _is_cut(self) -> bool:
        return self._pipeline is not None and self._pipeline.is_cut

    def _get_layout(self) -> Layout:
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _get_ranks(self) -> Ranks:
        assert self._ranks is not None, "ranks exist from `setup_environment` on"
        return self._ranks

    def _get_pipeline(self) -> Pipeline:
        assert self._pipeline is not None, "the pipeline exists from `setup` on"
        return self._pipeline

    def _counts(self, parameter: Tensor) -> bool:
        return not self._is_cut or self._get_pipeline().counts(parameter)

    @contextmanager
    def _ending_all(self) -> Generator[None, None, None]:
        """Lets an exception of this rank end the others before any callback waits for them."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failed:
            return
        self._failed = True
        with suppress(PeerError):  # the first failure is on stderr; this one is raised as it is
            self._guard.__exit__(type(error), error, error.__traceback__)

    def _refuse_if_failed(self) -> None:
        if self._failed:
            raise CheckpointError(
                "no checkpoint can be made after a failure: the other stages have ended"
            )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: give one of {', '.join(allowed)}")
