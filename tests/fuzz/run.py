"""`scripts/fuzz EXAMPLES SEED [LOG]`: any number of random trainings, and what became of them."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.programs import example_of
from tests.fuzz.trainings import DIFFERS, ERROR, fuzz
from tests.helpers import run_ranks

_AT_ONCE = 20


def main() -> None:
    """Runs the examples in portions; ends with 1 if any of them hung or differed."""
    count, first = int(sys.argv[1]), int(sys.argv[2])
    log = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    kinds: Counter[str] = Counter()
    for start in range(first, first + count, _AT_ONCE):
        seeds = list(range(start, min(start + _AT_ONCE, first + count)))
        begin_s = time.monotonic()
        found = fuzz(seeds, run_ranks)
        kinds.update(outcome.kind for outcome in found)
        took_s = time.monotonic() - begin_s
        print(f"seeds {seeds[0]}..{seeds[-1]}: {dict(kinds)} {took_s:.0f} s", flush=True)
        for outcome in found:
            if outcome.kind in (DIFFERS, ERROR):
                print(f"{outcome.kind}: {outcome.text}\n{example_of(outcome.seed)}", flush=True)
        if log is not None:
            with log.open("a") as file:
                for outcome in sorted(found, key=lambda o: o.seed):
                    file.write(json.dumps(vars(outcome)) + "\n")
    sys.exit(1 if kinds[DIFFERS] or kinds[ERROR] else 0)


if __name__ == "__main__":
    main()
