"""Small models in blocks that read and write named values, whole or cut into hand-made stages.

A block may read any value of an earlier one, so chains, skips and encoder-decoders are the same
thing: what crosses a cut is every value that was made before it and is read after it.
"""

import torch
from torch import nn

from lightning_pipe.errors import ScheduleError
from lightning_pipe.planning.schedules import SCHEDULES, make_schedule
from lightning_pipe.split.spec import ValueSpec

WIDTH = 6


class Block(nn.Module):
    """`tanh(W x + b)` of the sum of its inputs; subclasses change `compute`."""

    def __init__(self, reads, writes):
        super().__init__()
        self.reads, self.writes = reads, writes
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values):
        out = self.compute(*(values[name] for name in self.reads))
        return dict(zip(self.writes, out if isinstance(out, tuple) else (out,), strict=True))

    def compute(self, *inputs):
        return torch.tanh(self.linear(sum(inputs)))


class Writes(Block):
    """Writes to its input, as ReLU(inplace=True) does."""

    def compute(self, x):
        return self.linear(x.mul_(1.5).relu_())


class Twice(Block):
    """Uses its weight twice, one use behind the other, and has two differentiable outputs."""

    def compute(self, x):
        y = torch.tanh(self.linear(x))
        return self.linear(y) + self.linear.weight.sum(), y * 2


class Position(Block):
    """Also gives a value that depends on weights only, and its (strided) transpose."""

    def compute(self, x):
        position = torch.sin(self.linear.weight)
        return self.linear(x), position, position.t() * 2


class Masked(Block):
    """Makes a bool, an integer and a float without gradient besides the hidden state."""

    def compute(self, x):
        mask = x > 0
        return self.linear(x), mask, torch.arange(x.shape[0]), x.detach() * 3


class UseMask(Block):
    def compute(self, x, mask, ids, scale):
        return torch.tanh(self.linear(x)).masked_fill(mask, 0.5) + ids[:, None] * 0.1 + scale


class Matrix(Block):
    def compute(self, x, position, transposed):
        return torch.tanh(self.linear(x)) @ (position + transposed)


class Loss(Block):
    """The loss of one micro-batch, a mean over its rows."""

    def compute(self, *inputs):
        return (self.linear(sum(inputs)) ** 2).sum(-1).mean()


def chain():
    return [Block([f"h{i}"], [f"h{i + 1}"]) for i in range(7)] + [Loss(["h7"], ["loss"])]


def skips():
    """A U-net: three skips, relayed over up to six stages; one goes to two readers."""
    return [
        Block(["h0"], ["a"]),
        Block(["a"], ["b"]),
        Block(["b"], ["c"]),
        Block(["c"], ["d"]),
        Block(["d", "c"], ["e"]),
        Block(["e", "b", "a"], ["f"]),
        Block(["f", "a"], ["g"]),
        Loss(["g", "a"], ["loss"]),
    ]


def encoder_decoder():
    """The encoder's output, a mask, ids and a constant go to all decoder blocks; one value to
    nobody.
    """
    return [
        Block(["h0"], ["x"]),
        Masked(["x"], ["m", "mask", "ids", "scale"]),
        Twice(["m"], ["memory", "extra"]),
        UseMask(["memory", "mask", "ids", "scale"], ["d0"]),
        Block(["d0", "memory"], ["d1"]),
        UseMask(["d1", "mask", "ids", "scale"], ["d2"]),
        Block(["d2", "memory", "extra"], ["d3"]),
        Loss(["d3"], ["loss"]),
    ]


def awkward():
    """Writes in place, weights behind each other, outputs of weights only, shapes that differ."""
    return [
        Position(["h0"], ["a", "position", "transposed"]),
        Writes(["a"], ["b"]),
        Twice(["b"], ["c", "c2"]),
        Matrix(["c", "position", "transposed"], ["d"]),
        Twice(["d"], ["e", "e2"]),
        Writes(["e"], ["f"]),
        Block(["f", "e2", "c2"], ["g"]),
        Loss(["g"], ["loss"]),
    ]


