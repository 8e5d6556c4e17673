"""What stages hold is measured beside the plan; an out-of-memory error comes with the ledger."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import DeviceStatsMonitor
from lightning.pytorch.loggers import CSVLogger
from tests import lit
from tests.helpers import run_ranks
from torch.utils.data import DataLoader

from lightning_pipe import ConfigError, PeerError, StageMemoryMonitor

WIDTH, DEPTH = 32, 7  # with the head, 8 units: 4 on each of two stages


class _Held(lit.Lit):
    def __init__(self) -> None:
        super().__init__(width=WIDTH, depth=DEPTH)


def _data() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (64,), generator=generator)
    return DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)


class _Lines(logging.Handler):
    """Keeps what is said on the console."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _fit(callbacks: list[Any], schedule: str, root: str | None = None) -> dict[str, Any]:
    module, lines = lit.seeded(_Held), _Lines()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(lines)
    trainer = lit.trainer(
        {"num_microbatches": 4, "schedule": schedule, "balance": "uniform"},
        2,
        callbacks=callbacks,
        logger=CSVLogger(root) if root else False,
        log_every_n_steps=1,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, _data())
    logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(lines)
    return {
        **lit.outcome(module, trainer),
        "warnings": [str(warning.message) for warning in caught],
        "said": lines.text,
        "path": trainer.logger.log_dir if trainer.logger else None,
    }


def _runs(root: str) -> list[Any]:
    found = []
    for schedule, folder in (("gpipe", root), ("1f1b", None)):
        monitor = StageMemoryMonitor(every_n_steps=3, warn_fraction=1e-6)
        more = [DeviceStatsMonitor()] if folder else []
        run = _fit([monitor, *more], schedule, folder)
        found.append({**run, "latest": monitor.latest})
    return [*found, _fit([], "1f1b")]


def test_what_stages_hold_is_what_their_layers_need(tmp_path: Any) -> None:
    results = run_ranks(2, _runs, str(tmp_path), timeout=150)
    layer, head = 8 * (WIDTH * WIDTH + WIDTH), 8 * (WIDTH * 4 + 4)
    for gpipe, one_f_one_b, plain in results:
        for run, flights in ((gpipe, (4, 4)), (one_f_one_b, (2, 1))):
            first, last = run["latest"]
            assert (first.stage, first.rank, last.stage) == (0, 0, 1)
            assert [one.weight_bytes for one in (first, last)] == [4 * layer, 3 * layer + head]
            for one, flight in zip((first, last), flights, strict=True):
                assert one.gradient_bytes == one.weight_bytes
                assert one.optimizer_bytes == 2 * one.weight_bytes  # AdamW's two moments
                # what goes in and what each tanh gives, of 4 rows; the loss and its labels
                tail = 4 * 4 * 8 + 4 * 8 + 8 if one is last else 0
                inside = (4 if one is last else 5) * 4 * WIDTH * 8
                assert one.activation_bytes == flight * (inside + tail)
                # the trace leaves out the batch, which is there on one device as well
                batch = 4 * 8 if one is last else 4 * WIDTH * 8
                assert one.traced_bytes == one.activation_bytes - flight * batch
                assert one.predicted_bytes > one.weight_bytes * 4
                assert 0 < one.peak_bytes <= one.device_bytes * 2
        # looking at it changes nothing
        assert one_f_one_b["metrics"] == plain["metrics"]
        for name, value in plain["weights"].items():
            assert torch.equal(one_f_one_b["weights"][name], value)
    gpipe, one_f_one_b, _ = results[0]
    assert "Memory of the stages" in one_f_one_b["said"]
    assert "Memory of the stages" not in gpipe["said"]
    full = [text for text in gpipe["warnings"] if "stage 0 is on rank 0, which held" in text]
    assert len(full) == 1
    assert "schedule='1f1b' keeps 2 and saves" in full[0]
    header, *rows = Path(gpipe["path"], "metrics.csv").read_text().splitlines()
    names = header.split(",")
    for part in ("weights", "gradients", "optimizer", "activations", "peak", "predicted"):
        assert f"pipeline/memory_{part}_bytes/stage_1" in names
    stats = "DeviceStatsMonitor.on_train_batch_end/stage_{}.{}"
    for name in ("rss_bytes", "peak_rss_bytes", "total_bytes", "tensor_bytes", "optimizer_bytes"):
        assert stats.format(0, name) in names
        assert stats.format(1, name) in names
    place = names.index(stats.format(0, "weight_bytes"))
    assert {row.split(",")[place] for row in rows} == {"", str(float(4 * layer))}


