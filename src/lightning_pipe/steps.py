"""Runs the steps of a LightningModule over the stages of a pipeline: trace, cut, run, carry back.

One `Pipeline` lives from `setup` to `teardown`. It knows the module, this rank and the layout;
loops, hooks and checkpoints are the strategy's.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.cutting import PipelineCuts
from lightning_pipe.errors import CutError
from lightning_pipe.gradients import GradientStash
from lightning_pipe.guards import Guards
from lightning_pipe.home import (
    CutStep,
)
from lightning_pipe.hookparts import HookParts
from lightning_pipe.iterated import Iterated
from lightning_pipe.layout import Layout
from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.schedules import forward_only
from lightning_pipe.planning.timeline import Span
from lightning_pipe.preflight import Preflight, refuse_different, told_of
from lightning_pipe.replicas import Copies, Reduction, metric_sync
from lightning_pipe.runtime import share
from lightning_pipe.runtime._dtensor import backwards_of_parallel_losses
from lightning_pipe.runtime.engine import Engine
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.sharding import share_parts
from lightning_pipe.split.parted import is_parted, part_of, parted_like
from lightning_pipe.split.patching import find_metrics
from lightning_pipe.split.rng import mix, preserved
from lightning_pipe.split.rows import Pieces
from lightning_pipe.split.saved import KeptBytes
from lightning_pipe.split.signature import signature
from lightning_pipe.statistics import DeferredStatistics, Noted
from lightning_pipe.synced import SyncedNorms
from lightning_pipe.tail import Tail, Traces
from lightning_pipe.whole import WholeTail
from lightning_pipe.work import Context, StageOfStep, StepRun, Trial


class Pipeline(PipelineCuts):
    """The stages of one module on one rank.

    Args:
        module: The user's LightningModule.
        layout: What was asked for.
        ranks: This rank.
        device: Where its stages live.
        context: The precision context of a step, by its name.
        seed: The same on all ranks; random keys of micro-batches are made from it, others in each
            copy of the pipeline.
        reduction: How gradients are reduced over the copies.
        follows_hooks: Whether code of the user runs before steps, which may need other ranks.
        synced: Batch norms that are those of all copies.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        ranks: Ranks,
        device: torch.device,
        *,
        context: Context,
        seed: int,
        reduction: Reduction | None = None,
        follows_hooks: bool = False,
        synced: SyncedNorms | None = None,
    ) -> None:
        super().__init__(module, layout, ranks, device, context=context, reduction=reduction)
        self.tail = Tail(module, metric_sync(ranks))
        self.copies = Copies(ranks, self._reduction)
        trace = partial(self._trace, memo=self._cuts.memo)
        self.whole = WholeTail(module, self.tail, trace, device.type)
        self.engine = Engine(ranks, device)
        self._hand_out = share.Handing(ranks, "what the step returns, logs or leaves in attributes")
        self.spans: Sequence[Span] = ()
        self.step_s = 0.0
        self.schedule: Schedule | None = None
        #: set before a training step whose kept bytes are to be counted; `kept` has them afterwards
        self.counts_kept = False
        self.kept: KeptBytes | None = None
        copy = ranks.data_parallel_rank
        self._seed = mix(seed, copy) if copy else seed
        self._follows_hooks = follows_hooks
        self._synced = synced if synced else None
        self._cuts.derives = self._synced is None  # a cut that is tried may send other than copies
        self._schedules: dict[Any, Schedule] = {}
        self._preflight = Preflight(ranks)
        self._guards = Guards(module, ranks, device)

    def run(
        self,
        name: str,
        args: tuple[Any, ...],
        index: Sequence[int],
        *,
        training: bool,
        share_output: bool = True,
        loss_scale: float = 1.0,
    ) -> tuple[Any, GradientStash | None]:
        """Runs a step: all micro-batches through all stages, forward and, in training, backward.

        Args:
            name: Name of the step method.
            args: Its arguments; the first is the batch.
            index: Numbers of this batch, from which its random keys are made.
            training: Whether gradients are wanted.
            share_output: Whether ranks without the last stage are given what the step returned.
            loss_scale: What the loss is multiplied with before the backward, against underflow; the
                gradients that are handed over are not.

        Returns:
            What the step returned, merged over micro-batches, and the gradients of this rank.
        """
        seen = signature(args[0])
        if self._follows_hooks:
            self.conditions.meet(f"runs {name}", args[0], seen, self.layout.num_microbatches)
        self._guards.begin(name, args[0], training=training)
        pieces = self._split(args[0])
        state = self._state_key(name, training=training)
        key = mix(self._seed, *index)
        step = StepRun(
            self.module,
            self.tail,
            self._context,
            name,
            args[1:],
            pieces,
            self._cuts_of(state, pieces, args[1:], key, training=training),
            key,
            training,
            loss_scale,
        )
        if self._synced is not None and training:
            step = replace(step, synced=self._synced)
            self._synced.agree(self.copies, step.cuts)
        unproven = [cut for cut in step.cuts if cut.unproven is not None or cut.restless]
        if unproven:
            open_to = next((cut.cut.trace.units for cut in unproven if cut.restless), None)
            step = replace(step, trial=Trial(self.module, self.device, open_to))
        step, stash = self._execute(step)
        if unproven and not self._is_right(step, unproven):
            if any(cut.restless for cut in unproven):
                self._ways.varies(state[:2])
            self._guards.forget()
            again = self._cuts_of(state, pieces, args[1:], key, training=training)
            step, stash = self._execute(replace(step, cuts=again, trial=None))
        if stash is not None:
            self._sum_replicas(stash)
            stash.leave_out(
                frozenset[str].intersection(*(c.cut.trace.without_gradient for c in step.cuts))
            )
        if step.statistics is not None:
            self._update_statistics(step.statistics)
        self.whole.finish(step, args[0], (*state, seen))
        with self._context(name):  # numbers become tensors of the type that they have in the step
            traces = self._carry(with_output=share_output, training=training)
        if stash is not None:
            if step.synced is not None:
                step.synced.compare(self.copies, traces.correction)
            stash.correct(traces.correction)
        return traces.output, stash

    def _cuts_of(
        self,
        state: tuple[str, bool, Any],
        pieces: Pieces,
        rest: tuple[Any, ...],
        key: int,
        *,
        training: bool,
    ) -> list[CutStep]:
        if not self._ways.vary(state[:2]):
            cuts = [
                self._cut_for(state, piece, rest, training=training) for piece in pieces.batches
            ]
            if not self._ways.vary(state[:2]):  # which the traces may have shown
                return cuts
        if self._synced is not None:
            self._synced.refuse_ways()
        return self._own_ways(state, pieces, rest, key, training=training)

    def _execute(self, step: StepRun) -> tuple[StepRun, GradientStash | None]:
        """Runs all micro-batches; returns the step as it ran, and the gradients of this rank."""
        schedule = self._schedule_for(step.cuts, training=step.training)
        self._preflight.check(schedule, self._cuts.take_new())
        gathered = self._gather(step)
        step = replace(
            step,
            need=self._need,
            metrics=find_metrics(self.module),
            kept=self._counter(step),
            statistics=self._deferred if step.training else None,
            iterated=self._iterated if step.training else None,
            finite=self._guards.finite,
            weights=self._weights_of_stages if step.training else {},
        )
        if step.iterated is not None:
            step.iterated.begin()
        if self.ranks.position == schedule.stage_to_rank[-1]:
            step = self.whole.watched(step)
        stages = {stage: StageOfStep(step, stage) for stage in schedule.stages(self.ranks.position)}
        changing = frozenset().union(*(cut.changing for cut in step.cuts))
        self.tail.start(step.pieces.rows, step.cuts[0].watched, changing, step.name)
        stash = GradientStash(self._own_parameters, step.loss_scale) if step.training else None
        start_s = time.perf_counter()
        collected = stash.collect() if stash is not None else nullcontext()
        noted = nullcontext() if step.statistics is None else step.statistics.step()
        synced = nullcontext() if step.synced is None else step.synced.running()
        shared = nullcontext() if self.ranks.tensor is None else backwards_of_parallel_losses()
        with collected, synced, noted, shared, preserved(self.device.type, self._cuts.generators):
            self.spans = self.engine.run(schedule, stages, training=step.training)
        if gathered:
            self.free_weights()
        self.step_s = time.perf_counter() - start_s
        self.schedule = schedule
        return step, stash

    def gather_weights(self) -> None:
        """Before an evaluation: this rank is given all of its weights, till `free_weights`.

        Copies may then evaluate other numbers of batches than each other.
        """
        if self.weights is not None:
            self.weights.gather()
            self.weights.need()

    def free_weights(self) -> None:
        """This rank goes back to its parts of the weights."""
        if self.weights is not None:
            self.weights.free()

    def parted_in_hooks(self) -> HookParts | None:
        """What gives hooks the whole weights, where each copy holds a part."""
        ranks = self.ranks
        if self.weights is None and not any(map(is_parted, self.module.parameters())):
            return None
        sharers = ranks.tensor if self.weights is None else ranks.copies
        return HookParts(self.module, sharers or Ranks(1, ranks.global_rank, 0, 1, (0,)))

    def _gather(self, step: StepRun) -> bool:
        """Starts to gather the weights of a training step; whether it has to free them."""
        if self.weights is None or not step.training:
            return False
        self.weights.gather(self._read)
        if self.counts_kept:
            self.weights.need()
        return True

    def _need(self, stage: int) -> None:
        """A stage is about to run for the first time."""
        if self.weights is not None:
            self.weights.need(self.home.held[stage])

    def _counter(self, step: StepRun) -> KeptBytes | None:
        """What counts the kept bytes of this step, where somebody asked for it."""
        if not (self.counts_kept and step.training):
            return None
        self.counts_kept = False
        self.kept = KeptBytes([*self._own_parameters.values(), *self.module.buffers()])
        return self.kept

    def _is_right(self, step: StepRun, unproven: Sequence[CutStep]) -> bool:
        """Whether derived cuts were right on all ranks; if not, the step is undone."""
        assert step.trial is not None
        told = share.gather_objects(self.ranks, (step.trial.error, told_of(unproven))) or []
        refuse_different([texts for _, texts in told])
        if any(error is not None for error, _ in told):
            step.trial.undo()
            self._cuts.reject(unproven)
            return False
        self._cuts.confirm(unproven)
        return True

    @cached_property
    def _iterated(self) -> Iterated:
        """The spectral norms of the module."""
        return Iterated(self.module)

    @cached_property
    def _deferred(self) -> DeferredStatistics | None:
        """Notes the statistics of the batch norms in units; the others belong to the tail."""
        if self.layout.batchnorm != "deferred":
            return None
        inside = tuple(f"{unit}." for unit in self.home.stages_of_unit)
        return DeferredStatistics([n for n in self._batch_norms if f"{n[0]}.".startswith(inside)])

    @cached_property
    def _shared_norms(self) -> list[str]:
        """Batch norms that several ranks call."""
        shared = tuple(
            f"{unit}."
            for unit, stages in self.home.stages_of_unit.items()
            if len({self.home.stage_to_rank[stage] for stage in stages}) > 1
        )
        return [name for name, _ in self._batch_norms if f"{name}.".startswith(shared)]

    def _update_statistics(self, statistics: DeferredStatistics) -> None:
        if self._synced is not None:
            self._synced.join(self.copies, statistics)
        others: list[Noted] = []
        if self._shared_norms:
            taken = statistics.take(self._shared_norms)
            others = [
                noted for part in share.gather_objects(self.ranks, taken) or [] for noted in part
            ]
        statistics.finish(others)

    def _schedule_for(self, cuts: Sequence[CutStep], *, training: bool) -> Schedule:
        placement = cuts[0].placement
        if any(cut.placement != placement for cut in cuts):
            raise CutError(
                "micro-batches of one batch take different ways through the model: "
                f"{sorted({cut.placement for cut in cuts})}; give num_microbatches=1"
            )
        key = (training, len(cuts), placement)
        if key not in self._schedules:
            self._schedules[key] = (
                self.layout.make(len(cuts))
                if training
                else forward_only(placement, len(cuts), num_ranks=self.ranks.num_positions)
            )
        return self._schedules[key]

    @cached_property
    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """As the step sees them; between steps there may be parts in their places."""
        keep = self.home.ownership.keep
        own = {n: p for n, p in self.module.named_parameters() if n in keep}
        return own if self.weights is None else own | self.weights.originals

    @cached_property
    def _resting_parameters(self) -> dict[str, nn.Parameter]:
        """As optimizers see them."""
        own = self._own_parameters
        return own if self.weights is None else own | self.weights.shards

    @cached_property
    def _weights_of_stages(self) -> dict[int, list[nn.Parameter]]:
        own = self._own_parameters
        return {
            stage: [own[name] for name in held if name in own]
            for stage, held in enumerate(self.home.held)
        }

    @cached_property
    def _replicated(self) -> dict[str, tuple[int, ...]]:
        names = [name for name, _ in self.module.named_parameters()]
        owners = {name: self.home.owners(name) for name in names}
        return {name: ranks for name, ranks in owners.items() if len(ranks) > 1}

    def counts(self, parameter: Tensor) -> bool:
        """Whether this rank is the one that counts a parameter in a norm."""
        return id(parameter) in self._counted

    @cached_property
    def _counted(self) -> frozenset[int]:
        return frozenset(
            id(parameter)
            for name, parameter in self._resting_parameters.items()
            if self.home.owners(name)[0] == self.ranks.position
        )

    def _sum_replicas(self, stash: GradientStash) -> None:
        if self._replicated:
            own = {name: part_of(stash.gradients.get(name)) for name in self._replicated}
            values = {
                n: part_of(p) for n, p in self._resting_parameters.items() if n in self._replicated
            }
            summed = share.sum_replicated(
                self.ranks, own, self._replicated, self._guards.checksums(values)
            )
            parameters = self._own_parameters
            stash.gradients.update(
                {
                    n: parted_like(parameters[n], g) if is_parted(parameters[n]) else g
                    for n, g in summed.items()
                    if g is not None
                }
            )

    def average_gradients(self) -> None:
        """Puts the means over all copies of the pipeline into `.grad`."""
        if self.weights is not None:
            self.weights.reduce()
            share_parts(self.weights, self._replicated, self.ranks)
        whole, shared = self._averaged
        self.copies.average(whole, shared)
        self._guards.compare_replicas(whole)

    @cached_property
    def _averaged(self) -> tuple[dict[str, nn.Parameter], dict[str, tuple[int, ...]]]:
        """This rank's parameters that each copy holds whole, and who holds such ones together."""
        parts = frozenset() if self.weights is None else self.weights.everywhere
        whole = {name: p for name, p in self._own_parameters.items() if name not in parts}
        shared = {name: owners for name, owners in self._replicated.items() if name not in parts}
        return whole, shared

    def _carry(self, *, with_output: bool, training: bool) -> Traces:
        """Brings what the tail left on the last stage's rank to all ranks."""
        assert self.schedule is not None
        last = self.schedule.stage_to_rank[-1]
        is_last = self.ranks.position == last
        traces: Traces | None = None
        if is_last:
            traces = replace(self.tail.finish(), told=self._guards.tell())
        if traces is not None and training and self.ranks.copies is not None:
            totals = self.copies.told("weighs the losses of a step", self.tail.total)
            traces = self.tail.among_copies(traces, totals)
        if self.ranks.num_positions > 1:
            sent = traces.without_output() if traces is not None and not with_output else traces
            received = self._hand_out(sent, last)
            traces = traces if is_last else received
        assert traces is not None
        warning = self._guards.hear(traces.told)
        if warning is not None and self.ranks.is_first:
            warnings.warn(warning, stacklevel=2)
        self.tail.apply(traces, is_last=is_last)
        return traces
