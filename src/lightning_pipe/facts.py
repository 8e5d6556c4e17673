"""What has to be the same in the processes of all ranks: code, versions and arguments.

A rank with another version of a file, or another value in its configuration, may run for hours and
be wrong, or wait for ever at a place to which the others never come. So ranks compare before they
do anything together.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_pipe.errors import ConfigError
from lightning_pipe.runtime import share
from lightning_pipe.runtime.ranks import Ranks

Facts = dict[str, str]
"""What is compared, by what people call it."""

_OF_TRAINER = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_predict_batches",
    "limit_test_batches",
    "limit_train_batches",
    "limit_val_batches",
    "max_epochs",
    "max_steps",
    "num_sanity_val_steps",
    "precision",
    "val_check_interval",
)
_INSTALLED = ("torch", "lightning", "torchmetrics", "torchvision", "transformers", "timm")
_SHOWN_CHARS = 60
_SHOWN = 6


def facts_of(module: nn.Module, given: Mapping[str, Any], trainer: Trainer) -> Facts:
    """What this rank tells the others of itself.

    Args:
        module: The user's module.
        given: The arguments of the strategy.
        trainer: The Trainer.
    """
    facts = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
        "the code of lightning_pipe": _digest(_own_files()),
        "the class of the module": f"{type(module).__module__}.{type(module).__qualname__}",
    }
    given = {**given, **_read(given["schedule"])}
    facts |= {f"{name} (of PipelineStrategy)": _short(value) for name, value in given.items()}
    facts |= {f"{name} (of Trainer)": _short(getattr(trainer, name)) for name in _OF_TRAINER}
    for name in _modules_of_classes(module):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and Path(file).is_file():
            facts[f"the file of {name}"] = _digest([Path(file).read_bytes()])
    return facts


def compare(ranks: Ranks, facts: Facts) -> None:
    """Compares the facts of all ranks; called by all together.

    Raises:
        ConfigError: They differ, on all ranks, with what differs on which.
    """
    told = share.gather_everywhere(ranks, (ranks.global_rank, facts))
    told = sorted(told, key=lambda one: one[0])
    names = dict.fromkeys(name for _, other in told for name in other)
    differing = [name for name in names if len({other.get(name) for _, other in told}) > 1]
    if not differing:
        return
    lines = [f"{name} is {_who_has_what(told, name)}" for name in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"and {len(differing) - _SHOWN} more differ")
    raise ConfigError(
        f"the ranks do not run the same: {'; '.join(lines)}. Start all ranks from the same files, "
        "with the same arguments and the same packages"
    )


def _who_has_what(told: Sequence[tuple[int, Facts]], name: str) -> str:
    ranks_of: dict[str, list[int]] = {}
    for rank, facts in told:
        ranks_of.setdefault(facts.get(name, "not there"), []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        for value, ranks in ranks_of.items()
    )


def _modules_of_classes(module: nn.Module) -> list[str]:
    """Names of the Python modules whose code the model runs, but those of installed packages that
    have a version of their own."""
    classes = {base for child in module.modules() for base in type(child).__mro__}
    names = {cls.__module__ for cls in classes}
    known = {*_INSTALLED, "builtins", "lightning_pipe", "lightning_utilities"}
    known |= sys.stdlib_module_names
    return sorted(name for name in names if name.split(".")[0] not in known)


def _read(schedule: str) -> dict[str, str]:
    """What a schedule's file says: each machine may have it elsewhere."""
    if not schedule.lower().endswith(".csv"):
        return {}
    return {"schedule": f"a file of {_digest([Path(schedule).read_bytes()])}"}


def _own_files() -> Iterable[bytes]:
    folder = Path(__file__).parent
    for file in sorted(folder.rglob("*.py")):
        yield file.relative_to(folder).as_posix().encode()
        yield file.read_bytes()


def _short(value: Any) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    if len(text) <= _SHOWN_CHARS:
        return text
    return f"{text[:_SHOWN_CHARS]}... ({_digest([text.encode()])})"


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return f"sha256 {digest.hexdigest()[:12]}"
