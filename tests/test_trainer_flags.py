"""A good guest: whatever the Trainer is asked for, it does the same things in the same order.

Every hook of module, callback and DataModule, every logged number and every weight is compared with
one device.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from tests.helpers import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe import PipelineStrategy

_TRANSFERS = {"transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"}


class _Recorder:
    """Notes the hooks that Lightning calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def of(self, who: str, base: type) -> Callable[[Any, str], Any]:
        """Returns a `__getattribute__` that notes the hooks of `base`."""
        hooks = {n for n in dir(base) if n.startswith("on_") or n in _TRANSFERS}
        hooks |= {"setup", "teardown", "configure_optimizers", "optimizer_step", "backward"}
        hooks |= {"train_dataloader", "val_dataloader", "prepare_data", "configure_model"}
        hooks |= {"optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"}

        def get(self_: Any, name: str) -> Any:
            value = object.__getattribute__(self_, name)
            if name not in hooks or not callable(value):
                return value

            @functools.wraps(value)
            def noted(*args: Any, **kwargs: Any) -> Any:
                recorder.calls.append(f"{who}.{name}")
                return value(*args, **kwargs)

            return noted

        recorder = self
        return get


def _recorded(recorder: _Recorder, who: str, thing: Any, base: type) -> Any:
    cls = type(thing)
    thing.__class__ = type(
        cls.__name__, (cls,), {"__getattribute__": recorder.of(who, base), "__module__": __name__}
    )
    return thing


class _Module(pl.LightningModule):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.save_hyperparameters()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss)
        return loss

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class _Data(pl.LightningDataModule):
    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(24, 6, generator=generator)
        self.rows = TensorDataset(x, (x.sum(1) > 0).long())
        self.loaders = loaders

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows, batch_size=4)

    def val_dataloader(self) -> Any:
        loaders = [DataLoader(self.rows, batch_size=8) for _ in range(self.loaders)]
        return loaders if self.loaders > 1 else loaders[0]

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fast_dev_run": {"fast_dev_run": 2},
    "overfit_batches": {"overfit_batches": 2},
    "limits": {"limit_train_batches": 3, "limit_val_batches": 0.5, "limit_test_batches": 1},
    "no_validation": {"limit_val_batches": 0},
    "val_check_interval": {"val_check_interval": 2, "num_sanity_val_steps": 1},
    "check_every_n_epoch": {"check_val_every_n_epoch": 2, "max_epochs": 3},
    "max_steps": {"max_epochs": -1, "max_steps": 7},
    "min_epochs": {"min_epochs": 1, "max_epochs": 1},
    "accumulate": {"accumulate_grad_batches": 4},
    "clip_norm": {"gradient_clip_val": 0.05},
    "clip_value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"},
    "anomaly": {"detect_anomaly": True, "max_epochs": 1},
    "deterministic": {"deterministic": True, "max_epochs": 1},
    "profiler": {"profiler": "simple", "max_epochs": 1},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "no_inference_mode": {"inference_mode": False, "max_epochs": 1},
    "several_loaders": {"loaders": 2, "max_epochs": 1},
    "barebones": {"barebones": True, "max_epochs": 1},
    "flags": {
        "detect_anomaly": True,
        "deterministic": True,
        "profiler": "simple",
        "inference_mode": False,
        "max_epochs": 1,
    },
    "no_sampler": {"use_distributed_sampler": False, "max_epochs": 1},
}


def _run(case: str, devices: int, strategy: dict[str, Any] | None) -> dict[str, Any]:
    options = {"max_epochs": 2, **CASES[case]}
    recorder = _Recorder()
    data = _recorded(recorder, "data", _Data(options.pop("loaders", 1)), pl.LightningDataModule)
    module = _recorded(recorder, "module", _Module(), pl.LightningModule)
    callback = _recorded(recorder, "callback", pl.Callback(), pl.Callback)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    quiet |= {"enable_checkpointing": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=devices,
            strategy="auto" if strategy is None else PipelineStrategy(**strategy),
            callbacks=None if options.get("barebones") else [callback],
            **(options if options.get("barebones") else quiet | options),
        )
        trainer.fit(module, datamodule=data)
        fitted = {k: float(v) for k, v in trainer.callback_metrics.items()}
        weights = {k: v.clone() for k, v in module.state_dict().items()}
        state = (trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx)
        validated = trainer.validate(module, datamodule=data, verbose=False)
        tested = trainer.test(module, datamodule=data, verbose=False)
        predicted = trainer.predict(module, datamodule=data)
        torch.use_deterministic_algorithms(False)  # this process goes on
    return {
        "calls": recorder.calls,
        "fitted": fitted,
        "weights": weights,
        "state": state,
        "evaluated": (validated, tested),
        "predicted": predicted if trainer.is_global_zero else None,
        "progress": trainer.fit_loop.epoch_progress.state_dict(),
    }


@functools.cache
def _reference(case: str) -> dict[str, Any]:
    return _run(case, 1, None)


def _with_first_batch_read_early(calls: list[str]) -> list[str]:
    """Before a sanity check several ranks look at the first training batch, to cut the model."""
    check = "callback.on_sanity_check_start"
    if check not in calls:
        return calls
    calls = [*calls]
    calls.remove("data.train_dataloader")
    transfers = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    at = calls.index(check)
    calls[at:at] = ["data.train_dataloader", *(f"module.{name}" for name in transfers)]
    return calls


def _compare(case: str, got: dict[str, Any], *, num_ranks: int) -> None:
    expected = _reference(case)
    assert got["state"] == expected["state"]
    assert got["progress"] == expected["progress"]
    torch.testing.assert_close(got["weights"], expected["weights"])
    torch.testing.assert_close(got["fitted"], expected["fitted"])
    torch.testing.assert_close(got["evaluated"], expected["evaluated"])
    if got["predicted"] is not None:
        torch.testing.assert_close(got["predicted"], expected["predicted"])
    calls = expected["calls"]
    assert got["calls"] == (calls if num_ranks == 1 else _with_first_batch_read_early(calls))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", [{}, {"num_microbatches": 2, "virtual_stages": 2}])
def test_one_rank_does_what_one_device_does(case: str, strategy: dict[str, Any]) -> None:
    _compare(case, _run(case, 1, strategy), num_ranks=1)


def _all(cases: list[str], devices: int = 2, **strategy: Any) -> dict[str, Any]:
    return {case: _run(case, devices, {"num_microbatches": 2, **strategy}) for case in cases}


def _copies(cases: list[str]) -> dict[str, Any]:
    """Both see all rows, so that they do what one device does."""
    for case in cases:
        CASES[case] = {**CASES[case], "use_distributed_sampler": False}
    return _all(cases, 4, data_parallel_size=2)


def test_copies_do_what_one_device_does() -> None:
    cases = ["flags", "overfit_batches", "limits", "fast_dev_run"]
    for runs in run_ranks(4, _copies, cases, timeout=170):
        for case, got in runs.items():
            _compare(case, got, num_ranks=4)


def test_two_ranks_do_what_one_device_does() -> None:
    of_one_process = {"anomaly", "deterministic", "profiler", "no_inference_mode", "no_sampler"}
    of_one_process |= {"no_validation", "min_epochs", "clip_value", "check_every_n_epoch"}
    for runs in run_ranks(2, _all, sorted(CASES.keys() - of_one_process), timeout=170):
        for case, got in runs.items():
            _compare(case, got, num_ranks=2)
