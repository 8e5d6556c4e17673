"""torch's transformer encoder in evaluation, when its layers are on several stages.

Without gradients and with a mask for padding, ``nn.TransformerEncoder`` packs the rows into a
nested tensor, and what it returns is zero where the padding was. A nested tensor cannot go through
the layers one by one while a step is followed, so an encoder whose layers are units runs them on
the padded rows and puts the zeros in afterwards: the same numbers at every position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.split.patching import attributes
from lightning_pipe.split.units import modules_of


def opened_encoders(
    root: nn.Module, units: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
    """List the replacements for the encoders of ``root`` that have units inside them."""
    for module in modules_of(root):
        if isinstance(module, nn.TransformerEncoder) and any(
            inner is unit for inner in module.modules() if inner is not module for unit in units
        ):
            yield module, "forward", _padded(module, module.forward)


def _padded(encoder: nn.TransformerEncoder, original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        if src_key_padding_mask is None or not _packs(encoder, src, mask):
            with attributes([(encoder, "use_nested_tensor", False)]):
                return original(src, mask, src_key_padding_mask, is_causal)
        norm, encoder.norm = encoder.norm, None
        try:
            with attributes([(encoder, "use_nested_tensor", False)]):
                out = original(src, mask, src_key_padding_mask, is_causal)
        finally:
            encoder.norm = norm
        out = out.masked_fill(_packed_padding(encoder, src_key_padding_mask)[..., None], 0.0)
        return out if norm is None else norm(out)

    return forward


def _packs(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None) -> bool:
    """Tell whether torch would pack, whatever the padding is."""
    layer = encoder.layers[0]
    gradients = torch.is_grad_enabled() and (
        src.requires_grad or any(p.requires_grad for p in layer.parameters())
    )
    return bool(
        torch.backends.mha.get_fastpath_enabled()
        and getattr(encoder, "use_nested_tensor", False)
        and not layer.training
        and src.dim() == 3
        and mask is None
        and not torch.is_autocast_enabled()
        and not gradients
    )


def _packed_padding(encoder: nn.TransformerEncoder, padding: Tensor) -> Tensor:
    """Return the positions that are zero on one device: none if some row is not padded at its end
    only, for torch does not pack then."""
    valid = ~padding if padding.dtype == torch.bool else padding == 0
    if not getattr(encoder, "mask_check", True):
        return ~valid
    at_end = (valid.int().cummin(1).values == valid.int()).all()
    return ~valid & at_end
