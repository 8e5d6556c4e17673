"""From a trace to what the planner reads: work, bytes and weights of every unit call."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe.errors import CutError
from lightning_pipe.planning.profile import Profile, UnitProfile, Weight
from lightning_pipe.split._fake import GHOSTS, as_fake, inside_step
from lightning_pipe.split.cut import StepCut
from lightning_pipe.split.ownership import parameters_of_stages
from lightning_pipe.split.parted import held_numbers
from lightning_pipe.split.trace import Trace, UnitCall
from lightning_pipe.split.tree import tensors

_SAMPLE = 64  # side of the small tensor on which an optimizer is tried that cannot run on fakes


def profile_of(
    root: nn.Module, trace: Trace, *, rows: int, optimizer_bytes: Mapping[str, int] | None = None
) -> Profile:
    """Describes a traced step for the planner.

    Args:
        root: The module that was traced.
        trace: One training step of one micro-batch.
        rows: Rows of that micro-batch.
        optimizer_bytes: Bytes of optimizer state by the first name of a parameter, as
            ``optimizer_state_bytes`` finds them.
    """
    state = optimizer_bytes or {}
    weights = {
        name: Weight(
            parameter.numel(),
            held_numbers(parameter) * parameter.element_size(),
            held_numbers(parameter) * parameter.element_size() if parameter.requires_grad else 0,
            state.get(name, 0) if parameter.requires_grad else 0,
        )
        for name, parameter in root.named_parameters()
    }
    finest = _finest(trace)
    held = parameters_of_stages(root, finest) if trace.calls else ()
    units = []
    for call in trace.calls:
        stage = finest.stage_of_call[call.index]
        ends = call.index + 1 < len(trace.calls)
        can_cut = ends and finest.stage_of_call[call.index + 1] > stage
        crossing = finest.crossing[stage] if can_cut else ()
        metas = [trace.meta(key) for key in crossing]
        units.append(
            UnitProfile(
                unit=call.unit,
                flops=call.flops,
                weights=tuple(sorted(held[stage])),
                saved=_before(trace, call) + call.saved,
                glue_saved=trace.glue_saved[call.index + 1],
                sends_glue=any(len(key) == 3 and key[1] > call.index for key in crossing),
                can_cut_after=can_cut or not ends,
                input_bytes=_input_bytes(trace, call),
                output_bytes=sum(meta.wire_bytes for meta in metas),
                gradient_bytes=sum(meta.wire_bytes for meta in metas if meta.requires_grad),
            )
        )
    return Profile(tuple(units), weights, rows, notes=trace.notes)


def _finest(trace: Trace) -> StepCut:
    """The step cut after every call after which it can be cut."""
    calls = len(trace.calls)
    try:
        return StepCut(trace, tuple(range(calls)))
    except CutError:
        stage_of_call = [0]
        for first in range(1, calls):
            try:
                StepCut(trace, (0,) * first + (1,) * (calls - first))
                stage_of_call.append(stage_of_call[-1] + 1)
            except CutError:
                stage_of_call.append(stage_of_call[-1])
        return StepCut(trace, tuple(stage_of_call))


def _before(trace: Trace, call: UnitCall) -> tuple[tuple[int, int], ...]:
    """What is kept before the first call belongs to it."""
    return trace.glue_saved[0] if call.index == 0 else ()


def _input_bytes(trace: Trace, call: UnitCall) -> int:
    keys = [source for source in call.inputs if not isinstance(source, str)]
    return sum(trace.meta(key).wire_bytes for key in keys)


def optimizer_state_bytes(root: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Finds out what an optimizer keeps for each parameter, by letting a copy of it take a step.

    The step runs on tensors without data of the real shapes; for an optimizer whose code needs
    values, on a small real tensor, and the result is scaled. The optimizer itself is not touched.

    Args:
        root: The module; its parameters may be fakes.
        optimizer: The user's optimizer.

    Returns:
        Bytes by the first name of the parameter; frozen ones are left out.
    """
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found: dict[str, int] = {}
    for group in optimizer.param_groups:
        known: dict[tuple[tuple[int, ...], torch.dtype], int] = {}
        for parameter in group["params"]:
            if not parameter.requires_grad or id(parameter) not in names:
                continue
            kind = (tuple(parameter.shape), parameter.dtype)
            if kind not in known:
                known[kind] = _state_bytes(optimizer, group, parameter)
            found[names[id(parameter)]] = known[kind]
    return found


_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _state_bytes(optimizer: Optimizer, group: Mapping[str, object], parameter: Tensor) -> int:
    try:
        with inside_step(), GHOSTS:
            fake = nn.Parameter(torch.empty_like(as_fake(parameter.detach())))
            fake.grad = torch.empty_like(fake)
            state = _after_a_step(optimizer, group, fake)
            return sum(held_numbers(t) * t.element_size() for t in state)
    except Exception:  # its code needs values, or a device that is not here
        shape = [min(size, _SAMPLE + place) for place, size in enumerate(parameter.shape)]
        real = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype))
        real.grad = torch.ones_like(real)
    try:
        state = _after_a_step(optimizer, group, real)
    except Exception:  # its step needs a closure, or more than one parameter: taken for Adam's
        return 2 * held_numbers(parameter) * parameter.element_size()
    return sum(_full_bytes(t, real, parameter) for t in state)


def _full_bytes(state: Tensor, sample: Tensor, parameter: Tensor) -> int:
    """Bytes that a state tensor would have for the whole parameter; it may lack some dimensions."""
    if state.dim() != sample.dim():
        return state.numel() * state.element_size()
    count = 1
    for have, small, full in zip(state.shape, sample.shape, parameter.shape, strict=True):
        count *= full if have == small else have
    return count * state.element_size()


def _after_a_step(
    optimizer: Optimizer, group: Mapping[str, object], parameter: nn.Parameter
) -> list[Tensor]:
    """The state that a copy of the optimizer has for a parameter; step counters are left out."""
    trial = copy.copy(optimizer)
    trial.param_groups = [{**group, "params": [parameter]}]
    trial.state = defaultdict(dict)
    trial.__dict__.pop("step", None)  # a scheduler's wrapper, which steps the original
    trial.__dict__.update({name: OrderedDict() for name in vars(trial) if name in _STEP_HOOKS})
    with torch.no_grad():
        trial.step()
    return [t for t in tensors(list(trial.state.get(parameter, {}).values())) if t.dim()]
