"""Callbacks that show what a pipeline does; they read the strategy's plan and timeline."""

from lightning_pipe.callbacks.progress import PipelineProgress

__all__ = ["PipelineProgress"]
