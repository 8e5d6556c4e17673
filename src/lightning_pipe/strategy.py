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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from datetime import timedelta
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipe import _lightning as seam
from lightning_pipe import _loops
from lightning_pipe.agreement import agree_while_fitting
from lightning_pipe.checkpoints import PipelineCheckpoints
from lightning_pipe.conversion import converted
from lightning_pipe.data import SharedLoader, share_random_state
from lightning_pipe.debug import log_actions
from lightning_pipe.errors import ConfigError, PipelineError
from lightning_pipe.facts import compare, facts_of
from lightning_pipe.follow import Follow
from lightning_pipe.gradients import clip_by_norm_over_stages, share_overflow
from lightning_pipe.hooks import Hooks
from lightning_pipe.layout import Size, checkpointing_of, number_of
from lightning_pipe.manners import (
    move_own,
    refuse_optimizers,
    refuse_training,
    refuse_tuners,
    show_plan,
)
from lightning_pipe.norms import over_all_stages
from lightning_pipe.parts import Parts
from lightning_pipe.planfile import read_costs, read_plan, with_plan
from lightning_pipe.planning.plan import Plan
from lightning_pipe.replicas import Reduction, warn_of_one_copy
from lightning_pipe.runtime import meeting, share
from lightning_pipe.runtime.axes import ORDER
from lightning_pipe.runtime.progress import Progress
from lightning_pipe.sharded import (
    check_wanted,
)
from lightning_pipe.sharding import stepping_on_parts
from lightning_pipe.shared_tensors import check_shared_tensors
from lightning_pipe.split._fake import run_eagerly
from lightning_pipe.split.compiled import check_options
from lightning_pipe.split.nest import copy_tensors
from lightning_pipe.split.rng import preserved
from lightning_pipe.split.snapshot import unchanged
from lightning_pipe.split.tree import tensors
from lightning_pipe.stage_memory import (
    extend_device_stats,
    note_shortage,
)
from lightning_pipe.states import SpreadModel, share_initial_state
from lightning_pipe.steps import Pipeline
from lightning_pipe.synced import SyncedNorms

_RESTORE = ("auto", "all", "rank_zero", "none")


