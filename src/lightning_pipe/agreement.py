"""What all ranks of a pipeline decide alike while they fit: when to stop, what a scheduler sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_pipe import _loops
from lightning_pipe.runtime import share
from lightning_pipe.runtime.meeting import everywhere, meet_everywhere, together
from lightning_pipe.runtime.ranks import Ranks

_STOPS, _ENDED = 1, 2


def agree_while_fitting(
    trainer: Trainer, ranks: Ranks, *, has_hooks: bool, is_parted: bool
) -> list[Callable[[], None]]:
    """Lets the ranks of a pipeline stop at one step and see one value of what they monitor.

    Args:
        trainer: It is about to fit.
        ranks: This rank.
        has_hooks: Whether code of the user runs between steps on any rank.
        is_parted: Whether copies of the pipeline hold parts of the weights, which it may read.

    Returns:
        What undoes it.
    """
    if ranks.world_size == 1:
        return []
    undo = [
        _loops.agree_on_stopping(trainer, partial(_stopping, ranks)),
        _loops.agree_on_monitored(trainer, partial(_monitored, ranks)),
    ]
    if has_hooks:  # which may ask for gradients of other ranks before the optimizer changes weights
        precision = trainer.strategy.precision_plugin
        place = partial(together(is_parted), ranks, "steps the optimizer")
        undo.append(_loops.after_closure(precision, place))
    return undo


def _stopping(ranks: Ranks, place: str, stops: bool, ended: bool) -> tuple[bool, bool]:
    flags = meet_everywhere(ranks, place, _STOPS * stops + _ENDED * ended)
    if ranks.talk.obey is not None:
        ranks.talk.obey(True)
    return any(flag & _STOPS for flag in flags), any(flag & _ENDED for flag in flags)


def _monitored(ranks: Ranks, key: str, value: Any) -> Any:
    with everywhere(ranks, f"steps a scheduler that monitors {key}"):
        values = share.gather_everywhere(ranks, value if value is None else float(value))
    first = values[ranks.first_position]  # of the first copy, whose values are the first ones
    if any(other != first and not (other != other and first != first) for other in values):
        rank_zero_warn(
            f"{key}, which a learning rate scheduler monitors, is {values} on the ranks of the "
            f"pipeline: all take {first}, the value of global rank 0. Log the same on all ranks"
            + (", with sync_dist=True" if ranks.copies is not None else "")
        )
    if value is None or first is None:
        return value
    # in its own precision: whether a plateau is one may hang on the last digits
    dtype = value.dtype if isinstance(value, Tensor) else torch.get_default_dtype()
    return torch.as_tensor(first, dtype=dtype)
