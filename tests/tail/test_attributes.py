"""Changes of attributes, taken from micro-batches and merged into those of the whole batch."""

from __future__ import annotations

import importlib
import linecache
import logging
import pickle
import sys
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipe.errors import CutError
from lightning_pipe.split.frozen import is_data, is_open
from lightning_pipe.split.microbatch import NumberMemory, merge_values
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


class Meter:
    """The usual helper of training scripts."""

    def __init__(self):
        self.val = self.sum = 0.0
        self.count = self.calls = 0
        self.log = sys.stdout

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.calls += 1


@dataclass
class Stats:
    losses: list[float] = field(default_factory=list)
    by_class: Counter = field(default_factory=Counter)
    nested: dict = field(default_factory=lambda: {"a": {"b": []}})
    last: object = None


class Slots:
    __slots__ = ("best", "seen")

    def __init__(self):
        self.best, self.seen = 0.0, set()


class Objects(nn.Module):
    def __init__(self):
        super().__init__()
        self.meter, self.stats, self.slots = Meter(), Stats(), Slots()
        self.inner = nn.Identity()
        self.inner.meter = Meter()
        self.alias = self.stats.nested["a"]
        self.recent = deque(maxlen=3)
        self.sizes, self.pair = [], ([], torch.zeros(2))
        self.array = np.zeros(2)
        self.lock = threading.Lock()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("rebound", torch.zeros(()))

    def step(self, x):
        self.meter.update(x.mean().item(), len(x))
        self.inner.meter.update(x.mean().item(), len(x))
        self.stats.losses.append(x.mean().item())
        self.stats.by_class.update(x.long().tolist())
        self.stats.nested["a"]["b"].append(float(len(x)))
        self.stats.last = Stats(losses=[x.mean().item()])
        self.slots.best = 0.5 * self.slots.best + 0.5 * x.mean().item()
        self.slots.seen |= set(x.long().tolist())
        self.recent.append(x.mean().item())
        self.sizes.append(len(x))
        self.pair[0].append(x.sum().item())
        self.pair[1].add_(x.mean())
        self.array += x.mean().item()
        self.count += 1
        self.average.data.mul_(0.9).add_(x.mean(), alpha=0.1)
        self.rebound = 0.9 * self.rebound + 0.1 * x.mean()

    def left(self):
        meters = [vars(m) for m in (self.meter, self.inner.meter)]
        return {
            "meters": [{k: v for k, v in m.items() if k != "log"} for m in meters],
            "losses": self.stats.losses,
            "by_class": dict(self.stats.by_class),
            "b": self.stats.nested["a"]["b"],
            "last": getattr(self.stats.last, "losses", None),
            "best": self.slots.best,
            "seen": sorted(self.slots.seen),
            "recent": list(self.recent),
            "sizes": self.sizes,
            "pair": [self.pair[0], self.pair[1].tolist()],
            "array": self.array.tolist(),
            "buffers": {name: b.item() for name, b in self.named_buffers()},
        }


CHANGING = {("inner", "meter", False), ("", "average", True)}


def test_objects_nested_containers_and_buffers_are_left_as_by_the_whole_batch():
    """Also on a rank that ran none of it: the changes are sent."""
    whole, split, other = Objects(), Objects(), Objects()
    meter, buffer = split.meter, split.count
    for batch in (torch.arange(6.0), torch.arange(1.0, 7.0), torch.ones(6), torch.arange(6.0) - 9):
        whole.step(batch)
        attributes = Attributes(split, changing=CHANGING)
        attributes.freeze()
        before = split.left()
        for piece in batch.split([2, 2, 1, 1]):
            split.step(piece)
            attributes.take()
            assert split.left() == before
        changes = attributes.merged([2, 2, 1, 1])
        attributes.apply(changes)
        Attributes(other).apply(pickle.loads(pickle.dumps(changes)))
    for module in (split, other):
        left, expected = module.left(), whole.left()
        for name, value in expected.items():
            assert str(left[name]) == str(value) or _close(left[name], value), name
        assert module.alias is module.stats.nested["a"]
    assert split.meter is meter
    assert split.count is buffer


def _close(value, expected):
    if isinstance(expected, dict):
        pairs = [(value[key], item) for key, item in expected.items()]
    elif isinstance(expected, list):
        pairs = list(zip(value, expected, strict=True))
    else:
        return value == pytest.approx(expected, rel=1e-6)
    return all(_close(a, b) for a, b in pairs)