class PipelineStrategy(PipelineCheckpoints):
    """Trains one model over several devices, each of which holds some of its layers.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Where the processes are; found by the Trainer.
        checkpoint_io: How checkpoint files are written and read.
        precision_plugin: Set by the Trainer from its ``precision``.
        pipeline_parallel_size: Number of ranks that share a model. "auto" takes all devices, or
            those that there are for each copy.
        data_parallel_size: Copies of the pipeline, each of which trains on its part of the data.
            "auto" makes as many as there are devices for.
        tensor_parallel_size: Processes that share the tensors of each stage. Which tensors and how,
            ``configure_model`` says with ``parallelize_module`` on
            ``self.device_mesh["tensor_parallel"]``.
        mesh_order: The axes of ``self.device_mesh``, outermost first: neighbours along the last one
            have global ranks that follow each other.
        num_microbatches: Pieces that a batch is split into. "auto" takes 4 per rank, or as many as
            the batch has rows.
        microbatch_size: Rows of a micro-batch. A training step then draws num_microbatches of them
            from the loader, so that num_microbatches changes the effective batch; the loader's
            ``batch_size`` is that of a micro-batch, or any divisor of a whole step. None: each
            batch of the loader is a step, and is split.
        schedule: "auto", "gpipe", "1f1b", "interleaved_1f1b", "naive", ... or the path of a CSV
            file.
        virtual_stages: Chunks of the model on each rank; "auto" takes more than one where that is
            simulated to be faster.
        balance: What makes stages equal: "auto", "flops", "parameters", "uniform", or the number of
            units of each stage.
        split_points: Names of modules after which to cut, instead of a balance.
        split_batch: How values of the batch are split where rows along dimension 0 are the wrong
            guess, by key: "replicate" (or None) gives the value whole to every micro-batch, "list"
            splits a list item by item, a number names the dimension of the rows.
        batchnorm: When batch norms update their running statistics: "micro-batch", each time that
            they are called, or "deferred", once per step with those of the whole batch.
        activation_checkpointing: Which units keep their inputs only and run again for the backward:
            "auto" (as few as fit the memory of the device), "none", "all", a number k (every k-th
            unit), or the names of classes.
        compile: Whether units are compiled, each by itself: True, a mode of ``torch.compile``, or a
            dict of its arguments.
        plan: A file that `lightning-pipe plan` wrote; it decides stages, micro-batches, schedule
            and cuts.
        costs: A file that `lightning-pipe plan --measure cpu --save-costs FILE` wrote: stages are
            balanced, and what is "auto" is chosen, by measured times and not by FLOPs.
        restore_model: Which ranks hold the whole model again afterwards: "all", "rank_zero",
            "none", or "auto": all if the host has the memory.
        share_predictions: Whether ``trainer.predict`` returns the predictions on all ranks. False
            saves sending and memory: all but global rank 0 return None for each batch.
        bucket_cap_mb: MiB of gradients that are averaged over the copies in one message.
        data_parallel_sharding: Whether each copy holds its part only of weights, gradients and
            optimizer state between steps (FSDP2); they are gathered for a step, stage by stage.
        reduce_dtype: What these are sent as: "bf16", "fp16", "fp32", or None: as they are.
        save_distributed_checkpoint: Whether checkpoints are folders of which each rank writes its
            part (``lightning-pipe consolidate`` makes one file of them); "async" writes them while
            training goes on.
        process_group_backend: Backend of ``torch.distributed``; that of the device if None.
        timeout: How long a rank may wait for another.
        hang_timeout: How long it may until all ranks say what they do: "auto" is a minute, or ten
            usual steps. The run is ended if a rank does not answer, or, after five minutes, if
            every rank waits for another. A number of seconds ends the run then, whatever the
            cause; None never ends it.
        debug: Whether every action of every rank is noted in a file, with shapes, types and peers;
            or the folder for these files. Read them with `lightning-pipe debug-merge`. False asks
            the environment variable ``LIGHTNING_PIPE_DEBUG``.
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
        data_parallel_size: Size = 1,
        tensor_parallel_size: int = 1,
        mesh_order: Sequence[str] = ORDER,
        num_microbatches: Size = "auto",
        microbatch_size: int | None = None,
        schedule: str = "auto",
        virtual_stages: Size = 1,
        balance: str | list[int] = "auto",
        split_points: list[str] | None = None,
        split_batch: dict[str, int | str | None] | None = None,
        batchnorm: str = "micro-batch",
        activation_checkpointing: str | int | list[str] = "auto",
        compile: bool | str | dict[str, Any] | None = False,
        plan: str | None = None,
        costs: str | None = None,
        restore_model: str = "auto",
        share_predictions: bool = True,
        bucket_cap_mb: float = 25,
        reduce_dtype: str | None = None,
        data_parallel_sharding: bool = False,
        save_distributed_checkpoint: bool | str = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
        hang_timeout: float | str | None = "auto",
        debug: bool | str = False,
        start_method: str = "popen",
    ) -> None:
        num_ranks = number_of(pipeline_parallel_size)
        arguments = {
            "virtual_stages": number_of(virtual_stages) or 1,
            "chunks_are_free": virtual_stages == "auto",
            "num_microbatches": number_of(num_microbatches),
            "microbatch_size": microbatch_size,
            "schedule": os.fspath(schedule),
            "balance": balance if isinstance(balance, str) else tuple(balance),
            "split_points": None if split_points is None else tuple(split_points),
            "split_batch": dict(split_batch or {}),
            "batchnorm": batchnorm,
            "activation_checkpointing": checkpointing_of(activation_checkpointing),
            "compile": check_options(compile),
            "costs": None if costs is None else read_costs(costs),
        }
        if plan is not None:
            num_ranks, arguments = with_plan(read_plan(plan), num_ranks, arguments)
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            pipeline_parallel_size=num_ranks,
            data_parallel_size=number_of(data_parallel_size),
            tensor_parallel_size=tensor_parallel_size,
            mesh_order=mesh_order,
            reduction=Reduction(bucket_cap_mb, reduce_dtype, data_parallel_sharding),
            arguments=arguments,
            process_group_backend=process_group_backend,
            timeout=timeout,
            hang_timeout=hang_timeout,
            start_method=start_method,
        )
        if restore_model not in _RESTORE:
            raise ConfigError(f"restore_model={restore_model!r}: give one of {_RESTORE}")
        self._restore_model = restore_model
        self._share_predictions = share_predictions
        self._debug = debug
        self._save_distributed_checkpoint = check_wanted(save_distributed_checkpoint)
        self._pipeline: Pipeline | None = None
        self._plan: Plan | None = None
        self._shown_plan: Plan | None = None
        self._hooks: Hooks | None = None
        self._undo: list[Callable[[], None] | None] = []
        self._postponed = False
        self._follow = Follow()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {
            **state,
            "_pipeline": None,
            "_hooks": None,
            "_undo": [],
        }

    # ------------------------------------------------------------------ setup

    @override
    def setup_environment(self) -> None:
        if self._failed and self._spread is not None and self._spread.holds(self._module):
            raise PipelineError(
                "the last run of this module failed and its other stages are lost; build the "
                "module anew and load a checkpoint"
            )
        super().setup_environment()
        self._open_checkpoints()
        if self._spread is not None and self._spread.holds(self._module):
            self._spread.make_whole()

    @override
    def setup(self, trainer: Trainer) -> None:
        self._refuse_plugin()
        self._build_absent(self._module)
        if self._passes_through:
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._spread = None
        self._follow = Follow()
        module, ranks = self._module, self._own_ranks
        fitting = trainer.state.fn == TrainerFn.FITTING
        refuse_tuners(vars(trainer)["callbacks"] if ranks.world_size > 1 else ())
        synced = SyncedNorms(module, ranks, asked=seam.syncs_batch_norms(self))
        self._undo.append(synced.undo)
        if fitting:
            refuse_training(module)
        with nullcontext() if self._blueprint is None else self._building():
            self.model = converted(module, self.precision_plugin.convert_module)
        check_shared_tensors(self.model, ranks)
        warn_of_one_copy(self._reduction, ranks)
        flags = meeting.meet_everywhere(ranks, "sets the model up", _loops.has_user_hooks(trainer))
        is_parted = self._holds_parts
        has_hooks = any(flags) and (ranks.num_positions > 1 or is_parted)
        if ranks.world_size > 1:
            compare(ranks, facts_of(module, self.given, trainer))
        share_initial_state(module, ranks, self._blueprint)
        share_random_state(ranks, self.root_device)
        self._pipeline = Pipeline(
            module,
            self._pipeline_layout,
            ranks,
            self.root_device,
            context=partial(seam.step_context, self.precision_plugin),
            seed=share.broadcast_everywhere(ranks, torch.initial_seed()),
            reduction=self._reduction,
            follows_hooks=has_hooks,
            synced=synced,
        )
        self._pipeline.blueprint = self._blueprint
        self._undo.append(log_actions(self._pipeline.engine, self._debug, trainer.default_root_dir))
        self._undo += [run_eagerly(module), self._postpone_signals(trainer)]
        if ranks.copies is None:
            self._undo.append(_loops.silence_advice())
        self._undo.append(extend_device_stats(self.accelerator, self.gather_memory))
        if has_hooks:
            self._undo.append(_loops.around_hooks(trainer, self._hook_runs))
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers)
            self._pipeline.optimizers = [seam.plain_optimizer(o) for o in self.optimizers]
        self._spread = SpreadModel(self._pipeline, self.optimizers if fitting else [])
        # The first training step is cut when it comes, so no hook is called earlier than on one
        # device. An evaluation or a checkpoint before it needs the weights in their places, unless
        # all are in this process.
        self._postponed = False
        if fitting and ranks.num_positions == 1:
            self._postpone()
        self.setup_precision_plugin()
        if fitting:
            seam.optimizers_to_device(self.optimizers, self.root_device)
            self._undo += [
                seam.replace_clip(
                    self.precision_plugin, clip_by_norm_over_stages(ranks, self._counts)
                ),
                share_overflow(
                    self.precision_plugin,
                    ranks,
                    self.root_device,
                    partial(meeting.together(is_parted), ranks) if has_hooks else None,
                ),
                *agree_while_fitting(trainer, ranks, has_hooks=has_hooks, is_parted=is_parted),
            ]

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        with self._between.suspended(), ExitStack() as stack:
            if self._own_ranks.num_positions > 1 or self._holds_parts:
                stack.enter_context(over_all_stages(self._own_ranks, optimizer, self._counts))
            if self._holds_parts:
                stack.enter_context(stepping_on_parts(optimizer, self._own_ranks))
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)

    @override
    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == seam.RUN_STAGE and seam.evaluates_first(self._module.trainer):
            self._cut_for_training()

    @override
    def _cut_for_training(self) -> None:
        if self._passes_through or self._postponed or self._is_cut:
            return
        trainer = self._module.trainer
        with self._ending_all():
            found, batch = seam.first_training_batch(trainer)
            if found:
                self._cut_on(trainer, batch)
            else:
                self._postpone()

    def _cut_on(self, trainer: Trainer, batch: Any) -> None:
        with preserved(self.root_device.type), unchanged(self._module, seam.data_of(trainer)):
            batch = seam.ready_batch(trainer, copy_tensors(batch), self.root_device)
        args = (batch, 0) if seam.takes_batch_idx(self._module) else (batch,)
        with seam.step_name(self._module, "training_step"):
            try:
                self._cut("training_step", args, training=True)
            except PipelineError:
                raise
            except Exception:
                # It may need what `on_train_start` makes, and that comes later: the first step is
                # traced when it comes, and raises what it raises on one device.
                self._postpone()

    def _postpone(self) -> None:
        self._postponed = True
        self.model_to_device()

    def _cut(self, name: str, args: tuple[Any, ...], *, training: bool) -> None:
        """Cuts the model on its first batch."""
        assert self._spread is not None
        assert self._pipeline is not None
        with self._between.suspended():
            self._spread.cut(name, args, training=training)
        self._blueprint = None
        self._hooks = Hooks(
            Parts(
                self._module, self._pipeline.home, self._own_ranks, self._pipeline.parted_in_hooks()
            )
        )
        self.model_to_device()
        self._spread.watch_buffers()
        self._plan = self._pipeline.plan
        if self._plan is not None and self._own_ranks.is_first:
            self._shown_plan = show_plan(self._plan, self._shown_plan)

    @override
    def model_to_device(self) -> None:
        if self._is_cut:
            move_own(self._module, self.root_device)
            return
        with nullcontext() if self._blueprint is None else self._building():
            converted(self._module, methodcaller("to", self.root_device))

    # ------------------------------------------------------------------ steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._passes_through:
            return super().training_step(*args, **kwargs)
        if not self._is_cut:
            with self._ending_all():
                self._cut("training_step", args, training=True)
        output, stash = self._run("training_step", args, training=True)
        with self._ending_all():
            self._follow.after_step(self._running)
        assert stash is not None
        if not self._accumulates:
            stash.then = self._running.average_gradients
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
        scaler = getattr(self.precision_plugin, "scaler", None)
        with self._ending_all(), self._between.suspended():
            return self._running.run(
                name,
                args,
                seam.batch_index(trainer),
                training=training,
                share_output=training
                or seam.reads_outputs(trainer, name)
                or (
                    name == "predict_step"
                    and self._share_predictions
                    and trainer.predict_loop.return_predictions
                ),
                loss_scale=scaler.get_scale() if training and scaler is not None else 1.0,
            )

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        if self._passes_through:
            return dataloader
        if type(dataloader) is SharedLoader:  # set up before, and again for this epoch
            dataloader = dataloader.unshared
        training = seam.sets_up_training_data(self._module.trainer)
        grouped = self._pipeline_layout.grouped(dataloader) if training else None
        return SharedLoader(
            dataloader, self._own_ranks, self.root_device, grouped, ends_together=training
        )

    @override
    def on_validation_start(self) -> None:
        self._find_metrics()
        if self._pipeline is not None:
            self._pipeline.gather_weights()

    @override
    def on_validation_end(self) -> None:
        if self._pipeline is not None:
            self._pipeline.free_weights()

    @override
    def on_test_start(self) -> None:
        self._find_metrics()

    @override
    def on_train_start(self) -> None:
        self._find_metrics()

    def _find_metrics(self) -> None:
        if self._pipeline is not None:
            self._pipeline.tail.find_metrics()

    # ------------------------------------------------------------------ the end

    @override
    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            with suppress(Exception):  # whatever is wrong with the ledger, the error is this one
                note_shortage(error, self._pipeline)
        super()._fail(error)

    @override
    def teardown(self) -> None:
        while self._undo:
            undo = self._undo.pop()
            if undo is not None:
                undo()
        if self._pipeline is not None:
            self._pipeline.tail.release()
        if self._spread is not None and self._is_cut and not self._failed:
            self._spread.restore(self._restore_model, self.num_processes)
        if not self._failed:
            self._forget_blueprint()
        if self._hooks is not None:
            self._hooks.parts.release()
            self._hooks = None
        if not self._failed:
            self._close_checkpoints()
        self._guard.close()
        seam.teardown(self, super().teardown)

    # ------------------------------------------------------------------ pieces

    @property
    def _holds_parts(self) -> bool:
        """Whether processes of other pipelines hold other parts of this one's weights."""
        ranks = self._own_ranks
        return ranks.tensor is not None or (self._reduction.is_sharded and ranks.copies is not None)

    def _hook_runs(self) -> AbstractContextManager[None]:
        return self._between.running() if self._is_cut else nullcontext()

    @property
    def _running(self) -> Pipeline:
        assert self._pipeline is not None, "the pipeline exists from `setup` on"
        return self._pipeline

    @override
    def _progress(self) -> Progress | None:
        return None if self._pipeline is None else self._pipeline.engine.progress

    def _counts(self, parameter: Tensor) -> bool:
        return not self._is_cut or self._running.counts(parameter)
