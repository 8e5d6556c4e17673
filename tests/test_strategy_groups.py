"""`microbatch_size`: a step draws M micro-batches, and is that of a loader of whole steps."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from tests import lit
from tests.lit import run_ranks
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe import ConfigError, EffectiveBatchRescaler, MicrobatchSchedule

DRAWS = {"num_microbatches": 4, "microbatch_size": 2}


class _Hooked(lit.Lit):
    """Sees batches in its hooks, draws in them, and asks for the number of steps early."""

    def __init__(self):
        super().__init__()
        self.sizes, self.total = [], 0

    def setup(self, stage):
        if stage == "fit":
            self.total = int(self.trainer.estimated_stepping_batches)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]

    def on_train_batch_start(self, batch, batch_idx):
        self.sizes.append((len(batch[0]), batch_idx))


class _Stream(IterableDataset):
    def __iter__(self):
        x, y = lit.rows(43).tensors
        yield from zip(x, y, strict=True)


def _run(strategy, batch_size, kind, arguments, ckpt_path=None, save_path=None):
    """Trains on one device with steps of the loader, or on several with steps of DRAWS."""
    module = lit.seeded(_Hooked)
    data = _Stream() if kind == "stream" else lit.rows(43)
    loader = DataLoader(data, batch_size=batch_size, shuffle=kind != "stream")
    trainer = lit.trainer(strategy, lit.world(), **arguments)
    trainer.fit(module, loader, DataLoader(lit.rows(12), batch_size=5), ckpt_path=ckpt_path)
    if save_path is not None:
        trainer.save_checkpoint(save_path)
    counts = module.sizes, module.total, trainer.num_training_batches
    return {**lit.outcome(module, trainer), "counts": counts}


def _all(strategy, batch_size, folder):
    file = f"{folder}/{lit.world()}.ckpt"
    return [
        _run(strategy, batch_size, "rows", {"max_epochs": 2}),
        _run(strategy, batch_size, "stream", {"max_epochs": 2, "max_steps": 7}),
        _run(
            strategy,
            batch_size,
            "rows",
            {"limit_train_batches": 5, "accumulate_grad_batches": 2, "val_check_interval": 2},
        ),
        _run(strategy, batch_size, "rows", {"max_steps": 3}, save_path=file),
        _run(strategy, batch_size, "rows", {"max_epochs": 2}, ckpt_path=file),
    ]


@pytest.mark.parametrize("batch_size", [2, 4])
def test_training_equals_a_loader_of_whole_steps(batch_size, tmp_path):
    expected = run_ranks(1, _all, None, 8, str(tmp_path))[0]
    for results in run_ranks(2, _all, DRAWS, batch_size, str(tmp_path)):
        for result, reference in zip(results, expected, strict=True):
            assert result["counts"] == reference["counts"]
            lit.assert_equal([result], reference)


class _Growing(lit.Lit):
    """On one device: another loader for each epoch."""

    def __init__(self, batch_sizes):
        super().__init__()
        self.batch_sizes, self.sizes = batch_sizes, []

    def train_dataloader(self):
        size = self.batch_sizes[min(self.trainer.current_epoch, len(self.batch_sizes) - 1)]
        return DataLoader(lit.rows(40), batch_size=size)

    def on_train_batch_start(self, batch, batch_idx):
        self.sizes.append(len(batch[0]))


class _Scaling(pl.Callback):
    """The learning rates of one device, by hand."""

    def on_train_epoch_start(self, trainer, pl_module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 1e-2 * pl_module.batch_sizes[trainer.current_epoch] / 4


def _grow(strategy, batch_sizes, callbacks, reload=0):
    module = lit.seeded(_Growing, batch_sizes)
    trainer = lit.trainer(
        strategy,
        lit.world(),
        max_epochs=3,
        callbacks=callbacks,
        reload_dataloaders_every_n_epochs=reload,
    )
    trainer.fit(module)
    return {**lit.outcome(module, trainer), "sizes": module.sizes}


def _growing():
    rescaler = EffectiveBatchRescaler("linear")
    schedule = MicrobatchSchedule({0: 2, 1: 4, 2: 5}, interval="epoch")
    grown = _grow(DRAWS, [2], [schedule, rescaler])
    with pytest.raises(ConfigError, match="interval='epoch'"):
        _grow(DRAWS, [2], [MicrobatchSchedule({0: 2, 3: 4})])
    return grown, [(entry["step"], entry["old"], entry["new"]) for entry in rescaler.history]


def test_more_micro_batches_are_a_larger_batch_and_learning_rates_follow():
    expected = run_ranks(1, _grow, None, [4, 8, 10], [_Scaling()], 1)[0]
    for result, history in run_ranks(2, _growing):
        for name in ("pipeline/effective_batch", "pipeline/lr_scale"):
            result["metrics"].pop(name)
        lit.assert_equal([result], expected)
        assert result["sizes"] == [4] * 10 + [8] * 5 + [10] * 4
        assert history == [(10, 4, 8), (15, 8, 10)]


class _Stop(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        raise AssertionError("training began")


def _refused():
    module = lit.seeded(lit.Lit)
    trainer = lit.trainer(DRAWS, lit.world(), callbacks=[_Stop()])
    with pytest.raises(ConfigError, match="batches of 3 rows, and steps of 8"):
        trainer.fit(module, DataLoader(lit.rows(), batch_size=3))


def test_a_loader_whose_batches_make_no_step_is_refused_before_training():
    run_ranks(2, _refused)


def _weights(strategy, **arguments):
    """Two epochs of 48 rows, in steps of 16."""
    module = lit.seeded(lit.Lit)
    trainer = lit.trainer(strategy, lit.world(), max_epochs=2, **arguments)
    trainer.fit(module, DataLoader(lit.rows(48), batch_size=8))
    return lit.outcome(module, trainer)


def _accumulated_and_drawn():
    accumulated = _weights({"num_microbatches": 4}, accumulate_grad_batches=2)
    return accumulated, _weights({"num_microbatches": 8, "microbatch_size": 2})


def test_accumulated_batches_may_fill_the_pipeline_once():
    """What docs/batches.md says instead of `accumulate_grad_batches=2`."""
    for accumulated, drawn in run_ranks(2, _accumulated_and_drawn):
        assert accumulated["steps"] == 6
        lit.assert_equal([{**drawn, "metrics": accumulated["metrics"]}], accumulated)
