"""Planning: schedules, balance, simulation and pictures. Standard library only, no torch.

Imports in milliseconds and plans a pipeline of a thousand ranks on a laptop. The words, which mean
the same in the whole package:

    stage        a contiguous piece of the whole model, numbered globally
    chunk        one of the V stages that a rank holds (virtual stage)
    unit         a module whose call is placed whole
    rank         position in the pipeline; the process's number in the job is its global rank
    microbatch   one slice of a batch
    action       one thing a rank does, such as 2F0: stage 2, forward, micro-batch 0
    op           the kind of an action: F forward, B backward, I input gradient, W weight gradient
    order        the list of actions of one rank
    schedule     the orders of all ranks
    cut          index of the first unit call of a stage
    boundary     the values that cross a cut
    plan         cuts, schedule, number of micro-batches and predicted numbers

Counts are ``num_*``, from 1; indices are bare nouns, from 0. Quantities end in their unit:
``forward_s``, ``activation_bytes``, ``bubble_fraction`` (0 to 1).
"""

from __future__ import annotations

from lightning_pipe.planning.balance import at_names, explicit, loads, partition, uniform
from lightning_pipe.planning.costs import (
    CostTable,
    LinkCosts,
    StageCosts,
    UnitCosts,
    stage_costs,
)
from lightning_pipe.planning.ir import Action, Op, Order, Schedule
from lightning_pipe.planning.plan import Plan, StagePlan
from lightning_pipe.planning.render import (
    chrome_trace,
    schedule_figure,
    schedule_summary,
    schedule_text,
    timeline_figure,
)
from lightning_pipe.planning.schedules import (
    SCHEDULES,
    Builder,
    forward_only,
    make_schedule,
    validate_user,
)
from lightning_pipe.planning.simulate import (
    BubbleParts,
    bubble_parts,
    ideal_bubble_fraction,
    peak_activation_bytes,
    simulate,
)
from lightning_pipe.planning.timeline import Span, Timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "BubbleParts",
    "Builder",
    "CostTable",
    "LinkCosts",
    "Op",
    "Order",
    "Plan",
    "Schedule",
    "Span",
    "StageCosts",
    "StagePlan",
    "Timeline",
    "UnitCosts",
    "at_names",
    "bubble_parts",
    "chrome_trace",
    "explicit",
    "forward_only",
    "ideal_bubble_fraction",
    "loads",
    "make_schedule",
    "partition",
    "peak_activation_bytes",
    "schedule_figure",
    "schedule_summary",
    "schedule_text",
    "simulate",
    "stage_costs",
    "timeline_figure",
    "uniform",
    "validate_user",
]
