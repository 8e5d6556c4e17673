"""Which parameters live on this rank; the others become fakes that cost no memory.

A fake parameter has the right shape, dtype and device, so summaries, weight-decay groups and fused
optimizers work; it has no gradient and no data, so a use that the trace missed is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_pipe.split._fake import (
    GHOSTS,
    as_fake,
    empty_fake,
    storage_key,
)
from lightning_pipe.split.copies import copied_names, find_copies
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.parted import is_parted, part_of, set_part
from lightning_pipe.split.stand_ins import ForeignParameter, put_parameter


def parameter_names(root: nn.Module) -> dict[str, tuple[str, ...]]:
    """Map the first name of every parameter to all its names (tied parameters have several)."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        names[known] = (*names.get(known, ()), name)
    return names


def read_by_stages(root: nn.Module, cut: StepCut) -> list[frozenset[str]]:
    """Return, for every stage, the first names of the parameters that it reads."""
    first = {id(p): n for n, p in root.named_parameters()}
    inside = {
        unit: frozenset(first[id(p)] for p in root.get_submodule(unit).parameters())
        for unit in cut.trace.unit_names
    }
    return [cut.parameters(stage, inside) for stage in range(cut.num_stages)]


def parameters_of_stages(
    root: nn.Module, cut: StepCut, also: Sequence[frozenset[str]] = ()
) -> tuple[frozenset[str], ...]:
    """Return, for every stage, the first names of the parameters that it holds.

    A parameter that several stages read is on each of them. One that the step never reads is where
    what it is a copy of is first; else on the last stage: evaluation code that uses it runs there.

    Args:
        root: The user's module.
        cut: The cut step.
        also: For every stage, what it reads on other ways through the step.
    """
    read = read_by_stages(root, cut)
    if also:
        read = [known | more for known, more in zip(read, also, strict=True)]
    held = list(read)
    names = parameter_names(root)
    copies = find_copies(root, frozenset().union(*read))
    for name, source in copied_names(names, copies).items():
        first = next((stage for stage, known in enumerate(read) if source in known), -1)
        if name in names:
            held[first] |= {name}
    held[-1] |= frozenset(names).difference(*held)
    return tuple(held)


class Ownership:
    """The parameters of ``root`` that this rank holds.

    Args:
        root: The user's module, whole.
        keep: First names of the parameters that stay.
    """

    def __init__(self, root: nn.Module, keep: frozenset[str]) -> None:
        self.root = root
        self.keep = keep
        self.names = parameter_names(root)
        self.foreign = tuple(n for n in self.names if n not in keep)
        self._originals: dict[str, nn.Parameter] = {}
        self._fakes: dict[str, nn.Parameter] = {}
        self._classes: dict[str, type[nn.Parameter]] = {}

    def drop_foreign(self, device: torch.device | None = None) -> None:
        """Replace every foreign parameter by a fake on ``device`` and free its memory.

        The parameter objects are kept, emptied: whoever holds one elsewhere uses the fake when they
        use it, and finds it filled again after :meth:`restore`.
        """
        for name in self.foreign:
            if name in self._originals:
                continue
            original = self.root.get_parameter(name)
            if is_parted(original):
                self._empty(name, original, device)
                continue
            data = original.detach()
            kind = type(original)
            fake = as_fake(data)
            if device is not None and fake.device != device:
                fake = empty_fake(tuple(data.shape), tuple(data.stride()), data.dtype, device)
            self._originals[name] = original
            self._fakes[name] = nn.Parameter(fake, requires_grad=original.requires_grad)
            original.grad = None
            original.data = torch.empty(0, dtype=data.dtype)
            original.__class__ = ForeignParameter
            vars(original)["stand_in"] = self._fakes[name]
            self._classes[name] = kind
            GHOSTS.names[storage_key(fake)] = name
            self._put(name, self._fakes[name])

    def _empty(self, name: str, original: nn.Parameter, device: torch.device | None) -> None:
        """Gives a parameter of which several processes hold parts a part without data."""
        part = part_of(original)
        fake = as_fake(part.detach())
        if device is not None and fake.device != device:
            fake = empty_fake(tuple(part.shape), tuple(part.stride()), part.dtype, device)
        self._originals[name] = self._fakes[name] = original
        self._classes[name] = type(original)
        original.grad = None
        set_part(original, fake)
        GHOSTS.names[storage_key(fake)] = name

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Fill foreign parameters with ``values`` (first name to tensor) and put them back.

        Names that are missing in ``values`` stay fakes.
        """
        for name in [n for n in self._originals if n in values]:
            original = self._originals.pop(name)
            fake = self._fakes.pop(name)
            GHOSTS.names.pop(storage_key(fake), None)
            if is_parted(original):
                set_part(original, values[name])
                del self._classes[name]
                continue
            original.__class__ = self._classes.pop(name)
            vars(original).pop("stand_in", None)
            original.data = values[name]
            original.requires_grad_(fake.requires_grad)
            self._put(name, original)

    def fakes_to_originals(self) -> dict[int, nn.Parameter]:
        """Map the id of every fake parameter to the emptied original; ask before
        :meth:`restore`."""
        return {id(fake): self._originals[name] for name, fake in self._fakes.items()}

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        for alias in self.names[name]:
            module_name, _, attribute = alias.rpartition(".")
            put_parameter(self.root.get_submodule(module_name), attribute, parameter)
