"""Image models of `timm` with random weights.

timm imports torchvision for its data pipeline and for one frozen layer; the models need neither, so
a stub stands in where torchvision is not installed.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.modules import ROWS, Batch, Case
from torch import Tensor, nn

TIMM: dict[str, Callable[[], Case]] = {}
_STUBBED = (
    *("", ".ops", ".ops.misc", ".datasets", ".models", ".models.feature_extraction", ".utils"),
    *(".transforms", ".transforms.functional", ".io"),
)


class _Stub(types.ModuleType):
    """A module that has every name: an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def _stub_torchvision() -> None:
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    for suffix in _STUBBED:
        module = _Stub(f"torchvision{suffix}")
        module.__path__ = []
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    modes = enum.Enum(
        "InterpolationMode",
        {n: n.lower() for n in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")},
    )
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        vars(sys.modules[name])["InterpolationMode"] = modes
    vars(sys.modules["torchvision.ops.misc"])["FrozenBatchNorm2d"] = type(
        "FrozenBatchNorm2d", (nn.Module,), {}
    )


def _remove_stub() -> None:
    """Other libraries look for torchvision too and must not find the stub."""
    for suffix in _STUBBED:
        if isinstance(sys.modules.get(f"torchvision{suffix}"), _Stub):
            del sys.modules[f"torchvision{suffix}"]


@functools.cache
def _timm() -> Any:
    _stub_torchvision()
    try:
        return importlib.import_module("timm")
    finally:
        _remove_stub()


def _add(name: str, model: str, size: int = 64, **options: Any) -> None:
    def build() -> Case:
        torch.manual_seed(0)
        module = _timm().create_model(model, pretrained=False, num_classes=5, **options).train()

        def loss(batch: Batch) -> Tensor:
            out = module(batch["x"])
            return F.cross_entropy(out[0] if isinstance(out, tuple) else out, batch["y"])

        batch = {"x": torch.randn(ROWS, 3, size, size), "y": torch.randint(0, 5, (ROWS,))}
        return Case(module, loss, batch)

    TIMM[name] = build


_SMALL = {"channels": (8, 16, 32, 32)}
_add("timm_resnet18", "resnet18", 32, **_SMALL)
_add("timm_resnet50", "resnet50", 32, layers=(1, 2, 2, 1), **_SMALL)
_add("timm_efficientnet", "efficientnet_b0", 32)
_add("timm_vit", "vit_tiny_patch16_224", 32, img_size=32, patch_size=8, embed_dim=48, num_heads=4)
_add("timm_convnext", "convnext_atto", 64, depths=(1, 1, 3, 1), dims=(8, 16, 32, 32))
_add("timm_mixer", "mixer_s16_224", 32, img_size=32)
_add("timm_inception", "inception_v3", 80)
_add(
    "timm_coat",
    "coat_tiny",
    64,
    img_size=64,
    embed_dims=(32, 32, 32, 32),
    serial_depths=(1, 1, 1, 1),
    parallel_depth=2,
)
_add("timm_pvt", "pvt_v2_b0", 32, embed_dims=(8, 16, 32, 32), num_heads=(1, 1, 2, 2))
_add(
    "timm_maxvit",
    "maxvit_rmlp_pico_rw_256",
    64,
    img_size=64,
    embed_dim=(32, 32, 32, 32),
    depths=(1, 1, 1, 1),
)
_add("timm_densenet", "densenet121", 64, growth_rate=4, block_config=(2, 3, 3, 2))
_add("timm_levit", "levit_128s", 112, img_size=112, embed_dim=(32, 48, 64), key_dim=8)
