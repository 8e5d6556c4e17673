"""What callbacks ask of their arguments and of the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_pipe.errors import ConfigError

__all__ = ["need_pipeline", "need_steps", "replicas"]


def need_pipeline(callback: Callback, does: str, trainer: Trainer, ability: str) -> None:
    """Refuses strategies without an ability.

    Args:
        callback: Who asks.
        does: What it does, such as "measures".
        trainer: Whose strategy it is.
        ability: Name of the method or property of `PipelineStrategy` that is needed.

    Raises:
        ConfigError: The strategy is not ours.
    """
    if not hasattr(trainer.strategy, ability):
        raise ConfigError(
            f"{type(callback).__name__} {does} pipelines, and the strategy is "
            f"{type(trainer.strategy).__name__}: give Trainer(strategy='pipeline')"
        )


def need_steps(**given: int) -> None:
    """Refuses numbers of steps below 1, by their names.

    Raises:
        ConfigError: One is.
    """
    for name, number in given.items():
        if number < 1:
            raise ConfigError(f"{name}={number}: give a number of steps from 1")


def replicas(trainer: Trainer) -> int:
    """Copies of the model that see different data."""
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    sampler: Mapping[str, Any] = kwargs if isinstance(kwargs, Mapping) else {}
    found = sampler.get("num_replicas", 1)
    return int(found) if isinstance(found, (int, torch.Tensor)) else 1
