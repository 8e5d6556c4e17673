"""What a trace sees, what it leaves behind (nothing), and what it refuses."""

from __future__ import annotations

import copy
import functools
import random
import string
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.split.parity import compare
from tests.zoo.modules import MODELS, Case, Stack
from torch import Tensor, nn
from torchmetrics import ClasswiseWrapper
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipe.errors import CutError
from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.cut import StepCut, place, place_like
from lightning_pipe.split.ends import Skipped, StepResult
from lightning_pipe.split.memo import Elsewhere, SharedOutcomes, UnitMemo
from lightning_pipe.split.ownership import Ownership, parameters_of_stages
from lightning_pipe.split.program import StageProgram
from lightning_pipe.split.units import find_units
from lightning_pipe.states import whole


def stack(num_blocks: int = 6) -> Stack:
    return Stack([nn.Linear(16, 16) for _ in range(num_blocks)], lambda block, h: h + block(h))


def trace(module: nn.Module, step: Any = None, num_stages: int = 2, **kwargs: Any) -> Any:
    step = step or (lambda b: module(b["x"]).pow(2).mean())
    return trace_step(module, step, {"x": torch.randn(4, 8)}, num_stages=num_stages, **kwargs)


def test_units_are_the_blocks_and_what_stands_beside_them() -> None:
    assert list(find_units(stack(), 2)) == ["first", *(f"blocks.{i}" for i in range(6)), "last"]


def test_a_unit_that_is_too_big_is_opened() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    assert list(find_units(module, 2)) == ["0", "1.0", "1.1"]


def test_a_module_with_two_names_is_one_unit() -> None:
    module = stack(2)
    module.again = module.blocks[0]
    assert sum(unit is module.blocks[0] for unit in find_units(module, 2).values()) == 1


def test_attention_is_never_opened() -> None:
    module = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "head": nn.Linear(8, 8)})
    assert "attention" in find_units(module, 4)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_trace_says_whether_anything_is_recomputed(reentrant: bool, inside: bool) -> None:
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)

    class Again(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return again(super().forward, x)  # type: ignore[no-any-return]

    block = Again if inside else nn.Linear
    blocks = [block(16, 16) for _ in range(4)]
    module = Stack(blocks, lambda b, h: h + (b(h) if inside else again(b, h)))
    assert trace(module).recomputes
    assert not trace(stack()).recomputes


def test_costs_of_a_call_are_counted() -> None:
    call = trace(stack()).calls[1]
    assert (call.unit, call.parameters, call.parameter_bytes) == ("blocks.0", 272, 1088)
    assert call.flops == 2 * 4 * 16 * 16
    assert call.activation_bytes == 4 * 16 * 4  # its input


def test_residuals_in_the_glue_send_one_tensor() -> None:
    seen = trace(stack(), num_stages=4)
    cut = StepCut(seen, place(seen, (0, 2, 4, 6)))
    assert [len(boundary) for boundary in cut.boundaries] == [1, 1, 1]
    relayed = StepCut(seen, place(seen, (0, 2, 4, 6)), glue_values=False)
    assert [len(boundary) for boundary in relayed.boundaries] == [2, 4, 6]


def test_a_trace_leaves_nothing_behind() -> None:
    class Messy(Stack):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(x.shape)
            self.cache["last"] = x
            self.running.mul_(0.5).add_(x.mean())
            self.new_attribute = helper(x.shape[1])
            return super().forward(x) + random.random() + np.random.rand() + torch.rand(())

    @functools.lru_cache
    def helper(width: int) -> Tensor:
        return torch.ones(width)

    module = Messy([nn.BatchNorm1d(16) for _ in range(3)], lambda block, h: block(h))
    module.calls, module.seen, module.cache = 0, [], {}
    module.register_buffer("running", torch.ones(()))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    hooks = sum(len(m._forward_hooks) for m in module.modules())
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    batch = {"x": torch.ones(4, 8)}
    seen = trace_step(module, lambda b: module(b["x"]).mean(), batch, num_stages=2)
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert (module.calls, module.seen, module.cache) == (0, [], {})
    assert "new_attribute" not in vars(module)
    assert not any(k in vars(m) for m in module.modules() for k in ("forward", "_call_impl"))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in module.parameters())
    assert sum(len(m._forward_hooks) for m in module.modules()) == hooks
    assert torch.equal(helper(8) + 1, torch.full((8,), 2.0)), "a fake stayed in the cache"
    assert {name for _, name in seen.changed_attributes} >= {"calls", "seen", "cache"}
    assert "running" in seen.changed_buffers


