"""Run all stages of a cut step in one process and compare with the uncut step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tests.zoo.modules import Case
from torch import Tensor, nn

from lightning_pipe.cuts import lay
from lightning_pipe.home import Home
from lightning_pipe.planning.balance import partition
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.copies import other_names
from lightning_pipe.split.cut import StepCut, place, place_like
from lightning_pipe.split.ends import StepResult
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.ownership import Ownership, parameters_of_stages
from lightning_pipe.split.paths import Paths
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.rng import KeyedRandom
from lightning_pipe.split.streams import number_of
from lightning_pipe.split.trace import Trace
from lightning_pipe.split.tree import map_tensors, tensors
from lightning_pipe.ways import look_around, more_parameters

MICROBATCHES = 2


@dataclass
class Parity:
    """How far the cut step is from the uncut one."""

    loss_error: float
    gradient_error: float
    missing: list[str]
    wrong_buffers: list[str]
    cut: StepCut
    #: the cut of each micro-batch, of steps that call other units for each
    ways: Sequence[StepCut] = ()
    losses: Sequence[float] = ()


class TanhBlock(nn.Module):
    """A unit of the plainest kind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@contextmanager
def own_streams(
    root: nn.Module, key: int, draws: Callable[[nn.Module], bool], generators: Sequence[Any] = ()
) -> Iterator[None]:
    """Give every module that draws its documented seeds: hooks that know nothing of traces."""
    keyed, calls = KeyedRandom(key, generators=generators), Counter[str]()
    states: list[Any] = []

    def begin(name: str) -> None:
        states.append(keyed.state())
        keyed.seed(number_of(name), calls[name])
        calls[name] += 1

    handles = []
    for name, module in root.named_modules():
        if name and draws(module):
            before = module.register_forward_pre_hook(lambda *_, name=name: begin(name))
            after = module.register_forward_hook(lambda *_: keyed.put_back(states.pop()))
            handles += [before, after]
    keyed.begin()
    yield
    for handle in handles:
        handle.remove()


def piece(batch: Any, microbatch: int) -> Any:
    """Return one micro-batch."""
    return map_tensors(lambda t: t.chunk(MICROBATCHES)[microbatch].clone() if t.dim() else t, batch)


def random_starts(num_calls: int, num_stages: int, seed: int) -> tuple[int, ...]:
    """Cut anywhere."""
    inner = random.Random(seed).sample(range(1, num_calls), num_stages - 1)
    return (0, *sorted(inner))


def compare(
    build: Callable[[], Case],
    num_stages: int,
    starts: Callable[[int], Sequence[int]] | None = None,
    *,
    glue_values: bool = True,
    again: bool = False,
    first_key: int = 11,
) -> Parity:
    """Cut ``build()`` into stages, run two micro-batches forward and backward, compare."""
    keys = [first_key + m for m in range(MICROBATCHES)]
    reference = build()
    start_state = {k: v.clone() for k, v in reference.module.state_dict().items()}
    trace = trace_step(
        reference.module, reference.loss, piece(reference.batch, 0), num_stages=num_stages
    )
    paths = Paths(trace, seen=[trace])
    if trace.draws or trace.batch_reads:
        paths = _look_around(reference, trace, num_stages)
        trace = paths.best
    for name, value in reference.module.state_dict().items():
        assert torch.equal(value, start_state[name]), f"the trace changed {name}"
    if starts is None:
        chosen = partition([call.parameters + 1 for call in trace.calls], num_stages)
    else:
        chosen = tuple(starts(len(trace.calls)))
    cut = StepCut(trace, place(trace, chosen), glue_values=glue_values)
    held, cuts = parameters_of_stages(reference.module, cut), [cut] * MICROBATCHES
    if paths.vary:
        held, cuts = _own_ways(reference, paths, cut, chosen, keys)
    losses = []
    for m in range(MICROBATCHES):
        seen = cuts[m].trace
        whole = StageProgram(StepCut(seen, place(seen, (0,))), 0, reference.module)
        batch = piece(reference.batch, m)
        result = whole.run(lambda batch=batch: reference.loss(batch), (), key=keys[m])
        assert isinstance(result, StepResult)
        (result.value / MICROBATCHES).backward()
        losses.append(result.value.item())

    cases = []
    for stage in range(num_stages):
        case = build()
        case.module.load_state_dict(start_state)
        if any("installs hooks" in note for note in trace.notes):  # each rank has its own trace
            trace_step(case.module, case.loss, piece(case.batch, 0), num_stages=num_stages)
        Ownership(case.module, held[stage]).drop_foreign()
        cases.append(case)
    names = frozenset(trace.unit_names) if again else frozenset()
    programs = [
        [StageProgram(one, s, case.module, again=names) for s, case in enumerate(cases)]
        for one in cuts
    ]
    if again:
        assert any(program.runs_again for program in programs[0])
    got = _run(cases, programs, keys)
    return Parity(
        max(abs(a - b) / (abs(a) + 1e-12) for a, b in zip(losses, got, strict=True)),
        *_gradients(reference, cases),
        _buffers(reference, cases, cut),
        cut,
        cuts,
        got,
    )


def _look_around(case: Case, trace: Trace, num_stages: int) -> Paths:
    def other(**arguments: Any) -> Trace:
        return trace_step(
            case.module, case.loss, piece(case.batch, 0), num_stages=num_stages, **arguments
        )

    return look_around(case.module, trace, UnitMemo(), other)


