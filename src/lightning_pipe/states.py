"""The whole model's state out of the ranks' parts, and back: weights, buffers, optimizer state.

All functions that take `ranks` are called by all ranks of a pipeline together.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipe.errors import CutError
from lightning_pipe.home import Home
from lightning_pipe.runtime import share
from lightning_pipe.runtime.checkpoint import gather_state
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks
from lightning_pipe.runtime.shards import own_part, whole_tensor
from lightning_pipe.split.blueprint import Blueprint
from lightning_pipe.split.nest import copy_tensors
from lightning_pipe.split.ownership import parameter_names
from lightning_pipe.split.parted import held_numbers, is_parted, part_of
from lightning_pipe.split.tree import map_tensors
from lightning_pipe.steps import Pipeline


class SpreadModel:
    """A module whose weights are on several ranks, and its optimizers: state out and back.

    Everything here but `holds` is called by all ranks together.

    Args:
        pipeline: Not cut yet.
        optimizers: They hold all parameters; the cut takes those of other ranks out of them.
    """

    def __init__(self, pipeline: Pipeline, optimizers: Sequence[Optimizer]) -> None:
        self.is_spread = False
        self._has_home = False
        self._pipeline = pipeline
        self._module = pipeline.module
        self._ranks = pipeline.ranks
        self._optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in optimizers]
        self._names: dict[int, str] = {}
        self._mode = "all"

    def cut(self, name: str, args: tuple[Any, ...], *, training: bool) -> None:
        """Cuts the module on the first batch of a step."""
        originals = dict(self._module.named_parameters())
        self._pipeline.cut(name, args, training=training)
        self._home = self._pipeline.home
        current = dict(self._module.named_parameters())
        self._names = {id(p): n for n, p in current.items()}
        self._part_states()
        self._swap({id(p): current[n] for n, p in originals.items() if p is not current[n]})
        self._buffers = BufferWatch(self._module)
        self.is_spread = self._has_home = True

    def _part_states(self) -> None:
        """State that was loaded before the cut is taken apart as its weights are."""
        weights = self._pipeline.weights
        if weights is None:
            return
        shards = weights.shards
        for optimizer in self._optimizers:
            for name, original in weights.originals.items():
                if original in optimizer.state:
                    entry = optimizer.state[original]
                    optimizer.state[shards[name]] = self._parts_of(shards[name], entry)

    @property
    def has_optimizers(self) -> bool:
        """Whether the state of optimizers is spread too; it stays so when the weights are whole."""
        return self._has_home and bool(self._optimizers)

    def holds(self, module: nn.Module) -> bool:
        """Whether weights of this very module are still on other ranks."""
        return self.is_spread and module is self._module

    def watch_buffers(self) -> None:
        """Starts to watch buffers again, where they are now."""
        self._buffers = BufferWatch(self._module)

    def state_dict(self) -> dict[str, Any]:
        """The whole model under its own names on global rank 0; elsewhere with fakes."""
        with self._resting():
            own = self._own_whole()
            if self._ranks.is_spare:  # another process has the same
                return self._module.state_dict()
            return self._gathered_state_dict(own)

    def _gathered_state_dict(self, own: dict[str, Tensor]) -> dict[str, Any]:
        with at(self._ranks, "gathers the weights of the model"):
            buffers = gather_buffers(self._buffers, self._home, self._ranks)
            values = own | gather_parameters(
                self._module, self._home, self._ranks, everywhere=False, own=own
            )
        if not self._ranks.is_first:
            return self._module.state_dict()
        with whole(self._module, values, buffers):
            return self._module.state_dict()

    def written_state_dict(self) -> dict[str, Any]:
        """This rank's part of the model's state; those of all ranks make up the whole, in order."""
        with at(self._ranks, "gathers buffers of the model"):
            buffers = gather_buffers(self._buffers, self._home, self._ranks)
        with self._resting(), whole(self._module, {}, buffers):
            state = self._module.state_dict()
        known = parameter_names(self._module)
        first = {name: first for first, names in known.items() for name in names}
        return {name: value for name, value in state.items() if self._writes(first.get(name, ""))}

    def _resting(self) -> AbstractContextManager[None]:
        weights = self._pipeline.weights
        return nullcontext() if weights is None else weights.resting()

    def _own_whole(self) -> dict[str, Tensor]:
        """The weights of which this rank holds parts, on the host of the process that saves."""
        found: dict[str, Tensor] = {}
        if not self._is_parted:
            return found
        sharers = self._ranks.sharers
        parameters = dict(self._module.named_parameters())
        with self._with_sharers("gathers the parts of weights"):
            for name, parameter in parameters.items():
                if is_parted(parameter) and name in self._home.ownership.keep:
                    value = whole_tensor(parameter, sharers)
                    if not self._ranks.is_spare:
                        found[name] = value.detach().cpu()
        return found

    @property
    def _is_parted(self) -> bool:
        """Whether weights are in parts, of which other processes may hold the others."""
        if self._pipeline.weights is not None or self._ranks.tensor is not None:
            return True
        return any(is_parted(parameter) for parameter in self._module.parameters())

    def _with_sharers(self, place: str) -> AbstractContextManager[None]:
        sharers = self._ranks.sharers
        return nullcontext() if sharers is None else at(sharers, place)

    def _writes(self, name: str) -> bool:
        """Whether this rank writes a parameter; what belongs to no stage, the first rank writes."""
        return self._ranks.position == _writer(name, self._home, self._ranks)

    def written_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the optimizer's state, numbered as on one device."""
        state = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        own = {
            index: entry
            for index, entry in state["state"].items()
            if (
                self._writes(self._names.get(id(parameters[index]), ""))
                if isinstance(index, int)
                else self._ranks.is_first
            )
        }
        return {**state, "state": own}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state, numbered as on one device, on global rank 0."""
        state = optimizer.state_dict()
        if self._is_parted:
            whole = partial(whole_tensor, sharers=self._ranks.sharers)
            with self._with_sharers("gathers the parts of the optimizer's state"):
                state["state"] = map_tensors(whole, state["state"])
        if self._ranks.is_spare:
            return state
        with at(self._ranks, "gathers the state of the optimizer"):
            return gather_optimizer_state(optimizer, state, self._names, self._home, self._ranks)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Gives an optimizer the part of a whole state that belongs to this rank."""
        own = own_optimizer_state(optimizer, state, self._names, self._home)
        if self._is_parted:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, entry in own["state"].items():
                if isinstance(index, int) and isinstance(parameters[index], DTensor):
                    own["state"][index] = self._parts_of(parameters[index], entry)
        optimizer.load_state_dict(own)

    def _parts_of(self, shard: Tensor, entry: Any) -> Any:
        """Of the whole state of a parameter, what this copy holds; other shapes stay whole."""
        weights = self._pipeline.weights
        name = self._names[id(shard)]

        def part(value: Tensor) -> Tensor:
            if not value.ndim:
                return value
            is_whole = value.shape != shard.shape
            if weights is None:
                return value if is_whole else own_part(shard, value)
            return weights.part(name, value, is_whole=is_whole)

        return map_tensors(part, entry)

    def restore(self, mode: str, num_processes: int = 1) -> None:
        """Brings weights of other ranks back into the very parameters that they were taken from.

        Args:
            mode: To "all" ranks, to "rank_zero", to "none", or "auto": to all if they fit.
            num_processes: Processes of this machine, which share its memory.
        """
        with at(self._ranks, "makes the model whole at the end"):
            self._restore(mode, num_processes)

    def _restore(self, mode: str, num_processes: int) -> None:
        self._join_parts()
        if mode == "auto":
            mode = "all" if self._fits(num_processes) else "rank_zero"
        self._mode = mode
        if mode == "none" or not self.is_spread:
            return
        buffers = gather_buffers(self._buffers, self._home, self._ranks)
        everywhere = mode == "all"
        values = gather_parameters(self._module, self._home, self._ranks, everywhere=everywhere)
        if everywhere or self._ranks.is_first:
            self._put_back(values)
            set_buffers(self._module, buffers)
        self.is_spread = not everywhere

    def _join_parts(self) -> None:
        """This rank holds all of its weights again, and of their optimizer state."""
        weights, self._pipeline.weights = self._pipeline.weights, None
        if weights is None:
            return
        assert self._ranks.copies is not None
        joined = partial(whole_tensor, sharers=self._ranks.copies)
        for optimizer in self._optimizers:
            for shard in weights.shards.values():
                if shard in optimizer.state:
                    optimizer.state[shard] = map_tensors(joined, optimizer.state[shard])
        replaced = weights.restore()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) in replaced:
                        whole = group["params"][place] = replaced[id(parameter)]
                        if parameter in optimizer.state:
                            optimizer.state[whole] = optimizer.state.pop(parameter)
        self._names = {id(p): n for n, p in self._module.named_parameters()}

    def make_whole(self) -> None:
        """Before another run: all ranks hold parameters again; the first one's values count."""
        if self._mode == "none":
            self.restore("all")
        elif self.is_spread and not self._ranks.is_first:
            foreign = {n: self._module.get_parameter(n) for n in self._home.ownership.foreign}
            empty = {n: part_of(p).shape for n, p in foreign.items()}
            self._put_back({n: torch.empty(s, dtype=foreign[n].dtype) for n, s in empty.items()})
        self.is_spread = False

    def _fits(self, num_processes: int) -> bool:
        """Whether each process of every machine can hold the whole model."""
        num_bytes = sum(held_numbers(p) * p.element_size() for p in self._module.parameters())
        fits = num_bytes * num_processes < 0.5 * psutil.virtual_memory().available
        return all(share.gather_objects(self._ranks, fits) or ())

    def _put_back(self, values: Mapping[str, Tensor]) -> None:
        ownership = self._home.ownership
        originals = ownership.fakes_to_originals()
        ownership.restore(values)
        self._swap(originals)

    def _swap(self, replacements: Mapping[int, nn.Parameter]) -> None:
        for optimizer in self._optimizers:
            swap_parameters(optimizer, replacements)
        self._names = {id(p): n for n, p in self._module.named_parameters()}