def test_a_value_that_is_read_in_the_tail_needs_no_real_trace() -> None:
    module = stack()

    def step(batch: Any) -> Tensor:
        loss = module(batch["x"]).pow(2).mean()
        if torch.isnan(loss) or loss.item() < 0:
            raise ValueError("the loss is not finite")
        return loss

    assert trace(module, step).on_fakes


def test_a_condition_on_a_block_is_traced_for_real_once() -> None:
    module = MODELS["branch_that_is_not_taken"]().module
    first = trace(module)
    assert not first.on_fakes
    cut = StepCut(first, place(first, (0, 4)))
    Ownership(module, parameters_of_stages(module, cut)[0]).drop_foreign()
    again = trace_step(
        module, lambda b: module(b["x"]).mean(), {"x": torch.randn(3, 8)}, num_stages=2, like=first
    )
    assert again.on_fakes
    assert [c.unit for c in again.calls] == [c.unit for c in first.calls]


def test_a_gradient_inside_the_step_is_refused() -> None:
    module = stack()

    def step(batch: Any) -> Tensor:
        x = batch["x"].requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return grad.pow(2).mean()

    with pytest.raises(CutError, match="grad inside itself"):
        trace(module, step)
    assert trace(module, step, num_stages=1).calls == ()


def test_the_users_own_error_comes_through() -> None:
    with pytest.raises(KeyError, match="missing"):
        trace(stack(), lambda b: b["missing"])


def test_other_steps_lie_over_the_stages_of_training() -> None:
    module = stack()
    train = trace(module)
    cut = StepCut(train, place(train, (0, 4)))
    homes = {call.unit: {cut.stage_of_call[call.index]} for call in train.calls}

    def twice(batch: Any) -> Tensor:
        return module(module(batch["x"]).expand(-1, 8))

    segments = place_like(trace(module, twice), homes, num_stages=2)
    assert segments.home == (0, 1, 0, 1)
    part = place_like(trace(module, lambda b: module.first(b["x"])), homes, num_stages=2)
    assert part.home == (0, 1), "the tail is always on the last stage"


def _masks(cuts: tuple[int, ...]) -> list[Tensor]:
    """Train one micro-batch over the given cut and return everything random that the step made."""
    torch.manual_seed(0)
    module = Stack([nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)) for _ in range(4)], _noisy)
    batch = torch.randn(4, 8)
    seen = trace_step(module, lambda b: module(b).sum(), batch, num_stages=4)
    cut = StepCut(seen, place(seen, cuts))
    values: tuple[Tensor, ...] = ()
    torch.manual_seed(99)  # the global generator has no say
    for stage in range(cut.num_stages):
        out = StageProgram(cut, stage, module).run(
            lambda: [random.random(), np.random.rand(), module(batch)], values, key=5
        )
        values = out if isinstance(out, tuple) else ()
    assert isinstance(out, StepResult)
    return [torch.tensor(out.value[:2]), out.value[2].detach()]


def _noisy(block: nn.Module, h: Tensor) -> Tensor:
    return block(F.dropout(h, 0.2)) + torch.randn_like(h) * torch.rand(()) + random.random()


def test_randomness_does_not_depend_on_the_cut() -> None:
    whole = _masks((0,))
    for cuts in ((0, 3), (0, 1, 4), (0, 1, 2, 5)):
        for got, expected in zip(_masks(cuts), whole, strict=True):
            assert torch.equal(got, expected)


