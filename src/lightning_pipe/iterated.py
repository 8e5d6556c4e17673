"""The vectors of spectral norms: one power iteration per step and call, as on one device.

A spectral norm improves its estimate in each forward that trains. Each micro-batch would have
another estimate, and so other weights. Its new vectors depend on nothing but the old ones and the
weight, so each micro-batch begins with those of the start of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_pipe.split._fake import is_fake

_PARAMETRIZATION = "_SpectralNorm"  # a private class of torch.nn.utils.parametrizations


class Iterated:
    """Lets the micro-batches of a step begin with the same vectors.

    Args:
        root: The user's module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._places = list(_places(root))
        self._before: list[tuple[str, Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins."""
        buffers = [(place, module._buffers[name]) for place, module, name in self._places]
        self._before = [
            (place, b, b.clone()) for place, b in buffers if b is not None and not is_fake(b)
        ]

    @torch.no_grad()
    def restart(self, others: Callable[[], Iterable[str]]) -> None:
        """A micro-batch begins, on one of the stages here.

        Args:
            others: Names the units whose turn on this rank is in other stages.
        """
        if not self._before:
            return
        inside = tuple(f"{unit}." for unit in others())
        for place, buffer, before in self._before:
            if not f"{place}.".startswith(inside):
                buffer.copy_(before)


def _places(root: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The buffers of spectral norms of both kinds: the module that has them, and their names."""
    for place, module in root.named_modules():
        names = ["_u", "_v"] if type(module).__name__ == _PARAMETRIZATION else []
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names += [f"{hook.name}_u", f"{hook.name}_v"]
        yield from ((place, module, name) for name in names if name in module._buffers)
