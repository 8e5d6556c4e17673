"""What every stage holds, measured beside the plan's ledger, and what one needs that is full."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipe.planning.ir import Schedule
from lightning_pipe.planning.memory import Ledger, make_ledger, most_held
from lightning_pipe.planning.plan import format_bytes
from lightning_pipe.planning.profile import Profile
from lightning_pipe.planning.shortage import explain_shortage, remedies
from lightning_pipe.runtime.accelerator import is_out_of_memory, memory_stats
from lightning_pipe.runtime.meeting import at
from lightning_pipe.runtime.share import gather_objects
from lightning_pipe.split._fake import is_fake, storage_key
from lightning_pipe.split.parted import part_of
from lightning_pipe.split.tree import tensors
from lightning_pipe.steps import Pipeline

__all__ = [
    "StageMemory",
    "device_stats",
    "extend_device_stats",
    "gather_memory",
    "note_shortage",
    "own_memory",
    "relief",
]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What a stage holds, in bytes.

    Attributes:
        stage: Index of the stage.
        rank: Position that holds it.
        weight_bytes: Of its parameters.
        gradient_bytes: Of their gradients, where there are any now.
        optimizer_bytes: Of the optimizer's state for them.
        activation_bytes: Kept for backwards at most at a time, counted in the last step that was
            watched for it; None before there was one.
        peak_bytes: Of its rank, over all its stages: the device allocator's, on the CPU that of the
            process.
        device_bytes: Memory of the device; on the CPU the machine's, shared out over the processes
            that it runs.
        predicted_bytes: What the plan's ledger expects the stage to hold at its peak; None if it
            was not profiled.
        traced_bytes: What the trace expects to be kept for backwards at most at a time.
        stats: What the device says of itself.
    """

    stage: int
    rank: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int | None
    peak_bytes: int
    device_bytes: int
    predicted_bytes: int | None
    traced_bytes: int | None
    stats: dict[str, int]

    @property
    def tensor_bytes(self) -> int:
        """All its tensors; activations as they were counted, before that as they were traced."""
        state_bytes = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes
        return state_bytes + (self.activation_bytes or self.traced_bytes or 0)


def own_memory(pipeline: Pipeline, processes: int) -> list[StageMemory]:
    """What the stages of this rank hold; nothing before the model is cut.

    Args:
        pipeline: The pipeline.
        processes: Ranks on this machine.
    """
    if pipeline.plan is None:
        return []
    home, schedule = pipeline.home, _trained(pipeline)
    ledger = _ledger(pipeline)
    stats = memory_stats(pipeline.device)
    shared = max(processes, 1) if pipeline.device.type == "cpu" else 1
    kept = None if pipeline.kept is None else most_held(schedule, pipeline.kept.found)
    parameters = dict(pipeline.module.named_parameters())
    found, counted = [], set[str]()
    for stage in schedule.stages(pipeline.ranks.position):
        names = [name for name in home.held[stage] if name not in counted and name in parameters]
        counted.update(names)
        own = [parameters[name] for name in names if not is_fake(parameters[name])]
        gradients = [p.grad for p in own if p.grad is not None]
        found.append(
            StageMemory(
                stage=stage,
                rank=pipeline.ranks.position,
                weight_bytes=_bytes_of(own),
                gradient_bytes=_bytes_of(gradients),
                optimizer_bytes=_state_bytes(pipeline, own),
                activation_bytes=None if kept is None else kept[stage],
                peak_bytes=stats["peak_bytes"],
                device_bytes=stats["total_bytes"] // shared,
                predicted_bytes=None if ledger is None else ledger.stages[stage].total_bytes,
                traced_bytes=None if ledger is None else _traced_bytes(ledger, stage),
                stats=stats,
            )
        )
    return found


def gather_memory(pipeline: Pipeline, processes: int) -> tuple[StageMemory, ...]:
    """What all stages hold, in their order; all ranks call it."""
    own = own_memory(pipeline, processes)
    with at(pipeline.ranks, "gathers what the stages hold"):
        parts = gather_objects(pipeline.ranks, own) or []
    return tuple(sorted((one for part in parts for one in part), key=lambda one: one.stage))


def extend_device_stats(
    accelerator: Any, gather: Callable[[], tuple[StageMemory, ...]]
) -> Callable[[], None]:
    """Lets `DeviceStatsMonitor` show every stage; returns what undoes it.

    Args:
        accelerator: Lightning's, of which `get_device_stats` is replaced. All ranks call it.
        gather: What all stages hold.
    """
    own = accelerator.get_device_stats

    def stats(device: Any) -> dict[str, Any]:
        return {**own(device), **device_stats(gather())}

    vars(accelerator)["get_device_stats"] = stats
    return lambda: vars(accelerator).pop("get_device_stats", None)


