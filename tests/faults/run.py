"""`python -m tests.faults.run [AT_ONCE]`: every fault at every action of every rank, by 1F1B and
zero bubble on two ranks, with the watchdog set to 10 s; how long all processes took to end.

Ends with 1 if one was left or late, or if what was said did not name the stage and the action.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from tests.faults.harness import LIMIT_S, Fault, Job, train, wrong

from lightning_pipe.planning.schedules import make_schedule

HANG_S = 10.0


def faults() -> Iterator[tuple[Fault, str]]:
    """All of them, each with a schedule that has its action."""
    for schedule in ("1f1b", "zero_bubble"):
        order = make_schedule(schedule, num_ranks=2, num_microbatches=4)
        for rank in range(2):
            for action in map(str, order.actions(rank)):
                if schedule == "zero_bubble" and action[1] == "F":
                    continue  # as by 1F1B
                for kind in ("raise", "kill", "sleep", "native"):
                    if kind != "native" or action[1] in "FB":
                        yield Fault(kind, action), schedule
                for kind in ("shape", "dtype") if action.startswith("0F") else ():
                    yield Fault(kind, action), schedule


def inject(fault: Fault, schedule: str) -> tuple[str, float, list[str]]:
    """One of them: its kind, the seconds that the last process took to end, and what was wrong."""
    try:
        ended = Job(2, train, fault, HANG_S, 2, 3, schedule).end()
    except AssertionError as error:
        return fault.kind, float("inf"), [f"{fault}: {error}"]
    return fault.kind, max(process.seconds for process in ended), wrong(fault, ended)


def main() -> None:
    """Prints a line for each kind."""
    seconds: dict[str, list[float]] = {}
    problems: list[str] = []
    with ThreadPoolExecutor(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as threads:
        for kind, took_s, wrongs in threads.map(lambda pair: inject(*pair), list(faults())):
            seconds.setdefault(kind, []).append(took_s)
            problems += wrongs
    for kind, found in seconds.items():
        print(f"{kind:>7}: {len(found):3d} faults, all ended after {max(found):.1f} s at most")
    print(f"limit {LIMIT_S:.0f} s, watchdog {HANG_S:.0f} s, {len(problems)} wrong")
    print(*problems, sep="\n")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
