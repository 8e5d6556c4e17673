"""Sharded data parallelism: between steps, each copy of a pipeline holds its part of the weights.

The parts, their gathering and the reduction of gradients are those of torch's `fully_shard`
(FSDP2); its hooks on modules are not used. A step runs on the very parameters that the user has
made: they are filled before a stage first needs them, in groups that are gathered ahead, and freed
when the step is over. So schedules, recomputation and backwards that are taken apart see ordinary
weights. Gradients are reduced once in an optimizer step, to the part of each copy.

Source: Zhao et al., "PyTorch FSDP", VLDB 2023; gathered for a whole step and reduced once, as in
"The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_pipe.runtime import _torch
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.ranks import Ranks, connected
from lightning_pipe.runtime.reduce import agreed_kinds, gather_values
from lightning_pipe.split._fake import empty_fake
from lightning_pipe.split.ownership import parameter_names
from lightning_pipe.split.parted import part_of
from lightning_pipe.split.stand_ins import RestingParameter, put_parameter


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Whether `fully_shard` takes a parameter: dense, of numbers with a point, in one piece."""
    return (
        parameter.layout == torch.strided
        and parameter.is_floating_point()
        and parameter.ndim > 0
        and parameter.numel() > 0
        and parameter.is_contiguous()
        and not isinstance(parameter, DTensor)
    )


def sparse_weights(root: nn.Module) -> frozenset[int]:
    """Ids of weights whose gradients are sparse, which cannot be scattered."""
    return frozenset(
        id(module.weight)
        for module in root.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    )