def test_two_equal_layers_do_not_share_a_mask() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)))
    for layer in module:
        nn.init.constant_(layer[0].weight, 0.0)
        nn.init.constant_(layer[0].bias, 1.0)
    outputs: list[Tensor] = []
    for layer in module:
        layer.register_forward_hook(lambda m, args, out: outputs.append(out))
    seen = trace_step(module, lambda b: module(b).sum(), torch.randn(16, 8), num_stages=1)
    outputs.clear()
    StageProgram(StepCut(seen, place(seen, (0,))), 0, module).run(
        lambda: module(torch.randn(16, 8)), (), key=1
    )
    assert not torch.equal(outputs[0] == 0, outputs[1] == 0)


def test_a_lost_write_is_an_error_not_a_stale_number() -> None:
    """Only at run time does the step write an earlier block's output into a tensor of the batch."""
    module = stack(2)
    sneak = [False]

    def step(batch: Tensor) -> Tensor:
        h = module.first(batch)
        memory = torch.zeros(4, 16)
        if sneak[0]:
            memory.copy_(h)
        return module.last(module.blocks[1](module.blocks[0](h))).mean() + memory.sum() * 2

    batch = torch.randn(4, 8)
    seen = trace_step(module, step, batch, num_stages=2)
    cut = StepCut(seen, place(seen, (0, 3)))
    values = StageProgram(cut, 0, module).run(lambda: step(batch), (), key=1)
    sneak[0] = True
    with pytest.raises(CutError, match="the step returns a tensor that another stage"):
        StageProgram(cut, 1, module).run(lambda: step(batch), values, key=1)


def test_another_order_of_calls_is_an_error() -> None:
    module = stack(4)
    skip = [False]

    def step(batch: Tensor) -> Tensor:
        h = module.first(batch)
        for block in module.blocks[skip[0] :]:
            h = block(h)
        return module.last(h).mean()

    batch = torch.randn(4, 8)
    seen = trace_step(module, step, batch, num_stages=2)
    skip[0] = True
    with pytest.raises(CutError, match=r"'blocks\.1' was called where 'blocks\.0'"):
        StageProgram(StepCut(seen, place(seen, (0, 3))), 0, module).run(
            lambda: step(batch), (), key=1
        )


def test_parameters_objects_come_back_filled() -> None:
    module = stack(2)
    held = module.blocks[1].weight
    value = held.detach().clone()
    owner = Ownership(module, frozenset({"first.weight", "first.bias"}))
    owner.drop_foreign()
    assert module.blocks[1].weight.shape == (16, 16)
    assert held.numel() == 16 * 16
    with pytest.raises(CutError, match="lives on another rank"):
        held.detach().sum().item()
    with pytest.raises(CutError, match=r"has no data for it|another stage"):
        _use_foreign(module)
    owner.restore({"blocks.1.weight": value})
    assert module.blocks[1].weight is held
    assert torch.equal(held, value)


def _use_foreign(module: Stack) -> None:
    seen = trace(module)
    cut = StepCut(seen, place(seen, (0, 2)))
    first = StageProgram(cut, 0, module)
    values = first.run(lambda: module(torch.ones(4, 8)).mean(), (), key=1)
    StageProgram(cut, 1, module).run(lambda: module(torch.ones(4, 8)).mean(), values, key=1)


@pytest.mark.parametrize("name", ["frozen_first", "frozen_middle", "frozen_last"])
def test_no_gradient_is_asked_for_where_nothing_needs_it(name: str) -> None:
    result = compare(MODELS[name], 3, lambda n: (0, 3, 6))
    wanted = [any(spec.requires_grad for spec in b) for b in result.cut.boundaries]
    assert (
        wanted
        == {
            "frozen_first": [False, True],
            "frozen_middle": [True, True],
            "frozen_last": [True, True],
        }[name]
    )


