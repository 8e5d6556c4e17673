"""Shapes at sizes that were never traced, and what must not be guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_pipe.split.analyse import trace_step
from lightning_pipe.split.memo import UnitMemo
from lightning_pipe.split.shapes import Family, Sample, _Rules
from lightning_pipe.split.signature import signature


@pytest.mark.parametrize(
    ("samples", "sizes", "values", "expected"),
    [
        ([(4, 5), (4, 9)], (4, 3), (5, 9), 3),
        ([(4, 5), (4, 9)], (4, 3), (11, 19), 7),  # 2 L + 1
        ([(4, 5), (4, 9)], (4, 3), (7, 7), 7),
        ([(4, 5), (4, 9)], (3, 9), (5, 9), None),  # 4 never changed before
        ([(5, 5), (9, 9)], (3, 4), (5, 9), None),  # equal so far, now not
        ([(4, 5), (3, 9)], (3, 7), (5, 9), 7),
        ([(4, 5), (8, 9)], (4, 9), (9, 13), None),  # rows + 5 or length + 4
        ([(4, 5), (4, 9), (3, 5)], (3, 9), (20, 36, 15), 27),  # rows x length
        ([(4, 5), (4, 9), (3, 5)], (3, 7), (9, 13, 8), 10),  # rows + length
        ([(10,), (20,)], (15,), (5, 10), None),  # halves: rounded how?
        ([(10,), (20,), (15,), (21,)], (17,), (5, 10, 7, 10), 8),
        ([(10,), (20,)], (15,), (10, 41), None),
    ],
)
def test_a_number_is_derived_by_the_simplest_rule_or_not_at_all(samples, sizes, values, expected):
    rules = _Rules.of(samples, sizes)
    assert (None if rules is None else rules.number(values)) == expected


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.num_calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.num_calls += 1
        return h + self.linear(h).tanh()


class _Stack(nn.Module):
    """Equal blocks, attention-like scores, a branch on the length."""

    def __init__(self, longest: int = 10**6) -> None:
        super().__init__()
        self.longest = longest
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.head = nn.Linear(8, 11)
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens)
        for block in self.blocks:
            self.calls += 1
            h = h + block(h)
            if tokens.shape[1] > self.longest:
                h = h.relu()
        scores = h @ h.transpose(1, 2)
        return F.cross_entropy(self.head(scores @ h).flatten(0, 1), tokens.flatten())


def _tokens(rows: int, length: int) -> torch.Tensor:
    return torch.arange(rows * length).reshape(rows, length) % 11


def _trace(model, batch, **kwargs):
    return trace_step(model, model, batch, num_stages=3, **kwargs)


def _family(model, *shapes):
    family = Family()
    for shape in shapes:
        batch = _tokens(*shape)
        family.add(Sample(signature(batch).sizes, _trace(model, batch), None))
    return family


def test_a_derived_trace_has_the_shapes_of_a_real_one():
    model = _Stack()
    family = _family(model, (4, 5), (4, 9), (2, 5))
    derived = family.derive((3, 7))
    real = _trace(model, _tokens(3, 7))
    assert derived is not None
    assert len(list(real.keys())) > 10
    for key in real.keys():  # noqa: SIM118 - a method
        assert derived.trace.meta(key) == real.meta(key)
    assert _family(model, (4, 5)).derive((4, 7)) is None
    assert _family(model, (4, 5), (4, 9)).derive((3, 9)) is None


def test_another_way_through_the_step_is_another_group():
    family = _family(_Stack(longest=8), (4, 5), (4, 9))
    assert family.derive((4, 7)) is None
    family = _family(_Stack(longest=8), (4, 5), (4, 9), (4, 3), (4, 12))
    assert [family.derive((4, n)).trace.script[2] for n in (4, 10)] == [
        ("add",),
        ("add", "relu"),
    ]


def test_a_trace_from_memory_is_the_same_trace():
    model = _Stack()
    first = _trace(model, _tokens(4, 5))
    memo = UnitMemo()
    memo.learn(model, first)
    runs = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: runs.append(out.shape))
    seen = []
    for block in model.blocks:
        block.linear.register_forward_hook(lambda module, args, out: seen.append(1))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for shape in ((4, 9), (3, 7)):
                short = _trace(model, _tokens(*shape), like=first, memo=memo)
                assert (len(runs), len(seen)) == (6, 1), "one block runs, all hooks"
                runs.clear(), seen.clear()
                full = _trace(model, _tokens(*shape))
                assert short.digest_text() == full.digest_text()
                for name in ("script", "written", "changed_attributes", "changed_buffers"):
                    assert getattr(short, name) == getattr(full, name)
                assert len(full.changed_buffers) == 6
                runs.clear(), seen.clear()
    assert model.calls == 0