class ShardedWeights:
    """The weights of one position, of which each copy of the pipeline holds a part.

    Args:
        root: The user's module.
        groups: First names of the parameters that are gathered together, in the order in which a
            step needs them; those that cannot be sharded stay as they are.
        copies: This position in all copies.
        mesh: These, as a mesh of one dimension.
        reduce_dtype: What gradients are sent as, if not as they are.
        device: Where the parameters are used.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[Sequence[str]],
        copies: Ranks,
        mesh: DeviceMesh,
        reduce_dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._root = root
        self._copies = copies
        self._mesh = mesh
        self._names = parameter_names(root)
        sparse = sparse_weights(root)
        #: first names of all weights of the model that are sharded where they are, on other ranks
        #: too
        self.everywhere = frozenset(
            name
            for name, parameter in root.named_parameters()
            if can_be_sharded(parameter) and id(parameter) not in sparse
        )
        self._groups: list[_Group] = []
        for names in groups:
            found = {name: root.get_parameter(name) for name in names}
            kinds: dict[Any, dict[str, nn.Parameter]] = {}
            for name, parameter in found.items():
                if name in self.everywhere:
                    if device is not None:
                        parameter.data = parameter.data.to(device)
                    kinds.setdefault(parameter.dtype, {})[name] = parameter
            self._groups += [_Group(part) for part in kinds.values()]
        with connected(copies):
            self._sharded = _torch.Sharded(
                [list(group.originals.values()) for group in self._groups], mesh, reduce_dtype
            )
        for number, group in enumerate(self._groups):
            group.shards = dict(zip(group.originals, self._sharded.shards(number), strict=True))
            for name, original in group.originals.items():
                vars(group.shards[name]).update(vars(original))
                self._rest(group, name, torch.empty(0, dtype=original.dtype))

    @property
    def names(self) -> frozenset[str]:
        """First names of the parameters that are sharded."""
        return frozenset(name for group in self._groups for name in group.originals)

    @property
    def originals(self) -> dict[str, nn.Parameter]:
        """The user's own parameters, which have values within a step."""
        return {name: p for group in self._groups for name, p in group.originals.items()}

    @property
    def shards(self) -> dict[str, nn.Parameter]:
        """What is in their places between steps: `DTensor`s."""
        return {name: p for group in self._groups for name, p in group.shards.items()}

    # ------------------------------------------------------------------ a step

    def gather(self, wanted: Collection[str] | None = None) -> None:
        """Starts to gather the groups that have any of some parameters; None: all."""
        with connected(self._copies):
            for number, group in enumerate(self._groups):
                if wanted is None or not group.originals.keys().isdisjoint(wanted):
                    self._sharded.gather(number)
                    group.is_coming = True

    def need(self, names: Collection[str] | None = None) -> None:
        """Waits for what is being gathered of some parameters, or of all, and puts it in place."""
        for number, group in enumerate(self._groups):
            if not group.is_coming:
                continue
            if names is not None and group.originals.keys().isdisjoint(names):
                continue
            with connected(self._copies):
                values = self._sharded.wait(number)
            group.is_coming, group.is_there = False, True
            for (name, original), value in zip(group.originals.items(), values, strict=True):
                self._rise(group, name, value)
                group.versions[name] = original._version

    def free(self) -> None:
        """The step is over: puts the parts in place, and frees the rest.

        What was written to the user's parameters meanwhile is kept.
        """
        self.need()  # what no stage has asked for must not stay under way
        for number, group in enumerate(self._groups):
            if not group.is_there:
                continue
            for name, original in group.originals.items():
                shard = group.shards[name]
                shard.requires_grad_(original.requires_grad)
                if original._version != group.versions[name]:
                    with torch.no_grad():
                        shard.copy_(self.part(name, original.detach()))
            self._sharded.free(number)
            group.is_there = False
            for name in group.originals:
                self._rest(group, name)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Within it, each copy has its part, and no more."""
        there = [n for g in self._groups if g.is_there or g.is_coming for n in g.originals]
        self.free()
        yield
        if there:
            self.gather(there)
            self.need()

    @contextmanager
    def as_fakes(self, device: torch.device) -> Iterator[None]:
        """For a trace: parameters of the right shapes, without values."""
        at_rest = [group for group in self._groups if not group.is_there]
        for group in at_rest:
            for name, shard in group.shards.items():
                fake = empty_fake(tuple(shard.shape), shard.stride(), shard.dtype, device)
                self._put(name, nn.Parameter(fake, requires_grad=shard.requires_grad))
        try:
            yield
        finally:
            for group in at_rest:
                for name, shard in group.shards.items():
                    self._put(name, shard)

    def reduce(self) -> None:
        """Puts this copy's part of the mean gradients into `.grad` of the shards, and adds to it.

        What the user's parameters have accumulated is taken from them. A copy that has no gradient
        of a parameter counts as zero.
        """
        gradients = {name: original.grad for name, original in self.originals.items()}
        kinds = agreed_kinds(self._copies, gradients)
        taken: list[list[Tensor | None]] = []
        for group in self._groups:
            taken.append([])
            for name, original in group.originals.items():
                gradient, original.grad = original.grad, None
                if gradient is None and kinds[name]:
                    gradient = torch.zeros(
                        group.shards[name].shape, dtype=original.dtype, device=original.device
                    )
                elif gradient is not None and gradient.layout != torch.strided:
                    gradient = gradient.to_dense()
                taken[-1].append(gradient)
        with (
            at(self._copies, "reduces the gradients of a step to the parts of all copies"),
            connected(self._copies),
        ):
            self._sharded.reduce(taken)

    # ------------------------------------------------------------------ values

    def whole(self, name: str) -> Tensor:
        """The value of a parameter; all copies have to ask for it."""
        return whole_tensor(self.shards[name], self._copies)

    def part(self, name: str, value: Tensor, *, is_whole: bool = False) -> Tensor:
        """This copy's part of a value of the shape of a parameter; or all of one, beside parts."""
        shard: Any = self.shards[name]
        if not is_whole:
            return own_part(shard, value)
        value = value.to(shard.device)
        return distribute_tensor(value, self._mesh, [Replicate()], src_data_rank=None)

    def restore(self) -> dict[int, nn.Parameter]:
        """The end: the user's parameters are whole again.

        Returns:
            What has taken the place of each shard, by its id.
        """
        self.free()
        replaced: dict[int, nn.Parameter] = {}
        for group in self._groups:
            for name, original in group.originals.items():
                self._rise(group, name, self.whole(name))
                original.grad = None
                replaced[id(group.shards[name])] = original
        self._groups = []
        return replaced

    # ------------------------------------------------------------------ pieces

    def _rise(self, group: _Group, name: str, value: Tensor) -> None:
        """The user's parameter is itself again."""
        original = group.originals[name]
        original.__class__ = group.classes[name]
        vars(original).pop("stand_in", None)
        original.data = value
        original.requires_grad_(group.shards[name].requires_grad)
        self._put(name, original)

    def _rest(self, group: _Group, name: str, data: Tensor | None = None) -> None:
        """Whoever holds the user's parameter elsewhere uses the part, not nothing."""
        original = group.originals[name]
        if data is not None:
            original.grad = None
            original.data = data
        original.__class__ = RestingParameter
        vars(original)["stand_in"] = group.shards[name]
        self._put(name, group.shards[name])

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for alias in self._names[name]:
            module_name, _, attribute = alias.rpartition(".")
            put_parameter(self._root.get_submodule(module_name), attribute, parameter)


