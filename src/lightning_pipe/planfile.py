"""A plan from a file, as an argument of the strategy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_pipe.errors import ConfigError, PlanError
from lightning_pipe.planning.costs import CostTable
from lightning_pipe.planning.plan import Plan

__all__ = ["read_costs", "read_plan", "with_plan"]

# What the strategy's arguments are when nobody gives them; None stands for "auto".
_FREE = {
    "num_microbatches": None,
    "schedule": "auto",
    "virtual_stages": 1,
    "balance": "auto",
    "activation_checkpointing": "auto",
}


def read_plan(plan: str | os.PathLike[str] | Mapping[str, Any] | Plan) -> Plan:
    """Reads what `lightning-pipe plan` wrote.

    Raises:
        PlanError: It cannot be read, or is no plan.
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.from_dict(plan)
    try:
        values = yaml.safe_load(Path(plan).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PlanError(f"plan={os.fspath(plan)!r} cannot be read: {error}") from error
    try:
        return Plan.from_dict(values)
    except PlanError as error:
        raise PlanError(f"plan={os.fspath(plan)!r}: {error}") from error


def read_costs(path: str | os.PathLike[str] | CostTable) -> CostTable:
    """Reads what `lightning-pipe plan --save-costs` wrote, if it is not read already.

    Raises:
        PlanError: It cannot be read, or is no table of costs.
    """
    if isinstance(path, CostTable):
        return path
    try:
        return CostTable.from_json(Path(path).read_text(encoding="utf-8"))
    except PlanError as error:
        raise PlanError(f"costs={os.fspath(path)!r}: {error}") from error
    except (OSError, ValueError) as error:
        raise PlanError(f"costs={os.fspath(path)!r} cannot be read: {error}") from error


def with_plan(
    plan: Plan, num_ranks: int | None, arguments: Mapping[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Puts a plan in place of the arguments that it decides.

    Args:
        plan: The plan.
        num_ranks: P as given beside it, or None.
        arguments: The other arguments of the strategy.

    Returns:
        P, and the arguments for `Layout`.

    Raises:
        ConfigError: An argument beside the plan says something else.
    """
    decided = {
        "num_microbatches": plan.num_microbatches,
        "schedule": plan.schedule_name,
        "virtual_stages": plan.virtual_stages,
        "balance": plan.unit_counts,
        "activation_checkpointing": "all" if plan.checkpointing else "none",
    }
    given = {"pipeline_parallel_size": num_ranks, **{name: arguments[name] for name in _FREE}}
    wanted = {"pipeline_parallel_size": plan.num_ranks, **decided}
    for name, value in given.items():
        if value != wanted[name] and value != _FREE.get(name):
            raise ConfigError(
                f"{name}={value!r} beside a plan with {name}={wanted[name]!r}: leave {name} out, "
                "or make a plan for it"
            )
    if arguments.get("split_points") is not None:
        raise ConfigError("split_points beside a plan, which says where to cut: leave one out")
    return plan.num_ranks, {**arguments, **decided, "chunks_are_free": False, "plan": plan}
