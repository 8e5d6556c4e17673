"""The names under which Lightning knows the strategy: `Trainer(strategy="pipeline_1f1b")`.

Imports nothing heavy, because it runs whenever a program imports Lightning, with or without a
pipeline in mind: the registered names lead to a function, and only the script that asks for one of
them imports the strategy.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Strategy name -> the arguments of PipelineStrategy that it stands for.
STRATEGIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "pipeline": {},
        "pipeline_naive": {"schedule": "naive"},
        "pipeline_gpipe": {"schedule": "gpipe"},
        "pipeline_1f1b": {"schedule": "1f1b"},
        "pipeline_interleaved": {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        "pipeline_looped_bfs": {"schedule": "looped_bfs", "virtual_stages": 2},
        "pipeline_zero_bubble": {"schedule": "zero_bubble"},
        "pipeline_zbv": {"schedule": "zbv", "virtual_stages": 2},
        "pipeline_dualpipev": {"schedule": "dualpipev", "virtual_stages": 2},
    }
)


def make_strategy(**arguments: Any) -> Any:
    """Builds a `PipelineStrategy`; this is what the registered names call."""
    from lightning_pipe.strategy import PipelineStrategy

    return PipelineStrategy(**arguments)


def register(registry: Any) -> None:
    """Adds our names to Lightning's `StrategyRegistry`; a name that is taken stays as it is."""
    for name, arguments in STRATEGIES.items():
        if name not in registry:
            schedule = arguments.get("schedule", "auto")
            description = f"Pipeline parallelism (lightning-pipe), schedule {schedule}"
            registry.register(name, make_strategy, description, **arguments)