def test_tied_weights_are_on_both_stages_and_nothing_else_is() -> None:
    case: Case = MODELS["tied_embedding"]()
    seen = trace_step(case.module, case.loss, case.batch, num_stages=2)
    held = parameters_of_stages(case.module, StepCut(seen, place(seen, (0, 3))))
    assert held[0] & held[1] == {"embedding.weight"}
    assert held[0] | held[1] == {n for n, _ in case.module.named_parameters()}
    assert "position" in held[0]


def test_a_parameter_kept_elsewhere_cannot_be_read_while_it_is_away() -> None:
    module = stack(2)
    kept = list(module.parameters())
    values = {n: p.detach().clone() for n, p in module.named_parameters()}
    owner = Ownership(module, frozenset({"first.weight"}))
    owner.drop_foreign()
    with pytest.raises(CutError, match="lives on another rank"):
        float(sum(p.pow(2).sum() for p in kept))
    owner.restore(values)
    assert all(a is b for a, b in zip(kept, module.parameters(), strict=True))
    assert torch.isfinite(sum(p.pow(2).sum() for p in kept))


def test_weights_of_other_ranks_cannot_be_used_where_nobody_brings_them() -> None:
    module = stack(2)
    average = torch.zeros(16, 16)
    Ownership(module, frozenset({"first.weight"})).drop_foreign()
    foreign = module.blocks[0].weight
    with pytest.raises(CutError, match=r"blocks.0.weight, which lives on another rank"):
        average.mul_(0.9).add_(foreign, alpha=0.1)
    with pytest.raises(CutError, match="lives on another rank"):
        foreign.norm().item()
    assert torch.equal(foreign, foreign)
    assert not torch.equal(foreign, module.blocks[1].weight)


class Teller(string.Formatter):
    """Of a class that is not the user's alone: it is not looked into."""


def test_a_change_of_an_object_that_cannot_be_put_back_is_noted() -> None:
    module = stack()
    module.teller, module.unused = Teller(), Teller()

    def step(batch: Any) -> Tensor:
        module.teller.told = 1
        return module(batch["x"]).mean()

    notes = " ".join(trace(module, step).notes)
    assert "changes teller, a Teller, which cannot be put back" in notes
    assert "unused" not in notes


def test_conditions_on_the_loss_may_have_to_be_guessed_both_ways() -> None:
    module = stack()

    def step(batch: Any) -> Tensor | None:
        loss = module(batch["x"]).pow(2).mean()
        if torch.isnan(loss):
            return None
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")
        return loss

    def guarded(batch: Any) -> Tensor:
        value = step(batch)
        if value is None:
            raise Skipped
        return value

    assert trace(module, guarded).on_fakes


def test_a_tail_that_needs_values_is_not_traced_again() -> None:
    """A later trace has no weights of other ranks; what follows the last unit need not be known."""
    module = stack()

    def step(batch: Any) -> Tensor:
        early = module.first(batch["x"])
        out = module(batch["x"])
        chosen = out[out[:, 0] > 0]
        return chosen.sum() + early.mean() if len(chosen) else out.sum()

    first = trace(module, step)
    assert not first.on_fakes
    cut = StepCut(first, place(first, (0, 5)))
    Ownership(module, parameters_of_stages(module, cut)[0]).drop_foreign()
    again = trace_step(module, step, {"x": torch.randn(3, 8)}, num_stages=2, like=first)
    assert again.on_fakes
    assert [c.unit for c in again.calls] == [c.unit for c in first.calls]
    assert first.tail_unit_inputs <= again.tail_unit_inputs


def test_metrics_in_a_trace_give_what_has_their_structure() -> None:
    module = stack()
    wrapped = ClasswiseWrapper(MulticlassAccuracy(num_classes=3, average=None))
    module.metrics = {"train": [wrapped]}

    def step(batch: Any) -> Tensor:
        out = module(batch["x"])
        wide = torch.cat([out] * 3, -1)[:, :3]
        values = module.metrics["train"][0](wide, torch.zeros(len(out), dtype=torch.long))
        assert len(values) == 3
        return out.sum() + sum(values.values())

    assert trace(module, step).on_fakes
    assert wrapped.metric.update_count == 0