class _Group:
    """Parameters that are gathered together."""

    def __init__(self, originals: Mapping[str, nn.Parameter]) -> None:
        self.originals = dict(originals)
        self.classes = {name: type(parameter) for name, parameter in originals.items()}
        self.shards: dict[str, nn.Parameter] = {}
        self.versions: dict[str, int] = {}
        self.is_coming = self.is_there = False


def whole_tensor(value: Tensor, sharers: Ranks | None) -> Tensor:
    """A value of which several processes may hold parts; all of them have to ask for it.

    `DTensor.full_tensor` would do, but what torch remembers of an operation on such tensors has the
    groups in it of the first time, which may be those of a run that is over.

    Args:
        value: The value, or this process's part of it.
        sharers: The processes that hold the parts.
    """
    if not isinstance(value, DTensor):
        return value
    local: Tensor = part_of(value).detach()
    if value.device_mesh.size() == 1 or isinstance(value.placements[0], Replicate):
        return local
    assert sharers is not None, "a tensor that processes share has a mesh of several"
    return joined(gather_values(sharers, local), value)


def joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The whole that parts make up.

    Args:
        parts: Those of all processes, in order.
        like: A tensor that is laid out so.
    """
    assert isinstance(like, DTensor)
    (placement,) = like.placements
    if isinstance(placement, Shard):
        return torch.cat(list(parts), placement.dim)
    if isinstance(placement, Replicate):
        return parts[0]
    assert isinstance(placement, Partial), f"{placement}: checked before the run"
    return torch.stack(list(parts)).sum(0)


def own_part(like: Tensor, value: Tensor) -> Tensor:
    """This process's part of a value, laid out as a tensor of its shape is; nothing is sent."""
    assert isinstance(like, DTensor)
    with torch.no_grad():
        return distribute_tensor(
            value.detach().to(part_of(like).device),
            like.device_mesh,
            like.placements,
            src_data_rank=None,
        )


def laid_out_as(like: Tensor, value: Tensor) -> Tensor:
    """A gradient in the layout of its parameter: sums that are not complete are completed.

    All processes that hold parts have to call this.
    """
    if not (isinstance(value, DTensor) and isinstance(like, DTensor)):
        return value
    if value.placements == like.placements:
        return value
    made: Tensor = value.redistribute(placements=like.placements)
    return made


__all__ = [
    "ShardedWeights",
    "can_be_sharded",
    "joined",
    "laid_out_as",
    "own_part",
    "whole_tensor",
]