def share_initial_state(
    module: nn.Module, ranks: Ranks, blueprint: Blueprint | None = None
) -> None:
    """Gives every rank the parameters and buffers of global rank 0, tensor by tensor.

    Equal to what a rank has if the model was built from a seed; scripts need not seed. Weights that
    a blueprint makes are the same on all ranks already.

    Raises:
        CutError: The blueprints are not the same.
    """
    if blueprint is not None:
        _refuse_other_weights(blueprint, ranks)
    seen: set[int] = set()
    for tensor in [*module.parameters(), *module.buffers()]:
        is_made = blueprint is not None and blueprint.is_cold(tensor)
        if id(tensor) not in seen and not is_made:
            seen.add(id(tensor))
            own = part_of(tensor)
            is_part = isinstance(tensor, DTensor)
            received = share.broadcast_everywhere(ranks, own.detach(), of_part=is_part)
            if ranks.global_rank:
                with torch.no_grad():
                    own.copy_(received)


def _refuse_other_weights(blueprint: Blueprint, ranks: Ranks) -> None:
    """Refuses blueprints that differ. Those of the parts of a weight do, by which part it is: these
    have to have drawn the same random numbers."""
    is_shared = ranks.tensor is not None
    drawn = zlib.crc32(torch.get_rng_state().numpy().tobytes()) if is_shared else 0
    told = share.gather_everywhere(ranks, (ranks.tensor_parallel_rank, blueprint.digest, drawn))
    recipes = {(part, digest) for part, digest, _ in told}
    if len(recipes) > ranks.axes.tensor_parallel or len({number for *_, number in told}) > 1:
        raise CutError(
            "configure_model builds other weights on one rank than on another. Build the same "
            "model on every rank: nothing in it may depend on the rank, or on random numbers that "
            "are not torch's and not seeded"
        )


