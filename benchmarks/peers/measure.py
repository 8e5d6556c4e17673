"""What every contender reports of its steps, in one line."""

from __future__ import annotations

import json
import resource
import time
from itertools import pairwise
from pathlib import Path
from statistics import median


class Steps:
    """Times steps from end to end, the first ones apart: they trace, connect and warm up.

    Args:
        folder: Where each process writes its file.
        rank: Of this process.
        warmup: Steps that are not counted.
        start_s: When the process was launched, by `time.time()`.
    """

    def __init__(self, folder: str, rank: int, warmup: int, start_s: float) -> None:
        self._path = Path(folder) / f"{rank}.json"
        self._warmup = warmup
        self._start_s = start_s
        self._moments: list[float] = []
        self._losses: list[float] = []
        self._first_s = 0.0

    def done(self, loss: float | None = None) -> None:
        """A step is over, its optimizer's too."""
        self._moments.append(time.perf_counter())
        if len(self._moments) == 1:
            self._first_s = time.time() - self._start_s
        if loss is not None:
            self._losses.append(loss)

    def write(self) -> None:
        """The run is over."""
        counted = self._moments[self._warmup - 1 :]
        steps = [after - before for before, after in pairwise(counted)]
        found = {
            "mean_s": (counted[-1] - counted[0]) / len(steps),
            "median_s": median(steps),
            "first_s": self._first_s,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "losses": self._losses,
        }
        self._path.write_text(json.dumps(found))