def device_stats(found: Iterable[StageMemory]) -> dict[str, float]:
    """For each stage the bytes of its tensors and what its device, or process, says.

    On the CPU `rss_bytes` and `peak_rss_bytes` of the process, elsewhere the allocator's
    `allocated_bytes`, `peak_bytes` and `reserved_bytes`, and everywhere `total_bytes`.
    """
    values: dict[str, float] = {}
    for one in found:
        counted = {
            "tensor_bytes": one.tensor_bytes,
            "weight_bytes": one.weight_bytes,
            "gradient_bytes": one.gradient_bytes,
            "optimizer_bytes": one.optimizer_bytes,
            "activation_bytes": one.activation_bytes or one.traced_bytes or 0,
            **(one.stats if "reserved_bytes" in one.stats else _of_process(one.stats)),
        }
        values |= {f"stage_{one.stage}.{name}": float(n) for name, n in counted.items()}
    return values


def _of_process(stats: dict[str, int]) -> dict[str, int]:
    names = {"allocated_bytes": "rss_bytes", "peak_bytes": "peak_rss_bytes"}
    return {names.get(name, name): number for name, number in stats.items()}


def relief(pipeline: Pipeline, rank: int) -> str:
    """What would make the fullest stages of a rank smaller first; empty if nothing is known."""
    if pipeline.profile is None:
        return ""
    profile, schedule = _profile_of_last(pipeline), _trained(pipeline)
    starts = pipeline.home.starts
    found = remedies(profile, starts, schedule, rank, checkpointing=pipeline.again)
    return next((remedy.text for remedy in found if remedy.saved_bytes), "")


def note_shortage(error: BaseException, pipeline: Pipeline | None) -> None:
    """Adds to an out-of-memory error what the stage holds and what to do; others stay as they are.

    The error keeps its type, so whoever catches it still does.
    """
    if pipeline is None or not is_out_of_memory(error):
        return
    text = f"\nout of memory on {pipeline.ranks}\n{_shortage(pipeline)}"
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        error.args = (f"{error}\n{text}", *error.args[1:])


def _shortage(pipeline: Pipeline) -> str:
    if pipeline.profile is None:
        held_bytes = _bytes_of(p for p in pipeline.module.parameters() if not is_fake(p))
        return (
            f"The model was not cut for training yet, so this rank holds all its weights, "
            f"{format_bytes(held_bytes)}. `lightning-pipe plan --config ... --memory ...` says "
            "whether it fits and on how many devices"
        )
    action = pipeline.engine.progress.action
    stats = memory_stats(pipeline.device)
    text = explain_shortage(
        _profile_of_last(pipeline),
        pipeline.home.starts,
        _trained(pipeline),
        pipeline.ranks.position,
        stage=None if action is None else action.stage,
        checkpointing=pipeline.again,
        device_bytes=None if pipeline.device.type == "cpu" else stats["total_bytes"],
    )
    held = ", ".join(
        f"{name.removesuffix('_bytes')} {format_bytes(number)}" for name, number in stats.items()
    )
    return f"{text}\nmeasured here: {held}"


def _trained(pipeline: Pipeline) -> Schedule:
    """The schedule of the last training step, or of the next one."""
    schedule, plan = pipeline.schedule, pipeline.plan
    assert plan is not None
    if schedule is not None and schedule.has_backward:
        return schedule
    return pipeline.layout.make(plan.num_microbatches)


def _profile_of_last(pipeline: Pipeline) -> Profile:
    """The profile, for the rows of the micro-batches that run now."""
    profile, plan = pipeline.profile, pipeline.plan
    assert profile is not None
    assert plan is not None
    rows = profile.rows * plan.num_microbatches / _trained(pipeline).num_microbatches
    return profile.for_rows(max(1, math.ceil(rows)))


def _ledger(pipeline: Pipeline) -> Ledger | None:
    if pipeline.profile is None:
        return None
    return make_ledger(
        _profile_of_last(pipeline),
        pipeline.home.starts,
        _trained(pipeline),
        checkpointing=pipeline.again,
    )


def _traced_bytes(ledger: Ledger, stage: int) -> int:
    return ledger.stages[stage].activation_bytes * ledger.stages[stage].in_flight


def _state_bytes(pipeline: Pipeline, parameters: Iterable[Tensor]) -> int:
    own = list(parameters)
    states = [optimizer.state.get(p, {}) for optimizer in pipeline.optimizers for p in own]
    found = [t for state in states for t in tensors(list(state.values())) if t.dim()]
    return _bytes_of(found)


def _bytes_of(found: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    local = map(part_of, found)
    sizes = {storage_key(tensor): _tensor_bytes(tensor) for tensor in local}
    return sum(sizes.values())


def _tensor_bytes(tensor: Tensor) -> int:
    if tensor.is_sparse:
        parts = (tensor._indices(), tensor._values())
        return sum(part.numel() * part.element_size() for part in parts)
    return tensor.numel() * tensor.element_size()