_SMALL = 1 << 16  # numbers in a buffer that is compared


class BufferWatch:
    """Knows which buffers were written since the cut: only those are carried.

    A kernel may write one without a trace, as `F.batch_norm` does with the running statistics:
    small ones are compared, and a module that has written one buffer is taken to have written all.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            name: (b, b._version, b.detach().clone() if b.numel() <= _SMALL else None)
            for name, b in module.named_buffers()
        }

    def changed(self, home: Home, position: int) -> dict[str, Tensor]:
        """Buffers that this rank owns and has written."""
        buffers = dict(self._module.named_buffers())
        owners = {n.rpartition(".")[0] for n, b in buffers.items() if self._is_written(n, b)}
        return {
            name: buffer.detach()
            for name, buffer in buffers.items()
            if name.rpartition(".")[0] in owners and home.owner_of_buffer(name) == position
        }

    def _is_written(self, name: str, buffer: Tensor) -> bool:
        known, version, content = self._before.get(name, (None, -1, None))
        if buffer is not known or buffer._version != version:
            return True
        return content is not None and not torch.equal(buffer, content)


def gather_buffers(watch: BufferWatch, home: Home, ranks: Ranks) -> dict[str, Tensor]:
    """The buffers that any rank has written, on all ranks."""
    parts = share.gather_objects(ranks, watch.changed(home, ranks.position)) or []
    return {name: value for part in parts for name, value in part.items()}


def gather_parameters(
    module: nn.Module,
    home: Home,
    ranks: Ranks,
    *,
    everywhere: bool,
    own: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The parameters that this rank does not hold, on the host, tensor by tensor.

    Args:
        module: The user's module, cut.
        home: Where the weights are.
        ranks: This rank.
        everywhere: To all ranks; else to the first only, and the others get none.
        own: Values of this rank's parameters, where it holds parts of them.
    """
    own = own or {}
    keep = home.ownership.keep
    # those that a hook has added since the cut are on every rank
    known = (name for name in parameter_names(module) if home.owners(name))
    owner_of = {name: home.owners(name)[0] for name in known}
    local = {n: own[n] if n in own else part_of(module.get_parameter(n)).detach() for n in keep}
    if not everywhere:
        found = gather_state(ranks, local, owner_of) or {}
        return {name: value for name, value in found.items() if name not in keep}
    found = {}
    for name, owner in owner_of.items():
        value = share.broadcast_object(ranks, local.get(name), owner)
        if name not in keep:
            found[name] = value.cpu()
    return found


