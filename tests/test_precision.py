"""Every precision of the Trainer: the numbers of one device that trains on the same micro-batches.

One device that accumulates M batches of a micro-batch's size is the reference: it does the same
sums in the same order, so that half precision can be compared to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    MixedPrecision,
)
from lightning.pytorch.plugins.precision import transformer_engine as plugin_of_te
from tests import lit
from tests.lit import run_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

from lightning_pipe import ConfigError, PipelineStrategy
from lightning_pipe.manners import refuse_precision
from lightning_pipe.runtime.transfer import Links

ROWS, PIECES, SIZE = 32, 4, 2  # rows, micro-batches of a step, rows of each
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# what blocks compute in, what weights are, and how far sums in another order may be apart
CASES: dict[str, tuple[torch.dtype, torch.dtype, float]] = {
    "32-true": (FP32, FP32, 1e-5),
    "64-true": (FP64, FP64, 1e-9),
    "bf16-true": (BF16, BF16, 2e-2),
    "16-true": (FP16, FP16, 4e-3),
    "bf16-mixed": (BF16, FP32, 1e-2),
    "16-mixed": (FP16, FP32, 1e-3),
    "16-mixed overflows": (FP16, FP32, 1e-3),
    "16-mixed fused": (FP16, FP32, 1e-3),
}


class Residual(nn.Module):
    """Makes a tensor of the default type, which is a half in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        return x + self.down(h + torch.full((h.shape[-1],), 0.3))


