"""The processes of a pipeline, as Lightning sees them.

Who starts them, what they tell each other, and how one that fails ends the others. No models here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_pipe import _lightning as seam
from lightning_pipe.errors import ConfigError, PeerError
from lightning_pipe.layout import Layout
from lightning_pipe.manners import refuse_precision
from lightning_pipe.replicas import (
    Reduction,
    check_group,
    check_size,
    check_tensor_size,
    gather_from_copies,
    make_mesh,
    reduce_over_copies,
    sizes_of,
)
from lightning_pipe.runtime import meeting, share
from lightning_pipe.runtime.axes import DATA, ORDER, Axes, check_order
from lightning_pipe.runtime.doing import Doing
from lightning_pipe.runtime.patience import Patience, Timeout
from lightning_pipe.runtime.progress import Progress
from lightning_pipe.runtime.ranks import Ranks, make_ranks
from lightning_pipe.runtime.watchdog import guard
from lightning_pipe.signals import Signals

_START_METHODS = ("popen", "spawn", "fork", "forkserver")


class PipelineProcesses(ParallelStrategy):
    """The part of the strategy that is about processes.

    Args:
        accelerator: As all of Lightning's strategies take them; so are the next four.
        parallel_devices: The devices of this machine.
        cluster_environment: Where the processes are.
        checkpoint_io: How files are written.
        precision_plugin: The precision.
        pipeline_parallel_size: Ranks of a pipeline; None for what the copies leave.
        data_parallel_size: Copies of the pipeline; None for as many as there are devices for.
        tensor_parallel_size: Processes that share the tensors of a stage.
        mesh_order: The axes of the mesh, outermost first.
        reduction: How gradients are reduced over copies.
        arguments: What `Layout` takes besides.
        process_group_backend: Backend of the default process group.
        timeout: How long a rank may wait for another.
        hang_timeout: When such a wait is looked into; see
            :class:`~lightning_pipe.runtime.patience.Patience`.
        start_method: How processes are started.
    """

    def __init__(
        self,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        *,
        pipeline_parallel_size: int | None,
        data_parallel_size: int | None = 1,
        tensor_parallel_size: int = 1,
        mesh_order: Sequence[str] = ORDER,
        reduction: Reduction | None = None,
        arguments: dict[str, Any],
        process_group_backend: str | None,
        timeout: timedelta | None,
        hang_timeout: Timeout,
        start_method: str,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if start_method not in _START_METHODS:
            raise ConfigError(f"start_method={start_method!r}: give one of {_START_METHODS}")
        self._num_nodes = 1
        check_size("data_parallel_size", data_parallel_size)
        check_tensor_size(tensor_parallel_size, reduction)
        self._pipeline_parallel_size = pipeline_parallel_size
        self._data_parallel_size = data_parallel_size
        self._tensor_parallel_size = tensor_parallel_size
        self._mesh_order = check_order(mesh_order)
        self._reduction = reduction or Reduction()
        self._mesh: DeviceMesh | None = None
        self._arguments = arguments
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._patience = Patience(hang_timeout)
        self._start_method = start_method
        self._layout: Layout | None = None
        self._ranks: Ranks | None = None
        self._guard = ExitStack()
        self._failed = False
        self._accumulates = False
        self._signals: Signals | None = None
        if pipeline_parallel_size is not None:
            Layout(pipeline_parallel_size, **arguments)

    def __getstate__(self) -> dict[str, Any]:
        # a copy in another process, or of the Trainer, starts before `setup_environment`
        state: dict[str, Any] = super().__getstate__()
        none = {"_ranks": None, "_mesh": None, "_signals": None}
        return {**state, **none, "_guard": ExitStack()}

    # ------------------------------------------------------------------ who is there

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
        """Whether there are copies of the pipeline, which should see other data."""
        return self._num_copies > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {
            "num_replicas": self._num_copies,
            "rank": self._axes.place(DATA, self.global_rank),
        }

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks, with the axes "data_parallel", "pipeline" and "tensor_parallel".

        Raises:
            RuntimeError: There are no processes yet, or only one.
        """
        if self._mesh is None:
            raise RuntimeError("there is a device mesh once several processes have started")
        return self._mesh

    @property
    def _num_processes_of_job(self) -> int:
        return self.num_processes * self.num_nodes

    @property
    def _num_copies(self) -> int:
        of_copy = self._pipeline_layout.num_ranks * self._tensor_parallel_size
        return self._num_processes_of_job // of_copy

    @property
    def _axes(self) -> Axes:
        return Axes(
            self._pipeline_layout.num_ranks,
            self._num_copies,
            self._tensor_parallel_size,
            self._mesh_order,
        )

    @property
    def _passes_through(self) -> bool:
        """Whether there is nothing to do: one rank, one stage, no micro-batches asked for."""
        layout = self._pipeline_layout
        return (
            layout.num_stages == 1
            and self._num_copies == 1
            and self._tensor_parallel_size == 1
            and layout.num_microbatches is None
            and layout.activation_checkpointing in ("auto", "none")
            and layout.compile is None
        )

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the default process group."""
        return self._process_group_backend

    @property
    def given(self) -> dict[str, Any]:
        """The arguments that decide how a model is laid over ranks, as they were given."""
        return {
            "pipeline_parallel_size": self._pipeline_parallel_size,
            "data_parallel_size": self._data_parallel_size,
            "tensor_parallel_size": self._tensor_parallel_size,
            **self._arguments,
        }

    @property
    def _pipeline_layout(self) -> Layout:
        if self._layout is None:
            self._layout = self._make_layout()
        return self._layout

    def _make_layout(self) -> Layout:
        num_ranks, _ = sizes_of(
            self._pipeline_parallel_size,
            self._data_parallel_size,
            self._num_processes_of_job,
            self._tensor_parallel_size,
        )
        return Layout(num_ranks, **self._arguments)

    @property
    def _own_ranks(self) -> Ranks:
        assert self._ranks is not None, "ranks exist from `setup_environment` on"
        return self._ranks

    # ------------------------------------------------------------------ the start

    @override
    def _configure_launcher(self) -> None:
        self._layout = self._make_layout()
        if not self._passes_through:
            refuse_precision(self.precision_plugin)
        if self._num_processes_of_job > 1:
            self._launcher = seam.make_launcher(
                self,
                self._start_method,
                self.cluster_environment,
                self.num_processes,
                self.num_nodes,
            )

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
        layout = self._pipeline_layout
        if self._num_processes_of_job > 1:
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
            self._ranks = make_ranks(
                layout.stage_to_rank(),
                layout.num_ranks,
                data_parallel_size=self._num_copies,
                tensor_parallel_size=self._tensor_parallel_size,
                mesh_order=self._mesh_order,
            )
            self._mesh = make_mesh(self._ranks, self.root_device)
        seam.set_mesh(self.lightning_module, self._mesh)
        self._failed = False
        self._guard = ExitStack()
        self._guard.enter_context(
            guard(self._ranks, Doing(self._ranks, self._progress), self._patience)
        )

    # ------------------------------------------------------------------ between processes

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the copies of the pipeline: ranks of one have the same values."""
        copies = None if self._ranks is None else self._ranks.copies
        if copies is None or not isinstance(tensor, Tensor):
            return tensor
        check_group(group, copies)
        return reduce_over_copies(tensor, copies, seam.name_of_reduction(reduce_op))

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers from the copies of the pipeline, along a new first dimension if there are any."""
        copies = None if self._ranks is None else self._ranks.copies
        if copies is None:
            return tensor
        check_group(group, copies)
        return gather_from_copies(tensor, copies, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._ranks is None or self._ranks.world_size == 1:
            return decision
        place = "takes a decision with the others"
        decisions = meeting.meet_everywhere(self._ranks, place, bool(decision))
        return 0 not in decisions if all else 1 in decisions

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._ranks is None or self._ranks.world_size == 1:
            return obj
        with meeting.everywhere(self._ranks, "gives an object to all"):
            return share.broadcast_everywhere(self._ranks, obj, src)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._ranks is not None:
            meeting.meet_everywhere(self._ranks, f"waits for all at {name or 'a barrier'}")

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within it gradients are accumulated, and not yet averaged over the copies."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    # ------------------------------------------------------------------ the end

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._fail(exception)

    def _postpone_signals(self, trainer: Trainer) -> Callable[[], None] | None:
        """Lets all ranks do together what a signal asks of one; returns what undoes that."""
        if self._own_ranks.world_size == 1:
            return None
        self._signals = Signals(trainer, self._own_ranks)
        return self._signals.undo

    @contextmanager
    def _ending_all(self) -> Generator[None, None, None]:
        """Lets an exception of this rank end the others before any callback waits for them."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        if self._failed or (self._signals is not None and self._signals.asked_for(error)):
            return
        self._failed = True
        try:
            self._guard.__exit__(type(error), error, error.__traceback__)
        except PeerError as named:  # this one is raised where it is, so it says who failed
            if named is not error and isinstance(error, PeerError):
                error.args = (f"{named}. Here: {error}",)

    def _progress(self) -> Progress | None:
        """What the engine is doing, once there is one."""
        return None
