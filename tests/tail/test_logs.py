"""What micro-batches log, merged into what the whole batch would have logged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassF1Score

from lightning_pipe.tail import Tail
from lightning_pipe.tail.logs import LogTape, MetricReference
from lightning_pipe.tail.metrics import MetricTape

ROWS = (2, 1)


def merged(*microbatches):
    tape = LogTape(lambda metric: 5)
    tape.start()
    for calls in microbatches:
        tape.next_microbatch()
        for name, value, kwargs in calls:
            tape.log(name, value, **kwargs)
    return tape.merged(ROWS)


@pytest.mark.parametrize(
    ("values", "kwargs", "expected"),
    [
        ((1.0, 4.0), {}, 2.0),
        ((4.0, 4.0), {}, 4.0),
        ((1.0, 4.0), {"batch_size": 1}, 2.5),
        ((1.0, 4.0), {"reduce_fx": "sum"}, 5.0),
        ((1.0, 4.0), {"reduce_fx": torch.sum}, 5.0),
        ((1.0, 4.0), {"reduce_fx": max}, 4.0),
        ((1.0, 4.0), {"reduce_fx": "min"}, 1.0),
        ((3, 3), {}, 3),
    ],
)
def test_values_are_merged_by_their_reduction(values, kwargs, expected):
    plain = merged(*([("x", value, kwargs)] for value in values))
    assert [call.value for call in plain] == [expected]
    tensors = merged(*([("x", torch.tensor(value), kwargs)] for value in values))
    torch.testing.assert_close(tensors[0].value, torch.tensor(expected))


def test_batch_sizes_are_summed_and_order_is_kept():
    calls = merged([("a", 1.0, {"batch_size": 7}), ("b", 2.0, {})], [("a", 1.0, {"batch_size": 3})])
    assert [call.name for call in calls] == ["a", "b"]
    assert calls[0].kwargs["batch_size"] == 10


def test_positional_arguments_and_metric_objects():
    tape = LogTape(lambda metric: 5)
    tape.start()
    tape.next_microbatch()
    tape.log("metric", SumMetric(), True)
    (call,) = tape.merged((2,))
    assert call.value == MetricReference(5)
    assert call.kwargs == {"prog_bar": True}


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f1, self.mean, self.rows = MulticlassF1Score(3), MeanMetric(), SumMetric()
        self.group = MetricCollection([MulticlassF1Score(3, average="micro")])
        self.plain = [SumMetric()]

    def tail(self, predicted, target):
        value = self.f1(predicted, target)
        self.mean.update((predicted == target).float().mean())
        self.rows(torch.ones(len(target)))
        self.group.update(predicted, target)
        self.plain[0].update(len(target))
        return value

    def numbers(self):
        found = (self.f1, self.mean, self.rows, self.plain[0])
        return [*(m.compute() for m in found), *self.group.compute().values()]


def test_metrics_are_updated_once_with_the_whole_batch_and_carried():
    predicted, target = torch.tensor([0, 1, 2, 2, 1, 0]), torch.tensor([0, 1, 2, 1, 0, 0])
    whole, split, other = Holder(), Holder(), Holder()
    tape, receiver = MetricTape(split), MetricTape(other)
    for part in (slice(0, 4), slice(2, 6)):
        value = whole.tail(predicted[part], target[part])
        tape.start()
        for piece in (slice(0, 3), slice(3, 4)):
            with tape.microbatch():
                split.tail(predicted[part][piece], target[part][piece])
        receiver.apply(tape.finish((3, 1)))
        for module in (split, other):
            torch.testing.assert_close(module.f1._forward_cache, value)
            torch.testing.assert_close(module.numbers(), whole.numbers())
            assert module.f1.update_count == whole.f1.update_count


def test_metrics_synchronise_again_after_the_run():
    module = Holder()
    tape = MetricTape(module)
    assert not module.f1.sync_on_compute
    tape.release()
    assert module.f1.sync_on_compute


@pytest.mark.parametrize("asks", [True, False])
def test_a_step_that_asks_metrics_for_values_of_a_batch_is_known(asks):
    root = nn.ModuleDict({"metric": MeanMetric()})
    tail = Tail(root)
    tail.start([2, 2], [])
    for _ in range(2):
        with tail.microbatch():
            (root["metric"] if asks else root["metric"].update)(torch.ones(2))
    assert tail.asks_metrics is asks