def test_what_cannot_be_merged_is_named():
    module = nn.Module()
    module.mode = "start"
    attributes = Attributes(module)
    attributes.freeze()
    for mode in ("a", "b"):
        module.mode = mode
        attributes.take()
    with pytest.warns(UserWarning, match="different values in mode"):
        attributes.merged([1, 1])


def test_loggers_files_and_locks_are_left_alone():
    class Locked(threading.Thread):
        pass

    assert is_open(Meter())
    assert is_open(Stats())
    assert is_open(SimpleNamespace())
    for value in (threading.Lock(), logging.getLogger("x"), sys.stdout, Locked(), nn.ReLU(), 1, []):
        assert not is_open(value)
    assert not is_data(nn.Parameter(torch.ones(1)))


def test_a_large_tensor_that_no_trace_saw_change_is_refused():
    module = nn.Module()
    module.register_buffer("queue", torch.zeros(2, 1 << 20))
    attributes = Attributes(module)
    attributes.freeze()
    module.queue[0, 0] = 1
    with pytest.raises(CutError, match="too large to be remembered"):
        attributes.take()


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("self.a += 1", Kind.COUNT),
        ("self.a += x.size(0)", Kind.SUM),
        ("self.a += x.shape[1]", Kind.COUNT),
        ("self.a += (x > 0).sum().item() / len(x)", Kind.MEAN),
        ("self.a += x.sum(-1).mean()", Kind.MEAN),
        ("n = len(x); self.a += n", Kind.SUM),
        ("self.a += F.mse_loss(x, x, reduction='sum').item()", Kind.SUM),
        ("self.a += x.mean().item() * len(x)", Kind.SUM),
        ("self.a['k'].append(float(len(x)))", Kind.SET_SUM),
        ("self.a.append(x.mean().item())", Kind.SET),
        ("self.a = x * self.b", Kind.SET),
    ],
)
def test_expressions_are_read_from_the_outside_in(line, kind, tmp_path, monkeypatch):
    source = f"class Read:\n    def step(self, x):\n        {line}\n"
    (tmp_path / "read_me.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "read_me", raising=False)
    linecache.clearcache()
    kinds = Kinds(importlib.import_module("read_me").Read)
    keys = ("a", "k") if "['k']" in line else ("a",)
    assert kinds.of(*keys, appended="append" in line) is kind


def test_a_graph_keeps_what_a_tensor_held_when_it_was_read():
    """The backward of a micro-batch comes after its changes were undone."""
    module = nn.Module()
    module.register_buffer("scale", torch.zeros(()))
    module.held = {"scale": torch.zeros(())}
    buffer, held = module.scale, module.held["scale"]
    weight = torch.ones((), requires_grad=True)
    attributes = Attributes(module, changing={("", "scale", True), ("", "held", False)})
    attributes.freeze()
    losses = []
    for row in (1.0, 2.0):
        module.scale += row
        module.held["scale"].add_(10 * row)
        losses.append(weight * module.scale + weight * module.held["scale"])
        attributes.take()
        assert (module.scale.item(), module.held["scale"].item()) == (0, 0)
    sum(losses).backward()
    assert weight.grad.item() == 33
    attributes.apply(attributes.merged([1, 1]))
    assert module.scale is buffer
    assert module.held["scale"] is held
    assert (buffer.item(), held.item()) == (1.5, 15.0)


class _Extremes:
    def training_step(self, loss: float) -> None:
        self.best = min(self.best, loss)
        if loss > self.worst:
            self.worst = loss
        if self.mean is None:
            self.mean = loss
        self.mean = 0.9 * self.mean + 0.1 * float(loss)
        self.seen[loss] = self.seen.get(loss, 0) + 1

    def on_train_epoch_end(self) -> None:
        self.epochs = max(self.epochs, 1)


def test_the_source_tells_what_depends_on_what_it_was():
    kinds = Kinds(_Extremes)
    assert kinds.rereads == {"best", "worst"}
    assert kinds.of("seen", 0.5) is Kind.COUNT


def test_the_index_of_a_batch_is_no_number_of_rows():
    memory = NumberMemory()
    for index in range(4):
        values = [{"index": index, "rows": 2}] * 2
        merged = merge_values(values, [2, 2], memory=memory)
        assert merged == {"index": index, "rows": 4}
