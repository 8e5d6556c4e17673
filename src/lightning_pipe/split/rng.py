"""Randomness that does not depend on the cut: seeds, states, and draws that nobody needs.

Every stage re-runs the user's step, but only some of its units; a plain generator would therefore
stand elsewhere on each stage. :mod:`lightning_pipe.split.streams` says which code draws from which
stream; here is how generators are seeded, saved and put back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from lightning_pipe.split.tree import tensors

_NOTHING: Mapping[str, Any] = {}
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
HostGenerator = np.random.Generator | np.random.RandomState | random.Random
Generator = torch.Generator | HostGenerator
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _seed(generator: HostGenerator, seed: int) -> None:
    if isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed & 0xFFFFFFFF)


def _state(generator: HostGenerator) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state()
        if isinstance(generator, np.random.RandomState)
        else generator.getstate()
    )


def _comparable(state: Any) -> Any:
    """A state that can be compared, fast."""
    if isinstance(state, dict):
        return {key: _comparable(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in state)
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _set_state(generator: HostGenerator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)


#: number of unit calls so far to a number that changes the seeds from there on
Salts = Mapping[int, int]


class KeyedRandom:
    """Seeds torch (CPU and the accelerator in use), Python and NumPy for one micro-batch.

    Args:
        key: The micro-batch's key; equal on every stage of a pipeline.
        device_type: ``"cpu"``, ``"cuda"``, ... of the stage.
        generators: Other generators that the step may draw from.
        salts: Other seeds after some calls, to see what the step does with other numbers there.
    """

    def __init__(
        self,
        key: int,
        device_type: str = "cpu",
        generators: Sequence[Generator] = (),
        *,
        salts: Salts | None = None,
    ) -> None:
        self._key = key
        self._salts = salts or {}
        self._module = getattr(torch, device_type) if device_type != "cpu" else None
        self._of_torch = [g for g in generators if isinstance(g, torch.Generator)]
        self._of_host = [g for g in generators if not isinstance(g, torch.Generator)]
        self._stood: Any = None

    def begin(self) -> None:
        """Seed for the start of the step."""
        self.seed()
        self.salt(0)

    def salt(self, num_calls: int) -> None:
        """Seed anew after so many unit calls, if other numbers are wanted from there on."""
        if num_calls in self._salts:
            self.seed(num_calls, self._salts[num_calls])

    def seed(self, *place: int, host: bool = True) -> None:
        """Seed the generators of torch for ``place``, and those of Python and NumPy if ``host``."""
        seed = mix(self._key, *place)
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)
        for index, generator in enumerate(self._of_torch):
            generator.manual_seed(mix(seed, index))
        if host:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            for index, other in enumerate(self._of_host):
                _seed(other, mix(seed, -1, index))

    def state(self, *, host: bool = True) -> tuple[list[Any], list[Any]]:
        """Say where the generators stand: those of torch, and of Python and NumPy if ``host``."""
        of_torch: list[Any] = [torch.default_generator.get_state()]
        if self._module is not None:
            of_torch.append(self._module.get_rng_state())
        of_torch += [g.get_state() for g in self._of_torch]
        if not host:
            return of_torch, []
        return of_torch, [random.getstate(), np.random.get_state(), *map(_state, self._of_host)]

    def put_back(self, state: tuple[list[Any], list[Any]]) -> None:
        """Let the generators stand where :meth:`state` found them."""
        of_torch, of_host = state
        torch.default_generator.set_state(of_torch[0])
        if self._module is not None:
            self._module.set_rng_state(of_torch[1])
        own = of_torch[len(of_torch) - len(self._of_torch) :]
        for generator, at in zip(self._of_torch, own, strict=True):
            generator.set_state(at)
        if of_host:
            random.setstate(of_host[0])
            np.random.set_state(of_host[1])
            for other, at in zip(self._of_host, of_host[2:], strict=True):
                _set_state(other, at)

    def moved(self) -> bool:
        """Tell whether Python or NumPy drew since :meth:`mark`; torch's draws are operators."""
        return bool(self._stand() != self._stood)

    def mark(self) -> None:
        """Remember where the generators of Python and NumPy stand."""
        self._stood = self._stand()

    def _stand(self) -> list[Any]:
        own = [_comparable(_state(generator)) for generator in self._of_host]
        return [random.getstate(), _comparable(np.random.get_state()), *own]


@contextmanager
def preserved(device_type: str = "cpu", generators: Sequence[Generator] = ()) -> Iterator[None]:
    """Put all global generators, and those given, back on exit: a step must not move the user's
    random streams."""
    streams = KeyedRandom(0, device_type, generators)
    state = streams.state()
    try:
        yield
    finally:
        streams.put_back(state)


def is_draw(operator: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NOTHING) -> bool:
    """Tell whether an operator draws random numbers, for these arguments: attention may drop at a
    rate of zero."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    place = _place_of_rate(operator)
    if place is None:
        return True
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


@lru_cache(maxsize=1024)
def _place_of_rate(operator: Any) -> int | None:
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return names.index("dropout_p") if "dropout_p" in names else None


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
        if not is_draw(func, args, kwargs):
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
