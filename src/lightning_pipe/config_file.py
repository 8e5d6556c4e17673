"""The YAML of `fit`, read by commands that do not train."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_pipe.processes import PipelineProcesses

__all__ = ["ReadsConfig", "count_devices", "quietly", "read_config", "strategy_arguments"]


class ReadsConfig(LightningCLI):
    """Reads what `fit` reads and stops where `fit` would start processes.

    Attributes:
        asked: What the config has for the Trainer's strategy, devices and precision.
    """

    asked: dict[str, Any]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """One process on the CPU, whatever the config says; its strategy is read, not used."""
        asked = self._get(self.config_init, "trainer", default={})
        wanted = ("strategy", "accelerator", "devices", "num_nodes", "precision")
        self.asked = {key: asked[key] for key in wanted}
        alone = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto"}
        quiet = {"logger": False, "callbacks": [], "enable_progress_bar": False, "profiler": None}
        quiet |= {"enable_checkpointing": False, "enable_model_summary": False}
        return super().instantiate_trainer(**alone, **quiet, **kwargs)

    def fit(self, model: LightningModule, **kwargs: Any) -> None:
        """In place of the Trainer's."""


C = TypeVar("C", bound=ReadsConfig)


def read_config(arguments: Sequence[str], command: str, kind: type[C]) -> C:
    """Builds what the arguments of `lightning-pipe fit` describe.

    Args:
        arguments: They, such as `--config fit.yaml`.
        command: Which of our commands asks, for usage and errors.
        kind: How the module is built.
    """
    with quietly():
        return kind(
            args=["fit", *arguments],
            trainer_defaults={"strategy": "pipeline"},
            save_config_callback=None,
            parser_kwargs={"prog": f"lightning-pipe {command}"},
        )


@contextmanager
def quietly() -> Iterator[None]:
    """Without what Lightning says about the one process that only reads the config."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def count_devices(devices: Any) -> int:
    """Devices of a machine, as the Trainer's argument says them; 1 if it leaves them open."""
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = str(devices)
    return int(text) if text.lstrip("-").isdigit() and int(text) > 0 else 1


def strategy_arguments(strategy: Any) -> dict[str, Any]:
    """What the user gave to the strategy, whether by name, by class path or as another one."""
    if isinstance(strategy, str):
        known = strategy in StrategyRegistry.available_strategies()
        strategy = StrategyRegistry.get(strategy) if known else None
    return strategy.given if isinstance(strategy, PipelineProcesses) else {}