@contextmanager
def whole(
    module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[None]:
    """Puts values in the place of fakes and stale buffers for a while, so `state_dict()` is
    complete."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    names = parameter_names(module)
    try:
        for name, value in parameters.items():
            stand_in = nn.Parameter(value, requires_grad=False)
            for alias in names[name]:
                owner, _, key = alias.rpartition(".")
                space = module.get_submodule(owner)._parameters
                saved.append((space, key, space[key]))
                space[key] = stand_in
        for name, value in buffers.items():
            owner, _, key = name.rpartition(".")
            held = module.get_submodule(owner)._buffers
            saved.append((held, key, held[key]))
            held[key] = value
        yield
    finally:
        for space, key, value in reversed(saved):  # a module with two names was set twice
            space[key] = value


def set_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Takes over buffers that other ranks have written."""
    for name, value in buffers.items():
        owner, _, key = name.rpartition(".")
        space = module.get_submodule(owner)._buffers
        held = space[key]
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            with torch.no_grad():
                held.copy_(value)
        else:
            space[key] = value if held is None else value.to(held.device)


def swap_parameters(optimizer: Optimizer, replacements: Mapping[int, nn.Parameter]) -> None:
    """Puts other parameters in the places of some; state of those that leave is dropped."""
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            if id(parameter) in replacements:
                optimizer.state.pop(parameter, None)
                group["params"][place] = replacements[id(parameter)]


def gather_optimizer_state(
    optimizer: Optimizer,
    state: dict[str, Any],
    names: Mapping[int, str],
    home: Home,
    ranks: Ranks,
) -> dict[str, Any]:
    """The optimizer's state as on one device, on the first rank; this rank's part elsewhere.

    Args:
        optimizer: It holds all parameters, in the same order on every rank.
        state: Its state here.
        names: The first name of each parameter object, by id.
        home: Where the weights are.
        ranks: This rank.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owner_of = {}
    keys = share.gather_objects(ranks, list(state["state"])) or []
    for key in sorted(
        {k for part in keys for k in part}, key=lambda k: (not isinstance(k, int), k)
    ):
        name = names.get(id(parameters[key])) if isinstance(key, int) else None
        owner_of[key] = _writer(name or "", home, ranks)
    gathered = gather_state(ranks, state["state"], owner_of)
    return state if gathered is None else {**state, "state": gathered}


def _writer(name: str, home: Home, ranks: Ranks) -> int:
    """The position that gives a checkpoint what belongs to a parameter; without one, the first."""
    owners = home.owners(name)
    return owners[0] if owners else ranks.first_position


def own_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str], home: Home
) -> dict[str, Any]:
    """The part of a whole optimizer state that belongs to this rank's parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = {
        index: copy_tensors(entry)  # a checkpoint may be a file that is only mapped
        for index, entry in state["state"].items()
        if not isinstance(index, int) or names.get(id(parameters[index]), "") in home.ownership.keep
    }
    return {**state, "state": kept}