class _RunsOut(_Held):
    """Its unit 1 asks for a petabyte in the third step."""

    how = "torch"

    def on_fit_start(self) -> None:
        self.net[1].register_forward_hook(self.run_out)

    def run_out(self, module: Any, args: Any, output: Any) -> Any:
        if self.trainer.global_step < 2 or type(output) is not torch.Tensor:
            return None
        if self.how == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return output + torch.empty(2**50, dtype=torch.uint8).sum()


class _RunsOutOnCuda(_RunsOut):
    how = "cuda"


class _RunsOutInTheOptimizer(_Held):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)
        if batch_idx == 1:
            raise MemoryError("no memory for the moments")


def _fail(cls: Any, devices: int) -> tuple[Any, str]:
    trainer = lit.trainer(
        {"num_microbatches": 4, "schedule": "gpipe", "balance": "uniform"}, devices
    )
    try:
        trainer.fit(lit.seeded(cls), _data())
    except BaseException as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("cls", "kind", "own"),
    [
        (_RunsOut, RuntimeError, "DefaultCPUAllocator: can't allocate memory"),
        (_RunsOutOnCuda, torch.OutOfMemoryError, "CUDA out of memory"),
        (_RunsOutInTheOptimizer, MemoryError, "no memory for the moments"),
    ],
)
def test_an_out_of_memory_error_keeps_its_type_and_has_the_ledger(
    cls: Any, kind: Any, own: str
) -> None:
    found, text = _fail(cls, 1)
    assert found is kind
    assert own in text
    assert "stage 0 of 1, on rank 0: weights 58.8 KiB, gradients 58.8 KiB, optimizer 117" in text
    order = ("micro-batches in flight", "a stage too full", "activations")
    causes = [text.index(f"  {number}. {what}") for number, what in enumerate(order, 1)]
    assert causes == sorted(causes)
    assert "schedule='1f1b' keeps 1 and saves" in text
    assert "start with 1" in text
    assert text.count("the usual causes") == 1


def test_other_errors_have_no_ledger() -> None:
    class Fails(_Held):
        def on_train_batch_end(self, *args: Any) -> None:
            raise RuntimeError("something else")

    assert _fail(Fails, 1) == (RuntimeError, "something else")


def test_the_stage_that_ran_out_is_the_one_that_is_shown() -> None:
    (found, text), (other, others) = run_ranks(2, _fail, _RunsOut, 2, timeout=150)[::-1]
    assert found is RuntimeError
    assert "stage 0 of 2, on rank 0: weights 33.0 KiB" in text
    assert "action 0F0" in text
    assert "stage 1 of 2" not in text
    assert other is PeerError
    # it quotes who failed first, and has no ledger of its own
    assert others.startswith("global rank 1 failed first")
    assert others.count("the usual causes") <= 1
    assert "stage 1 of 2" not in others


def test_wrong_arguments_and_strategies_are_refused() -> None:
    for arguments in ({"every_n_steps": 0}, {"warn_fraction": 0.0}, {"warn_fraction": 1.5}):
        with pytest.raises(ConfigError, match="give"):
            StageMemoryMonitor(**arguments)
    trainer = lit.trainer(None, 1, callbacks=[StageMemoryMonitor()])
    with pytest.raises(ConfigError, match="SingleDeviceStrategy"):
        trainer.fit(lit.seeded(_Held), _data())
