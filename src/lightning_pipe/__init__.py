"""Pipeline parallelism for PyTorch Lightning.

    trainer = Trainer(strategy="pipeline", devices=4)

The names below are loaded when they are first used: `import lightning_pipe` and
`import lightning_pipe.planning` need no torch and take milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from _lightning_pipe_autoload import listen

if TYPE_CHECKING:
    from lightning_pipe.callbacks import (
        BubbleMonitor,
        EffectiveBatchRescaler,
        MicrobatchSchedule,
        PipelineDoctor,
        PipelineProgress,
        StageMemoryMonitor,
        TimelineRecorder,
    )
    from lightning_pipe.errors import (
        BatchError,
        CheckpointError,
        ConfigError,
        CutError,
        GuardError,
        MeetingError,
        PeerError,
        PipelineError,
        PlanError,
        ScheduleError,
        StageMismatchError,
    )
    from lightning_pipe.planning.ir import Action, Op, Schedule
    from lightning_pipe.planning.plan import Plan
    from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
    from lightning_pipe.planning.timeline import Timeline
    from lightning_pipe.strategy import PipelineStrategy

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Action",
    "BatchError",
    "BubbleMonitor",
    "CheckpointError",
    "ConfigError",
    "CutError",
    "EffectiveBatchRescaler",
    "GuardError",
    "MeetingError",
    "MicrobatchSchedule",
    "Op",
    "PeerError",
    "PipelineDoctor",
    "PipelineError",
    "PipelineProgress",
    "PipelineStrategy",
    "Plan",
    "PlanError",
    "Schedule",
    "ScheduleError",
    "StageMemoryMonitor",
    "StageMismatchError",
    "Timeline",
    "TimelineRecorder",
    "__version__",
    "make_schedule",
]

_HOMES = {
    "SCHEDULES": "planning.schedules",
    "Action": "planning.ir",
    "BubbleMonitor": "callbacks",
    "EffectiveBatchRescaler": "callbacks",
    "Op": "planning.ir",
    "MicrobatchSchedule": "callbacks",
    "PipelineDoctor": "callbacks",
    "PipelineProgress": "callbacks",
    "PipelineStrategy": "strategy",
    "Plan": "planning.plan",
    "Schedule": "planning.ir",
    "StageMemoryMonitor": "callbacks",
    "Timeline": "planning.timeline",
    "TimelineRecorder": "callbacks",
    "make_schedule": "planning.schedules",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


listen()  # importing the package registers the strategies, with or without the plug-in
