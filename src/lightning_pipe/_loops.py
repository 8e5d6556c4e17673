"""SEAM: where Lightning's loops call hooks, look at `should_stop` and step optimizers.

All functions change one Trainer, and return what undoes it.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelSummary,
    ProgressBar,
    Timer,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info


def agree_on_stopping(
    trainer: Trainer, agree: Callable[[str, bool, bool], tuple[bool, bool]]
) -> Callable[[], None]:
    """Lets all ranks stop training at the same step, whichever of them was told to.

    The Trainer looks at `should_stop` after each batch and each epoch, on every rank at its own.

    Args:
        trainer: It is about to fit.
        agree: Called by all ranks with the name of the place, whether this rank was told to stop
            and whether it got a SIGTERM; returns whether any rank was and did.

    Returns:
        What undoes it.
    """
    fit_loop = trainer.fit_loop
    loop = fit_loop.epoch_loop
    after_batch, after_epoch = loop.on_advance_end, fit_loop.on_advance_end

    def shared(place: str) -> bool:
        trainer.should_stop, ended = agree(place, trainer.should_stop, trainer.received_sigterm)
        return ended or trainer.received_sigterm

    def on_batch(fetcher: Any) -> None:
        ended = shared("ends a batch")
        validates = loop._should_check_val_fx(fetcher)
        after_batch(fetcher)
        if validates:
            ended |= shared("goes on after a validation")
        if ended:
            raise SIGTERMException

    def on_epoch() -> None:
        after_epoch()
        if shared("ends an epoch"):
            raise SIGTERMException

    return _replace(
        (loop, "on_advance_end", on_batch),
        (loop, "_broadcast_sigterm_tensor", lambda: None),  # Lightning's own, for each batch
        (fit_loop, "on_advance_end", on_epoch),
    )


def _replace(*replacements: tuple[Any, str, Any]) -> Callable[[], None]:
    """Sets attributes of instances in front of those of their classes; returns what undoes it."""
    for owner, name, value in replacements:
        vars(owner)[name] = value

    def undo() -> None:
        for owner, name, _ in replacements:
            vars(owner).pop(name, None)

    return undo


#: callbacks that look at no weights
_QUIET = (
    *(Checkpoint, EarlyStopping, GradientAccumulationScheduler, LearningRateMonitor),
    *(ModelSummary, ProgressBar, Timer),
)
#: hooks of a LightningModule in which a user may look at weights, besides `on_...`
_OTHER_HOOKS = ("optimizer_step", "configure_gradient_clipping", "lr_scheduler_step", "backward")


def _is_quiet(callback: Callback) -> bool:
    return isinstance(callback, _QUIET) or type(callback).__module__.startswith("lightning_pipe")


def has_user_hooks(trainer: Trainer) -> bool:
    """Whether code of the user runs between steps."""
    module = trainer.lightning_module
    hooks = [n for n in dir(LightningModule) if n.startswith("on_") and n != "on_gpu"]
    names = [*hooks, *_OTHER_HOOKS]
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    return any(is_overridden(name, module) for name in names) or not all(map(_is_quiet, callbacks))


def around_hooks(
    trainer: Trainer, running: Callable[[], AbstractContextManager[None]]
) -> Callable[[], None]:
    """Enters `running` around each hook and callback of the user; returns what undoes it.

    The Trainer calls all of them within `profiler.profile`, with their names.
    """
    profiler: Any = vars(trainer)["profiler"]
    module = trainer.lightning_module
    own = profiler.profile
    of_module = f"[LightningModule]{type(module).__name__}"

    def is_users(action: str) -> bool:
        where, _, name = action.rpartition(".")
        if where == of_module:
            return is_overridden(name, module)
        callbacks: list[Callback] = vars(trainer)["callbacks"]
        return where.startswith("[Callback]") and not any(
            _is_quiet(c) and where == f"[Callback]{c.state_key}" for c in callbacks
        )

    known: dict[str, bool] = {}

    @contextmanager
    def profile(action_name: str) -> Iterator[str]:
        if action_name not in known:
            known[action_name] = is_users(action_name)
        with own(action_name), running() if known[action_name] else nullcontext():
            yield action_name

    return _replace((profiler, "profile", profile))


TERM, REQUEUE, INTERRUPT = 1, 2, 4
"""What signals ask for, as bits."""


def postpone_signals(
    trainer: Trainer, request: Callable[[int], bool]
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Lets a signal only note what it asks for, until all ranks of a pipeline can do it together.

    Lightning's own handlers broadcast, save and raise wherever a process just is.

    Args:
        trainer: Its handlers are not registered yet.
        request: Told what a signal asks for; returns whether it had been asked for already.

    Returns:
        What does it, on all ranks together, and what undoes all this.
    """
    connector: Any = vars(trainer)["_signal_connector"]
    requeue = connector._slurm_sigusr_handler_fn

    def on_term(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if not request(TERM) and launcher is not None:
            launcher.kill(signum)

    def act(asked: int) -> None:
        if asked & TERM:
            connector.received_sigterm = True
        if asked & REQUEUE:
            requeue(signal.SIGUSR1, None)
        if asked & INTERRUPT:
            raise KeyboardInterrupt

    undo = _replace(
        (connector, "_sigterm_notifier_fn", on_term),
        (connector, "_slurm_sigusr_handler_fn", lambda signum, frame: request(REQUEUE)),
    )
    listens = _postpone_interrupt(request)

    def undo_all() -> None:
        undo()
        if listens and signal.getsignal(signal.SIGINT) is listens:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return act, undo_all


def _postpone_interrupt(request: Callable[[int], bool]) -> Callable[[int, Any], None] | None:
    """Lets the first Ctrl-C only be noted; returns its handler, if there is no other yet."""

    def on_interrupt(signum: int, frame: Any) -> None:
        if request(INTERRUPT):
            raise KeyboardInterrupt
        rank_zero_info("Ctrl-C: all ranks end after this batch; once more ends them at once")

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    signal.signal(signal.SIGINT, on_interrupt)
    return on_interrupt


def after_closure(precision: Any, then: Callable[[], Any]) -> Callable[[], None]:
    """Calls `then` before the optimizer goes on with its gradients; returns what undoes it."""
    own = precision._after_closure

    def after(*args: Any, **kwargs: Any) -> None:
        own(*args, **kwargs)
        then()

    return _replace((precision, "_after_closure", after))


def agree_on_monitored(trainer: Trainer, agree: Callable[[str, Any], Any]) -> Callable[[], None]:
    """Lets schedulers on all ranks see the same value of what they monitor.

    Args:
        trainer: It is about to fit.
        agree: Called by all ranks with the key and this rank's value; returns that of the first.

    Returns:
        What undoes it.
    """
    loop = trainer.fit_loop.epoch_loop
    own = loop._get_monitor_value

    def value(key: str) -> Any:
        return agree(key, own(key))

    return _replace((loop, "_get_monitor_value", value))


def silence_advice() -> Callable[[], None]:
    """Silences the advice to log with `sync_dist=True`: ranks of a pipeline log the same values."""
    warnings.filterwarnings("ignore", "It is recommended to use `self.log")
    added = warnings.filters[0]

    def undo() -> None:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]

    return undo