def test_a_module_with_two_names_is_itself_again_after_it_was_whole() -> None:
    module = nn.ModuleDict({"a": nn.Linear(2, 2)})
    module["b"] = module["a"]
    weight = module["a"].weight
    with whole(module, {"a.weight": torch.zeros(2, 2)}, {}):
        assert not module.state_dict()["b.weight"].any()
    assert module["a"].weight is weight


class _Choosing(nn.Module):
    """Its inner shapes depend on values, so it cannot run on fakes; it leaves a loss behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero().flatten()
        self.aux = x.pow(2).mean()
        return x.index_add(0, chosen, self.inner(x[chosen]))


def _halves(module: nn.Module, step: Any) -> list[tuple[nn.Module, Any]]:
    """Copies of a module with the weights of one stage each, and the first trace."""
    first = trace(module, step(module))
    cut = StepCut(first, place(first, (0, 3)))
    copies = []
    for stage in range(2):
        half = copy.deepcopy(module)
        Ownership(half, parameters_of_stages(half, cut)[stage]).drop_foreign()
        copies.append((half, first))
    return copies


def test_units_that_need_their_weights_are_traced_by_their_own_ranks_and_made_known() -> None:
    def step(module: nn.Module) -> Any:
        return lambda b: module(b["x"]).sum() + sum(block.aux for block in module.blocks)

    def told(half: nn.Module, first: Any, shared: SharedOutcomes) -> str | None:
        try:
            return trace_step(
                half, step(half), {"x": torch.randn(6, 8)}, num_stages=2, like=first, shared=shared
            ).digest_text()
        except Elsewhere:
            return None

    blocks = [_Choosing() for _ in range(4)]
    halves = _halves(Stack(blocks, lambda block, h: block(h)), step)
    ranks = [SharedOutcomes(), SharedOutcomes()]
    for _ in range(4):
        texts = [told(*half, rank) for half, rank in zip(halves, ranks, strict=True)]
        made = [dict(rank.made) for rank in ranks]
        if sum(rank.learn(made) for rank in ranks) == 0:
            break
    assert texts[0] is not None
    assert texts[0] == texts[1]


def test_ranks_with_different_weights_of_lstms_see_one_step() -> None:
    def step(module: nn.Module) -> Any:
        def run(batch: Any) -> Tensor:
            h = module.first(batch["x"])[:, None]
            for block in module.blocks:
                h = block(h)[0]
            return module.last(h).sum()

        return run

    stacked = Stack([nn.LSTM(16, 16, batch_first=True) for _ in range(4)], lambda block, h: h)
    traces = [
        trace_step(half, step(half), {"x": torch.randn(6, 8)}, num_stages=2, like=first)
        for half, first in _halves(stacked, step)
    ]
    assert traces[0].digest_text() == traces[1].digest_text()
    # they note their weights, and make new notes where other ones have come into their places
    assert not any(trace.changed_attributes or trace.ghost_attributes for trace in traces)


class _Sometimes(nn.Module):
    """A block between others that not every step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.extra, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.calls_extra = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.calls_extra:
            x = x + self.extra(x)
        return self.last(x)


def test_a_weight_that_the_first_trace_did_not_use_has_a_gradient_where_it_is_used() -> None:
    module, memo = _Sometimes(), UnitMemo()
    first = trace(module)
    memo.learn(module, first)
    assert "extra.weight" in first.without_gradient
    module.calls_extra = True
    for _ in range(2):  # in the second one all units do as they did before
        found = trace(module, like=first, memo=memo)
        memo.learn(module, found)
        assert "extra" in {call.unit for call in found.calls}
        assert not found.without_gradient
    module.calls_extra = False
    assert trace(module, like=first, memo=memo).without_gradient == first.without_gradient