class Plain(nn.Module):
    """Returns a half under autocast, and notes what it computes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.seen: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x))
        if type(out) is Tensor:
            self.seen.add(out.dtype)
        return out


class LitAny(pl.LightningModule):
    def __init__(self, width: int = 8, *, fused: bool = False) -> None:
        super().__init__()
        blocks = (Residual(width), Plain(width), Plain(width), Residual(width))
        self.net = nn.Sequential(nn.Linear(width, width), *blocks, nn.Linear(width, 4))
        self.fused = fused
        self.norms: list[Tensor] = []
        self.scales: list[tuple[float, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters()]
        self.norms.append(torch.nn.utils.get_total_norm(gradients).double())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        (optimizer,) = self.trainer.optimizers
        self.scales.append((scaler.get_scale() if scaler else 1.0, optimizer.param_groups[0]["lr"]))

    def configure_optimizers(self) -> Any:
        if self.fused:
            optimizer: Any = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def arguments_of(case: str) -> dict[str, Any]:
    if not case.startswith("16-mixed"):
        return {"precision": case}
    # the Trainer takes bf16 instead of it on a CPU
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (22 if " " in case else 16))
    return {"precision": None, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


def train(strategy: dict[str, Any] | None, case: str, batch_size: int, **more: Any) -> Any:
    pl.seed_everything(1, verbose=False)
    module = LitAny(fused=case.endswith("fused"))
    arguments = {"num_sanity_val_steps": 0, "use_distributed_sampler": False}
    used = lit.trainer(strategy, lit.world(), **arguments, **arguments_of(case), **more)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 8, generator=generator)
    if case.endswith("overflows"):
        x[20] = 6e4  # in one copy only: the step from its row on
    data: Any = TensorDataset(x, torch.randint(0, 4, (ROWS,), generator=generator))
    steps = torch.arange(ROWS)
    if strategy is not None and lit.world() > 2:  # whole steps of one device, shared out
        copy = torch.distributed.get_rank() // 2
        steps = steps.view(-1, 2, batch_size)[:, copy].flatten()
    valid = DataLoader(Subset(data, range(8)), batch_size=SIZE * PIECES)
    used.fit(module, DataLoader(Subset(data, steps.tolist()), batch_size=batch_size), valid)
    result = lit.outcome(module, used)
    seen = {dtype for unit in module.modules() for dtype in getattr(unit, "seen", ())}
    return {**result, "norms": module.norms, "scales": module.scales, "seen": seen}


def references(pieces: int, cases: list[str]) -> dict[str, Any]:
    return {case: train(None, case, SIZE, accumulate_grad_batches=pieces) for case in cases}


@contextmanager
def noting_sent() -> Iterator[set[torch.dtype]]:
    """What floats cross between stages as."""
    found: set[torch.dtype] = set()
    own = Links.send

    def send(self: Links, values: Any, rank: int) -> Any:
        found.update(value.dtype for value in values if value.is_floating_point())
        return own(self, values, rank)

    with mock.patch.object(Links, "send", send):
        yield found


def pipelines(strategy: dict[str, Any], cases: list[str]) -> dict[str, Any]:
    results = {}
    for case in cases:
        given = {"num_microbatches": PIECES, "split_points": ["net.2"], **strategy}
        with noting_sent() as sent:
            results[case] = {**train(given, case, SIZE * PIECES), "sent": sent}
    return results


def compare(case: str, got: dict[str, Any], expected: dict[str, Any], *, same: bool) -> None:
    computed, kept, tolerance = CASES[case]
    assert got["seen"] == expected["seen"] == {computed}
    assert got["sent"] == {computed}  # activations and their gradients
    assert {value.dtype for value in got["weights"].values()} == {kept}
    assert got["scales"] == expected["scales"]
    assert got["steps"] == expected["steps"]
    assert len(got["norms"]) == len(expected["norms"]) > 1
    for name, value in expected["weights"].items():
        if same:
            assert torch.equal(got["weights"][name], value), name
        torch.testing.assert_close(got["weights"][name], value, rtol=tolerance, atol=tolerance)
    for norm, other in zip(got["norms"], expected["norms"], strict=True):
        torch.testing.assert_close(norm, other, rtol=tolerance, atol=tolerance, equal_nan=True)
    # what is logged is a mean of micro-batches in the type of the loss
    logged = tolerance if kept in (FP32, FP64) else 2e-2
    for name in ("loss", "val"):
        value, other = got["metrics"][name], expected["metrics"][name]
        assert value == pytest.approx(other, rel=logged, nan_ok=True), name


def test_two_ranks_train_as_one_device_to_the_last_bit() -> None:
    expected = run_ranks(1, references, PIECES, list(CASES))[0]
    scales = [scale for scale, _ in expected["16-mixed overflows"]["scales"]]
    assert len(set(scales)) > 1, "no step was skipped"
    for result in run_ranks(2, pipelines, {}, list(CASES)):
        for case, got in result.items():
            compare(case, got, expected[case], same=True)


def test_two_copies_of_two_ranks_train_as_one_device() -> None:
    cases = [case for case in CASES if case not in ("16-mixed", "16-mixed fused")]
    expected = run_ranks(1, references, 2 * PIECES, cases)[0]
    again = {"activation_checkpointing": "all", "schedule": "zero_bubble"}
    for result in run_ranks(4, pipelines, {"data_parallel_size": 2, **again}, cases):
        for case, got in result.items():
            compare(case, got, expected[case], same=False)


def _resumed(folder: str) -> Any:
    """A run, and one that goes on from its checkpoint after two steps."""
    found = []
    for steps, path in ((4, None), (2, None), (4, f"{folder}/two.ckpt")):
        pl.seed_everything(1, verbose=False)
        module = LitAny()
        used = lit.trainer(
            {"num_microbatches": PIECES},
            2,
            max_epochs=-1,
            max_steps=steps,
            **arguments_of("16-mixed overflows"),
        )
        x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(x, torch.zeros(ROWS, dtype=torch.long))
        used.fit(module, DataLoader(data, batch_size=SIZE * PIECES), ckpt_path=path)
        if steps == 2:
            used.save_checkpoint(f"{folder}/two.ckpt")
        else:
            found.append((module.scales, lit.outcome(module, used)["weights"]))
    return found


def test_a_loss_scale_goes_on_where_it_was(tmp_path: Any) -> None:
    for (scales, weights), (later, resumed) in run_ranks(2, _resumed, str(tmp_path)):
        assert scales[2:] == later
        assert later[0] != scales[0]
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())


def test_a_trainer_on_a_cpu_takes_bf16_for_16_mixed_as_with_any_strategy() -> None:
    with pytest.warns(UserWarning, match="Using `precision='bf16-mixed'` instead"):
        used = pl.Trainer(
            accelerator="cpu", strategy=PipelineStrategy(), precision="16-mixed", logger=False
        )
    assert used.precision == "bf16-mixed"


def _transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the plug-in goes before a run."""
    recipe = ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling = mock.Mock  # type: ignore[attr-defined]
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, recipe.__name__, recipe)
    fabric = sys.modules[plugin_of_te.FabricTEPrecision.__module__]
    monkeypatch.setattr(fabric, "_TRANSFORMER_ENGINE_AVAILABLE", True)


def test_transformer_engine_is_refused_before_processes_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _transformer_engine(monkeypatch)
    for name in ("transformer-engine", "transformer-engine-float16"):
        with pytest.raises(ConfigError, match=r"TransformerEnginePrecision .* reduces the scales"):
            pl.Trainer(
                accelerator="cpu",
                devices=2,
                strategy=PipelineStrategy(),
                precision=name,
                logger=False,
            )
        # one stage, and no micro-batches: nothing of this strategy is in the way
        pl.Trainer(
            accelerator="cpu", devices=1, strategy=PipelineStrategy(), precision=name, logger=False
        )


@pytest.mark.parametrize("plugin", [BitsandbytesPrecision, DeepSpeedPrecision])
def test_plugins_that_move_or_train_the_whole_model_are_refused(plugin: Any) -> None:
    class Own(plugin):  # type: ignore[misc]
        pass

    with pytest.raises(ConfigError, match=r"Own in a pipeline: .*bf16-mixed.* or one device"):
        refuse_precision(Own.__new__(Own))
