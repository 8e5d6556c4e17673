"""What the guards that are always on cost a step.

One process trains two stages; steps with and without guards follow each other, so that the load of
the machine is the same for both. Times are processor time of this process; medians are compared.

    python benchmarks/guards.py --width 256 --rows 8
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch
from models import TinyLlama, tokens
from rich.console import Console
from torch.utils.data import DataLoader

from lightning_pipe import PipelineStrategy, guards
from lightning_pipe.runtime import chunk


@contextmanager
def no_guards() -> Iterator[None]:
    """Takes the guards away."""
    kept = guards.Guards.begin, chunk.StageChunk._version

    def begin(self: guards.Guards, name: str, batch: object, *, training: bool) -> None:
        self._batch = self._finite = None

    guards.Guards.begin = begin  # type: ignore[method-assign]
    chunk.StageChunk._version = lambda self: 0  # type: ignore[method-assign]
    try:
        yield
    finally:
        guards.Guards.begin, chunk.StageChunk._version = kept  # type: ignore[method-assign]


class Timer(pl.Callback):
    """Times steps with guards and without in turn."""

    def __init__(self) -> None:
        self.times_s: dict[bool, list[float]] = {True: [], False: []}

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
        self._without = no_guards()
        self._guarded = batch_idx % 2 == 0
        if not self._guarded:
            self._without.__enter__()
        self._start_s = time.process_time()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:  # type: ignore[no-untyped-def]
        time_s = time.process_time() - self._start_s
        if not self._guarded:
            self._without.__exit__(None, None, None)
        if batch_idx > 8:
            self.times_s[self._guarded].append(time_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    timer = Timer()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=PipelineStrategy(virtual_stages=2, num_microbatches=4, schedule="gpipe"),
        callbacks=[timer],
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = tokens(options.rows * options.steps, options.length).unbind()
    module = TinyLlama(options.layers, options.width)
    trainer.fit(module, DataLoader(data, batch_size=options.rows))
    with_s, without_s = (statistics.median(timer.times_s[guarded]) for guarded in (True, False))
    Console().print(
        f"with guards {with_s * 1e3:.2f} ms, without {without_s * 1e3:.2f} ms a step: "
        f"{with_s / without_s - 1:+.2%}"
    )


if __name__ == "__main__":
    main()