def _own_ways(
    case: Case, paths: Paths, cut: StepCut, starts: tuple[int, ...], keys: list[int]
) -> tuple[tuple[frozenset[str], ...], list[StepCut]]:
    """What the stages hold, and the cut of each micro-batch along its own way."""
    units = paths.homes(cut.stages_of_units())
    held = parameters_of_stages(case.module, cut, more_parameters(case.module, paths, units, cut))
    ranks = tuple(range(cut.num_stages))
    home = Home(cut, starts, ranks, held, units, Ownership(case.module, frozenset()))
    cuts = []
    for m, key in enumerate(keys):
        seen = trace_step(
            case.module,
            case.loss,
            piece(case.batch, m),
            num_stages=cut.num_stages,
            key=key,
            like=paths.best,
        )
        cuts.append(lay(seen, home, training=True)[0])
    return held, cuts


def evaluate(
    build: Callable[[], Case],
    step: Callable[[Case, Any], Any],
    num_stages: int,
    starts: Callable[[int], Sequence[int]] | None = None,
) -> float:
    """Lay an evaluation step over the stages of the training step; its error to a plain call."""
    case = build()
    train = trace_step(case.module, case.loss, piece(case.batch, 0), num_stages=num_stages)
    if starts is None:
        chosen = partition([call.parameters + 1 for call in train.calls], num_stages)
    else:
        chosen = tuple(starts(len(train.calls)))
    laid = StepCut(train, place(train, chosen))
    homes = laid.stages_of_units()
    homes |= other_names(case.module, homes)
    held = parameters_of_stages(case.module, laid)
    case.module.eval()
    with torch.no_grad():
        expected = step(case, case.batch)
        trace = trace_step(
            case.module, lambda b: step(case, b), case.batch, num_stages=num_stages, like=train
        )
        segments = place_like(trace, homes, num_stages=num_stages)
        cut = StepCut(trace, segments.segment_of_call, num_stages=len(segments.home))
        values: Any = ()
        for segment, home in enumerate(segments.home):
            stage = build()
            stage.module.eval()
            Ownership(stage.module, held[home]).drop_foreign()
            program = StageProgram(cut, segment, stage.module)
            values = program.run(lambda stage=stage: step(stage, stage.batch), values, key=1)
    assert isinstance(values, StepResult)
    pairs = zip(tensors(expected), tensors(values.value), strict=True)
    return max(float((a - b).abs().max() / (a.abs().max() + 1e-12)) for a, b in pairs)


def _run(cases: list[Case], programs: list[list[StageProgram]], keys: list[int]) -> list[float]:
    losses = []
    for m in range(MICROBATCHES):
        values: tuple[Tensor, ...] = ()
        kept = []
        for case, program in zip(cases, programs[m], strict=True):
            received = tuple(
                v.detach().clone().requires_grad_(spec.requires_grad)
                for v, spec in zip(values, program.inputs, strict=True)
            )
            batch = piece(case.batch, m)
            out = program.run(
                lambda case=case, batch=batch: case.loss(batch), received, key=keys[m]
            )
            kept.append((program, received, out))
            values = () if isinstance(out, StepResult) else out
        losses.append(out.value.item())
        _backward(kept)
    return losses


def _backward(kept: list[Any]) -> None:
    grads: dict[str, Tensor] = {}
    for program, received, out in reversed(kept):
        relayed = {spec.name for spec in program.inputs} & {s.name for s in program.outputs}
        if isinstance(out, StepResult):
            (out.value / MICROBATCHES).backward()
        else:
            pairs = [
                (value, grads[spec.name])
                for value, spec in zip(out, program.outputs, strict=True)
                if spec.name not in relayed and spec.name in grads and value.requires_grad
            ]
            if pairs:
                torch.autograd.backward([v for v, _ in pairs], [g for _, g in pairs])
        upstream: dict[str, Tensor] = {}
        for value, spec in zip(received, program.inputs, strict=True):
            total = value.grad
            if spec.name in relayed and spec.name in grads:
                total = grads[spec.name] if total is None else total + grads[spec.name]
            if total is not None:
                upstream[spec.name] = total
        grads = upstream


def _gradients(reference: Case, cases: list[Case]) -> tuple[float, list[str]]:
    replicas = [dict(case.module.named_parameters()) for case in cases]
    scale = max(
        (float(p.grad.abs().max()) for p in reference.module.parameters() if p.grad is not None),
        default=0.0,
    )
    worst, missing = 0.0, []
    for name, parameter in reference.module.named_parameters():
        found = [r[name].grad for r in replicas if r[name].grad is not None]
        if parameter.grad is None:
            missing += [f"{name} has one"] if any(g.any() for g in found) else []
        elif not found:
            missing += [name] if parameter.grad.any() else []
        else:
            total = torch.stack(found).sum(0)
            error = float((total - parameter.grad).abs().max())
            worst = max(worst, error / max(float(parameter.grad.abs().max()), 1e-3 * scale, 1e-12))
    return worst, missing


def _buffers(reference: Case, cases: list[Case], cut: StepCut) -> list[str]:
    wrong = []
    for name, buffer in reference.module.named_buffers():
        owners = [
            cut.stage_of_call[call.index]
            for call in cut.trace.calls
            if name.startswith(call.unit + ".")
        ]
        got = dict(cases[owners[0] if owners else -1].module.named_buffers())[name]
        if not torch.allclose(got.double(), buffer.double(), rtol=1e-5, atol=1e-7):
            wrong.append(name)
    return wrong