def frozen(blocks, *indices):
    for index in indices:
        blocks[index].requires_grad_(False)
    return blocks


MODELS = {
    "chain": chain,
    "skips": skips,
    "encoder_decoder": encoder_decoder,
    "awkward": awkward,
    "frozen_first": lambda: frozen(skips(), 0, 1, 2, 3),
    "frozen_middle": lambda: frozen(encoder_decoder(), 2, 3, 4, 5),
    "frozen_last": lambda: frozen(awkward(), 6, 7),
}


def make_model(name):
    torch.manual_seed(1)
    return nn.ModuleList(MODELS[name]()).double()


def make_batch(rows, seed=0):
    """Micro-batches with the given numbers of rows; their losses are weighted by row count."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(r, WIDTH, generator=generator, dtype=torch.float64) for r in rows]


def run_whole(model, microbatches, *, backward=True):
    """The reference: the model in one piece. Returns the weighted losses."""
    total = sum(len(x) for x in microbatches)
    losses = []
    for x in microbatches:
        values = {"h0": x}
        for block in model:
            values.update(block(values))
        loss = values["loss"] * (len(x) / total)
        if backward:
            loss.backward()
        losses.append(loss.detach())
    return losses


class Stage:
    """Blocks `first` to `last` of a model, as the engine's `StageWork`."""

    def __init__(self, model, stage, starts, microbatches, specs=None):
        self.model, self.microbatches = model, microbatches
        ends = [*starts[1:], len(model)]
        self.blocks = model[starts[stage] : ends[stage]]
        self.is_last = stage == len(starts) - 1
        self.boundaries = _boundaries(model, starts[stage]), _boundaries(model, ends[stage])
        self.specs = specs or make_specs(model, microbatches)
        self.total = sum(len(x) for x in microbatches)
        self.losses = {}

    def inputs(self, microbatch):
        return tuple(self.specs[microbatch][name] for name in self.boundaries[0])

    def outputs(self, microbatch):
        return () if self.is_last else tuple(self.specs[microbatch][n] for n in self.boundaries[1])

    def weights(self):
        return list(self.blocks.parameters())

    def recomputes(self, microbatch):
        return False

    def forward(self, microbatch, received):
        x = self.microbatches[microbatch]
        values = dict(zip(self.boundaries[0], received, strict=True))
        values.setdefault("h0", x) if self.blocks[0] is self.model[0] else None
        for block in self.blocks:
            values.update(block(values))
        if not self.is_last:
            return tuple(values[name] for name in self.boundaries[1])
        loss = values["loss"] * (len(x) / self.total)
        self.losses[microbatch] = loss.detach()
        return (loss,) if torch.is_grad_enabled() else ()


def cut(model, num_stages):
    """Starts of stages with as equal numbers of blocks as possible."""
    return [stage * len(model) // num_stages for stage in range(num_stages)]


def _boundaries(model, start):
    if start == 0:
        return []
    made = {name for block in model[:start] for name in block.writes}
    read = {name for block in model[start:] for name in block.reads}
    return sorted(made & read)


def make_specs(model, microbatches):
    """What every value of each micro-batch looks like, from a run of the whole model."""
    by_rows = {len(x): _specs(model, x) for x in microbatches}
    return [by_rows[len(x)] for x in microbatches]


def _specs(model, x):
    values = {"h0": x.clone()}
    specs = {}
    with torch.enable_grad():
        for block in model:
            made = block({name: values[name].clone() for name in block.reads})
            values.update(made)
            for name, value in made.items():
                specs[name] = ValueSpec(name, tuple(value.shape), value.dtype, value.requires_grad)
    return specs


def legal(num_ranks, num_microbatches, names=SCHEDULES):
    """The schedules of some names, with 1 and 2 chunks, that there are."""
    for name in names:
        for virtual_stages in (1, 2):
            try:
                yield make_schedule(
                    name,
                    num_ranks=num_ranks,
                    num_microbatches=num_microbatches,
                    virtual_stages=virtual_stages,
                    strict=False,
                )
            except ScheduleError:
                continue
