"""Changes of attributes, taken from micro-batches and merged into those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipe.tail.attributes import Attributes
from lightning_pipe.tail.kinds import Kind, Kinds


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = self.rows = self.right = self.last = 0
        self.loss_sum = self.loss_total = 0.0
        self.history, self.labels, self.table = [], [], {"deep": []}
        self.average = torch.zeros(2)
        self.confusion = torch.zeros(2, dtype=torch.int64)
        self.name = None

    def step(self, x):
        self.steps += 1
        self.rows += len(x)
        self.right += (x > 0).sum().item()
        self.last = 7
        self.loss_sum += x.mean().item()
        self.loss_total = self.loss_total + x.mean().item() * len(x)
        self.history.append(x.mean())
        self.labels.extend(x.tolist())
        self.table["deep"].append({"x": x, "n": len(x)})
        self.table["new"] = x.mean()
        self.average = 0.5 * self.average + 0.5 * x.mean()
        self.confusion += torch.tensor([len(x), 0])
        self.name = "set"


def run(module, pieces):
    attributes = Attributes(module)
    attributes.freeze()
    for piece in pieces:
        module.step(piece)
        attributes.take()
    attributes.apply(attributes.merged([len(piece) for piece in pieces]))


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 1, 1)])
def test_two_steps_leave_what_two_whole_batches_leave(sizes):
    whole, split = Counts(), Counts()
    for batch in (torch.tensor([1.0, 3.0, -1.0, 5.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])):
        whole.step(batch)
        run(split, batch.split(list(sizes)))
    for name in ("steps", "rows", "right", "last", "loss_sum", "loss_total", "labels", "name"):
        assert getattr(split, name) == pytest.approx(getattr(whole, name)), name
    torch.testing.assert_close(split.history, whole.history)
    torch.testing.assert_close(split.average, whole.average)
    torch.testing.assert_close(split.confusion, whole.confusion)
    torch.testing.assert_close(split.table["new"], whole.table["new"])
    assert [entry["n"] for entry in split.table["deep"]] == [4, 4]
    torch.testing.assert_close(split.table["deep"][1]["x"], whole.table["deep"][1]["x"])


def test_every_microbatch_starts_from_the_same_state():
    module = Counts()
    containers = (module.history, module.table, module.table["deep"])
    attributes = Attributes(module)
    attributes.freeze()
    module.step(torch.ones(2))
    attributes.take()
    assert (module.steps, module.history, module.table) == (0, [], {"deep": []})
    assert torch.equal(module.confusion, torch.zeros(2, dtype=torch.int64))
    assert containers == (module.history, module.table, module.table["deep"])
    assert module.history is containers[0]
    assert module.table["deep"] is containers[2]


def test_the_source_tells_counts_from_sums_and_means():
    kinds = Kinds(Counts)
    assert kinds.of("steps") is Kind.COUNT
    assert kinds.of("right") is Kind.SUM
    assert kinds.of("loss_total") is Kind.SUM
    assert kinds.of("loss_sum") is Kind.MEAN
    assert kinds.of("name") is Kind.SET
