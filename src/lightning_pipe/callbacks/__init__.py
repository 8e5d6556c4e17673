"""Callbacks that show what a pipeline does and keep training the same when its sizes change."""

from lightning_pipe.callbacks.bubble import BubbleMonitor
from lightning_pipe.callbacks.doctor import PipelineDoctor
from lightning_pipe.callbacks.effective_batch import EffectiveBatchRescaler
from lightning_pipe.callbacks.memory import StageMemoryMonitor
from lightning_pipe.callbacks.microbatches import MicrobatchSchedule
from lightning_pipe.callbacks.progress import PipelineProgress
from lightning_pipe.callbacks.timeline import TimelineRecorder

__all__ = [
    "BubbleMonitor",
    "EffectiveBatchRescaler",
    "MicrobatchSchedule",
    "PipelineDoctor",
    "PipelineProgress",
    "StageMemoryMonitor",
    "TimelineRecorder",
]
