"""Randomness that does not depend on the cut.

Every stage re-runs the user's step, but only some of its units; a plain generator would therefore
stand elsewhere on each stage. Here every place that may draw has a seed of its own, made from the
micro-batch's key and the place: all stages, all schedules and all ``P`` and ``V`` draw the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pipe.split.tree import tensors

_MASK = (1 << 63) - 1


def mix(*parts: int) -> int:
    """Hash integers into one seed in ``[0, 2**63)`` (the finaliser of splitmix64, Steele et al.
    2014)."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


#: generators with a state of their own, beside the global ones
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def generators_of(root: nn.Module) -> tuple[Generator, ...]:
    """Find the generators that the modules below ``root`` keep, in attributes or in containers
    there."""
    found: dict[int, Generator] = {}
    for module in root.modules():
        for value in list(vars(module).values()):
            items: Iterable[Any] = (value,)
            if isinstance(value, dict):
                items = value.values()
            elif isinstance(value, (list, tuple)):
                items = value
            found.update((id(item), item) for item in items if isinstance(item, _KINDS))
    return tuple(found.values())


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state()
        if isinstance(generator, np.random.RandomState)
        else generator.getstate()
    )


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


#: number of unit calls so far to a number that changes the seeds from there to the next call
Salts = Mapping[int, int]


class KeyedRandom:
    """Seeds torch (CPU and the accelerator in use), Python and NumPy for one place of a step.

    Args:
        key: The micro-batch's key; equal on every stage of a pipeline.
        device_type: ``"cpu"``, ``"cuda"``, ... of the stage.
        generators: Other generators that the step may draw from.
        salts: Other seeds between some calls, to see what the step does with other numbers there.
        watch: Remember how the generators of Python and NumPy stood, for :meth:`moved`.
    """

    def __init__(
        self,
        key: int,
        device_type: str = "cpu",
        generators: Sequence[Generator] = (),
        *,
        salts: Salts | None = None,
        watch: bool = False,
    ) -> None:
        self._key = key
        self._generators = generators
        self._salts = salts or {}
        self._watch = watch
        self._stood: Any = None
        self._module = getattr(torch, device_type) if device_type != "cpu" else None

    def at(self, *place: int) -> None:
        """Seed all generators for ``place``."""
        seed = mix(self._key, *place)
        if self._salts and place[1:] != (1,):
            segment = place[0] + 1 if place[1:] == (2,) else place[0]
            seed = mix(seed, self._salts[segment]) if segment in self._salts else seed
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        for index, generator in enumerate(self._generators):
            _seed(generator, mix(seed, index))
        if self._watch:
            self._stood = self._stand()

    def moved(self) -> bool:
        """Tell whether Python or NumPy drew since the last seed; torch's draws are operators."""
        return bool(self._stand() != self._stood)

    def _stand(self) -> list[Any]:
        others = [g for g in self._generators if not isinstance(g, torch.Generator)]
        state: Any = np.random.get_state()
        numpy_state = (state[1].tobytes(), *state[2:])
        return [random.getstate(), numpy_state, *(repr(_state(g)) for g in others)]


@contextmanager
def preserved(device_type: str = "cpu", generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Put all global generators, and those given, back on exit: a step must not move the user's
    random streams."""
    torch_state = torch.get_rng_state()
    module = getattr(torch, device_type) if device_type != "cpu" else None
    device_state = module.get_rng_state() if module is not None else None
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    states = [_state(generator) for generator in generators]
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if module is not None:
            module.set_rng_state(device_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for generator, state in zip(generators, states, strict=True):
            _set_state(generator, state)


def is_draw(operator: Any) -> bool:
    """Tell whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where a generator stood before an operation drew from it.

    Attributes:
        device: Of the generator.
        state: Of it.
    """

    device: torch.device
    state: torch.Tensor

    @classmethod
    def before(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Drawn | None:
        """Note where the generator of an operation stands; None for one that does not draw."""
        if not is_draw(func):
            return None
        own = kwargs.get("generator")
        if own is not None:
            return cls(own.device, own.get_state())
        device = next((t.device for t in tensors((args, kwargs))), None)
        device = torch.device(device or kwargs.get("device") or "cpu")
        if device.type == "meta":
            return None
        return cls(device, _global(device).get_rng_state(*_index(device)))


@contextmanager
def again(drawn: Drawn | None, kwargs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Let an operation draw what it drew before; yield its keyword arguments."""
    if drawn is None:
        yield kwargs
        return
    if kwargs.get("generator") is not None:
        generator = torch.Generator(drawn.device)
        generator.set_state(drawn.state)
        yield {**kwargs, "generator": generator}
        return
    module, index = _global(drawn.device), _index(drawn.device)
    now = module.get_rng_state(*index)
    module.set_rng_state(drawn.state, *index)
    try:
        yield kwargs
    finally:
        module.set_rng_state(now, *index)


def _global(device: torch.device) -> Any:
    return torch if device.type == "cpu" else getattr(torch, device.type)


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)
