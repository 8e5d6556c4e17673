"""Randomness that does not depend on the cut.

Every stage re-runs the user's step, but only some of its units; a plain generator would therefore
stand elsewhere on each stage. Here every place that may draw has a seed of its own, made from the
micro-batch's key and the place: all stages, all schedules and all ``P`` and ``V`` draw the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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


class KeyedRandom:
    """Seeds torch (CPU and the accelerator in use), Python and NumPy for one place of a step.

    Args:
        key: The micro-batch's key; equal on every stage of a pipeline.
        device_type: ``"cpu"``, ``"cuda"``, ... of the stage.
    """

    def __init__(self, key: int, device_type: str = "cpu") -> None:
        self._key = key
        self._module = getattr(torch, device_type) if device_type != "cpu" else None

    def at(self, *place: int) -> None:
        """Seed all generators for ``place``."""
        seed = mix(self._key, *place)
        torch.default_generator.manual_seed(seed)
        if self._module is not None:
            self._module.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)


@contextmanager
def preserved(device_type: str = "cpu") -> Iterator[None]:
    """Put all global generators back on exit: a step must not move the user's random streams."""
    torch_state = torch.get_rng_state()
    module = getattr(torch, device_type) if device_type != "cpu" else None
    device_state = module.get_rng_state() if module is not None else None
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if module is not None:
            module.set_rng_state(device_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
