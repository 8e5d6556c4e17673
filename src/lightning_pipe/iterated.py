"""The vectors of spectral norms: one power iteration per step and call, as on one device.

A spectral norm improves its estimate in each forward that trains. Each micro-batch would have
another estimate, and so other weights. Its new vectors depend on nothing but the old ones and the
weight, so each micro-batch begins with those of the start of the step.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_pipe.split._fake import is_fake
from lightning_pipe.split.units import modules_of

_PARAMETRIZATION = "_SpectralNorm"  # a private class of torch.nn.utils.parametrizations


class Iterated:
    """Lets the micro-batches of a step begin with the same vectors.

    Args:
        root: The user's module.
    """

    def __init__(self, root: nn.Module) -> None:
        self._places = list(_places(root))
        self._before: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A step begins."""
        buffers = [module._buffers[name] for module, name in self._places]
        self._before = [(b, b.clone()) for b in buffers if b is not None and not is_fake(b)]

    @torch.no_grad()
    def restart(self) -> None:
        """A micro-batch begins, on one of the stages here."""
        for buffer, before in self._before:
            buffer.copy_(before)


def _places(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The buffers of spectral norms of both kinds: the module that has them, and their names."""
    for module in modules_of(root):
        names = ["_u", "_v"] if type(module).__name__ == _PARAMETRIZATION else []
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names += [f"{hook.name}_u", f"{hook.name}_v"]
        yield from ((module, name) for name in names if name in module._buffers)
