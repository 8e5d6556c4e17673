"""Debug mode: whether, and where, actions are noted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_pipe.runtime.actionlog import ActionLog
from lightning_pipe.runtime.engine import Engine

VARIABLE = "LIGHTNING_PIPE_DEBUG"
_NO = ("", "0", "false", "no", "off")
_YES = ("1", "true", "yes", "on")


def log_actions(engine: Engine, wanted: bool | str, root: str) -> Callable[[], None] | None:
    """Opens a log for an engine if one is wanted; all ranks call this.

    Args:
        engine: The engine.
        wanted: The argument `debug`; what it leaves open the environment variable decides.
        root: The folder in which that of the log is, by default.

    Returns:
        What closes it.
    """
    said = str(wanted) if wanted else os.environ.get(VARIABLE, "")
    if said.lower() in _NO:
        return None
    folder = Path(root) / "pipeline-debug" if said.lower() in _YES else Path(said)
    log = engine.log = ActionLog(folder, engine.ranks)
    rank_zero_info(
        f"Pipeline: every action is noted; read with `lightning-pipe debug-merge {folder}`"
    )

    def close() -> None:
        engine.log = None
        log.close()

    return close
