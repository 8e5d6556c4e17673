"""Where a step is cut: traced, decided, laid over the ranks, and known again for the next batch."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.activations import units_to_run_again
from lightning_pipe.conditions import Conditions
from lightning_pipe.cuts import Cuts
from lightning_pipe.decide import decide
from lightning_pipe.home import (
    CutStep,
    Home,
    refuse_strangers,
    whole_as_fakes,
)
from lightning_pipe.layout import Layout
from lightning_pipe.placing import cut_step
from lightning_pipe.planned import make_plan, predict_step
from lightning_pipe.planning.plan import Plan
from lightning_pipe.planning.profile import Profile
from lightning_pipe.preflight import told_of
from lightning_pipe.replicas import Reduction
from lightning_pipe.runtime import share
from lightning_pipe.runtime.accelerator import total_memory
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.shards import ShardedWeights
from lightning_pipe.sameness import refuse_other_stages, same_on_all, see_together, text_of_trace
from lightning_pipe.sharding import shard_weights
from lightning_pipe.split.again import repeatable_calls
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.batchnorm import batch_norms, least_rows
from lightning_pipe.split.blueprint import Blueprint
from lightning_pipe.split.compiled import CompiledUnits
from lightning_pipe.split.copies import copied_names, find_copies, other_names
from lightning_pipe.split.ends import Skipped
from lightning_pipe.split.memo import SharedOutcomes, UnitMemo
from lightning_pipe.split.nest import describe
from lightning_pipe.split.ownership import Ownership, parameters_of_stages, read_by_stages
from lightning_pipe.split.parted import held_numbers
from lightning_pipe.split.patching import attributes
from lightning_pipe.split.paths import Answers, Paths
from lightning_pipe.split.profile import optimizer_state_bytes, profile_of
from lightning_pipe.split.rng import Salts, mix
from lightning_pipe.split.rows import Pieces, count_rows, has_rows, split_batch, unused_rules
from lightning_pipe.split.scout import find_way
from lightning_pipe.split.signature import signature
from lightning_pipe.split.trace import Trace
from lightning_pipe.tail.loggers import silenced_loggers
from lightning_pipe.tail.losses import need_loss
from lightning_pipe.ways import Ways, look_around, more_parameters
from lightning_pipe.work import Context, noted


class PipelineCuts:
    """The part of a pipeline that finds the cut of every step.

    Args:
        module: The user's LightningModule.
        layout: What was asked for.
        ranks: This rank.
        device: Where its stages live.
        context: The precision context of a step, by its name.
        reduction: How gradients are reduced over the copies.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        ranks: Ranks,
        device: torch.device,
        *,
        context: Context,
        reduction: Reduction | None = None,
    ) -> None:
        self.module = module
        self.layout = layout
        self.ranks = ranks
        self.device = device
        #: as the planner sees the training step, once it is cut
        self.profile: Profile | None = None
        #: calls of it that run again for their backward
        self.again: frozenset[int] = frozenset()
        #: of the run, once they are made: the plan counts their state
        self.optimizers: Sequence[Optimizer] = ()
        #: of weights that are not there before the first cut
        self.blueprint: Blueprint | None = None
        self.conditions = Conditions(module, ranks)
        self._context = context
        compiled = CompiledUnits(layout.compile, deferred=layout.batchnorm == "deferred")
        self._cuts = Cuts(module, ranks.position, device.type, compiled)
        self._reduction = reduction or Reduction()
        self._ways = Ways()
        self._home: Home | None = None
        self._known: dict[str, nn.Parameter] = {}
        self._shared = SharedOutcomes()
        self._plan: Plan | None = None
        self._read: frozenset[str] = frozenset()
        #: the weights of this rank, if each copy holds a part of them
        self.weights: ShardedWeights | None = None

    @property
    def home(self) -> Home:
        """Where the weights are."""
        assert self._home is not None, "the module has not been cut yet"
        return self._home

    @property
    def plan(self) -> Plan | None:
        """What was planned at the first cut."""
        return self._plan

    def cut(self, name: str, args: tuple[Any, ...], *, training: bool) -> None:
        """Traces a step on a first batch, decides the stages and drops the weights of other ranks.

        All copies of the pipeline are cut on the batch of the first one, and so alike.

        Raises:
            CutError: The step cannot be cut, or the ranks saw different steps.
            ConfigError: Weights on the meta device that nothing gives a value.
        """
        if self.ranks.copies is not None:
            with at(self.ranks.copies, "cuts the model on its first batch"):
                what = "the first batch"
                first = share.broadcast_object(self.ranks.copies, args[0], 0, what=what)
            args = (first, *args[1:])
        with nullcontext() if self.blueprint is None else self.blueprint.unguarded(self.module):
            self._cut(name, args, training=training)
        for others in self.ranks.others:
            refuse_other_stages(self.home, others)
        if self.blueprint is not None:
            self.blueprint.finish()
            self.blueprint = None
        if training and self._reduction.is_sharded:
            self._shard_weights()

    def _shard_weights(self) -> None:
        self.weights = shard_weights(
            self.module, self.home, self._read, self.ranks, self.device, self._reduction
        )
        if self.weights is not None:
            self._known = dict(self.module.named_parameters())
            originals = self.weights.originals
            self.conditions.whole_of = {
                id(shard): originals[name] for name, shard in self.weights.shards.items()
            }
            self.conditions.settle()

    def whole_weights(self) -> AbstractContextManager[None]:
        """For a trace: what this rank holds parts of has the right shapes."""
        return nullcontext() if self.weights is None else self.weights.as_fakes(self.device)

    def _cut(self, name: str, args: tuple[Any, ...], *, training: bool) -> None:
        seen = signature(args[0])
        self.conditions.meet("traces its first step", args[0], seen, self.layout.num_microbatches)
        self._check_rules(args[0])
        pieces = self._split(args[0])
        piece = pieces.batches[0]
        paths = self._look(name, piece, args[1:], training=training)
        trace = paths.best
        profile = self._profile(trace, pieces.rows[0], training=training)
        self.profile = profile if training else None
        memory = self._least_memory()
        self.layout, reasons = decide(self.layout, profile, len(pieces.batches), memory)
        cut = cut_step(self.layout, trace, profile, len(pieces.batches))
        units: dict[str, frozenset[int]] = cut.stages_of_units()
        also: list[frozenset[str]] = []
        if paths.vary:
            units = paths.homes(units)
            also = more_parameters(self.module, paths, units, cut)
        self._read = read = frozenset().union(*read_by_stages(self.module, cut), *also)
        copies = find_copies(self.module, read)
        held = parameters_of_stages(self.module, cut, also)
        stage_to_rank = self.layout.stage_to_rank()
        own = [s for s, rank in enumerate(stage_to_rank) if rank == self.ranks.position]
        ownership = Ownership(self.module, frozenset().union(*(held[s] for s in own)))
        units |= {name: units[unit] for name, unit in copied_names(units, copies).items()}
        units |= other_names(self.module, units)
        trace.keep_whole |= copied_names(trace.keep_whole, copies).keys()
        trace.open_up |= copied_names(trace.open_up, copies).keys()
        sizes = {
            name: (p.numel(), held_numbers(p) * p.element_size())
            for name, p in self.module.named_parameters()
        }
        starts = tuple(cut.first_call(stage) for stage in range(cut.num_stages))
        again = frozenset[str]()
        if training:
            schedule = self.layout.make(len(pieces.batches))
            again = units_to_run_again(self.layout, self.module, cut, profile, schedule, memory)
        self.again = calls = repeatable_calls(trace, again)
        count = len(pieces.batches)
        self._plan = make_plan(
            self.layout,
            trace,
            cut,
            held,
            profile,
            sizes=sizes,
            num_microbatches=count,
            prediction=predict_step(self.layout, profile, starts, count, calls)
            if training and trace.calls
            else None,
            again=calls,
            reasons=reasons,
        )
        self._home = Home(
            cut,
            starts,
            stage_to_rank,
            held,
            units,
            ownership,
            again,
        )
        ownership.drop_foreign(self.device)
        self.conditions.settle()
        self._known = dict(self.module.named_parameters())
        self._ways.note((name, training), trace)
        if paths.vary and (paths.best.draws or paths.instead):
            self._ways.varies((name, training))
        else:
            state = self._state_key(name, training=training)
            self._cuts.first(state, signature(piece), self._home)

    def _look(self, name: str, piece: Any, rest: tuple[Any, ...], *, training: bool) -> Paths:
        """Traces the first step, and its other ways if what it draws or asks may decide on them."""

        def look() -> Paths:
            absent = self.blueprint is not None
            with whole_as_fakes(self.module, self.device, is_absent=absent):
                trace = partial(self._trace, name, piece, rest, training=training)
                first = trace()
                paths = Paths(first, seen=[first])
                if first.batch_reads or (first.draws and self.layout.num_stages > 1):
                    paths = look_around(self.module, first, self._cuts.memo, trace)
            return paths

        return see_together(self.ranks, self._shared, look, Paths.digest_text)

    def _least_memory(self) -> int:
        """Bytes of the smallest rank: all have to decide the same. On the CPU the ranks share."""
        sharers = self.ranks.world_size if self.device.type == "cpu" else 1
        return min(share.gather_everywhere(self.ranks, total_memory(self.device) // sharers))

    def _profile(self, trace: Trace, rows: int, *, training: bool) -> Profile:
        """What the planner is told, with the state of the optimizer that trains."""
        state: dict[str, int] = {}
        if training:
            for optimizer in self.optimizers:
                state |= optimizer_state_bytes(self.module, optimizer)
        if self._reduction.is_sharded:
            copies = self.ranks.data_parallel_size
            state = {name: -(-num_bytes // copies) for name, num_bytes in state.items()}
        found = profile_of(self.module, trace, rows=rows, optimizer_bytes=state)
        costs = self.layout.costs if training else None
        return found if costs is None else found.with_costs(costs)

    def _trace(
        self,
        name: str,
        piece: Any,
        rest: tuple[Any, ...],
        *,
        training: bool,
        memo: UnitMemo | None = None,
        like: Trace | None = None,
        key: int = 0,
        salts: Salts | None = None,
        instead: Answers | None = None,
    ) -> Trace:
        step = getattr(self.module, name)
        if self._home is not None:
            like = self._home.cut.trace

        def traced(batch: Any) -> Any:
            value = step(batch, *rest)
            if training and value is None:
                raise Skipped
            if training:
                need_loss(value)
            return value

        with (
            torch.set_grad_enabled(training),
            self._context(name),
            noted(name, piece),
            self.whole_weights(),
        ):
            found = trace_step(
                self.module,
                traced,
                piece,
                num_stages=self.layout.num_stages,
                device_type=self.device.type,
                key=key,
                salts=salts,
                like=like,
                memo=memo,
                silenced=partial(silenced_loggers, self.module),
                shared=self._shared,
                instead=instead,
            )
        if training and self._home is not None:
            refuse_strangers(self.module, found, self._known)
        return found

    def _cut_for(
        self, state: tuple[str, bool, Any], piece: Any, rest: tuple[Any, ...], *, training: bool
    ) -> CutStep:
        """The cut of a step for one batch structure; a new one costs at most one trace."""

        def trace(memo: UnitMemo | None) -> Trace:
            found = see_together(
                self.ranks,
                self._shared,
                partial(self._trace, state[0], piece, rest, training=training, memo=memo),
                text_of_trace,
            )
            self._ways.note(state[:2], found)
            return found

        def agree(derived: CutStep | None) -> bool:
            told = "" if derived is None else repr(told_of([derived]))
            return same_on_all(self.ranks, told)

        return self._cuts.get(state, signature(piece), self.home, trace, self._ways, agree)

    def _own_ways(
        self,
        state: tuple[str, bool, Any],
        pieces: Pieces,
        rest: tuple[Any, ...],
        key: int,
        *,
        training: bool,
    ) -> list[CutStep]:
        """The cut of each micro-batch along the way that its random numbers decide on."""

        def look() -> list[CutStep]:
            cuts: list[CutStep] = []
            for number, piece in enumerate(pieces.batches):
                trace = partial(
                    self._trace, state[0], piece, rest, training=training, key=mix(key, number)
                )
                way = self._find_way(state[0], piece, rest, mix(key, number), training=training)
                cuts.append(self._cuts.along(way, state, signature(piece), self.home, trace))
            return cuts

        def text_of(cuts: list[CutStep]) -> str:
            return repr([(cut.way, cut.unproven is not None) for cut in cuts])

        return see_together(self.ranks, self._shared, look, text_of)

    def _find_way(
        self, name: str, piece: Any, rest: tuple[Any, ...], key: int, *, training: bool
    ) -> Hashable | None:
        step = getattr(self.module, name)
        silent = attributes(silenced_loggers(self.module, lambda _: None))
        with (
            torch.set_grad_enabled(training),
            self._context(name),
            silent,
            self.whole_weights(),
        ):
            return find_way(
                self.module,
                self.home.cut.trace,
                self._cuts.memo,
                lambda batch: step(batch, *rest),
                piece,
                key=key,
                device_type=self.device.type,
                generators=self._cuts.generators,
            )

    def _state_key(self, name: str, *, training: bool) -> tuple[str, bool, Any]:
        """What a trace depends on besides its batch: modules in train or eval mode, frozen
        weights, and which modules and weights there are."""
        return name, training, self.conditions.key()

    def _split(self, batch: Any) -> Pieces:
        rules = self.layout.split_batch
        if self.layout.num_microbatches == 1 and not has_rows(batch):
            return Pieces((batch,), (1,))
        rows = count_rows(batch, rules)
        wanted = self.layout.microbatches_for(rows, least_rows(self._batch_norms))
        return split_batch(batch, wanted, rules)

    def _check_rules(self, batch: Any) -> None:
        unused = unused_rules(batch, self.layout.split_batch)
        if unused and self.ranks.is_first:
            warnings.warn(
                f"split_batch has rules for {unused}, but nothing in the first batch has such a "
                f"name: it is {describe(batch)}",
                stacklevel=2,
            )

    @cached_property
    def _batch_norms(self) -> list[tuple[str, nn.Module]]:
        return batch_norms(self.module)
