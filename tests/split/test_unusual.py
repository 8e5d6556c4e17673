"""Models that use torch in ways of their own, and evaluation on torch's fused paths."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.split.parity import compare, evaluate, random_starts
from tests.zoo.modules import ROWS, Case, Stack
from tests.zoo.unusual import UNUSUAL
from torch import Tensor, nn

from lightning_pipe.errors import CutError
from lightning_pipe.split.analyse import trace_step


@pytest.mark.parametrize("name", sorted(UNUSUAL))
def test_unusual_models_are_exact(name: str) -> None:
    for num_stages, seed in ((4, None), (3, 1)):
        starts = functools.partial(random_starts, num_stages=num_stages, seed=seed)
        result = compare(UNUSUAL[name], num_stages, None if seed is None else starts)
        assert result.missing == []
        assert result.loss_error < 1e-6
        assert result.gradient_error < 1e-5
        assert result.wrong_buffers == []


def test_a_unit_under_vmap_is_refused_with_a_way_out() -> None:
    module = Stack([nn.Linear(16, 16) for _ in range(4)], lambda block, h: torch.vmap(block)(h))
    with pytest.raises(CutError, match=r"blocks\.0.*the forward of a submodule"):
        trace_step(module, lambda b: module(b).mean(), torch.randn(4, 8), num_stages=2)


class _Reader(nn.Module):
    """torch's encoder between two layers; every position is read, padding too."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, **options)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.last(self.encoder(self.first(x), src_key_padding_mask=padding))


PADDINGS = {
    "at the end": [[0, 0, 0, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "in no row to the end": [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]],
    "in the middle": [[0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]],
}


@pytest.mark.filterwarnings("ignore:.*nested tensor")
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("nested", [True, False])
def test_evaluation_of_padded_rows_equals_torchs_fused_path(nested: bool, padding: str) -> None:
    def build(dtype: torch.dtype, norm: bool) -> Case:
        torch.manual_seed(0)
        options = {"norm": nn.LayerNorm(16)} if norm else {}
        module = _Reader(enable_nested_tensor=nested, **options).to(dtype)
        batch = {
            "x": torch.randn(ROWS, 5, 8, dtype=dtype),
            "p": torch.tensor(PADDINGS[padding]).bool(),
        }
        return Case(module, lambda b: module(b["x"], b["p"]).pow(2).mean(), batch)

    def step(case: Case, batch: Any) -> Tensor:
        return case.module(batch["x"], batch["p"])

    # the model without a last norm in single precision, with one in double
    single = functools.partial(build, torch.float32, False)
    assert evaluate(single, step, 3, lambda n: (0, 2, n - 2)) < 1e-5
    double = functools.partial(build, torch.float64, True)
    assert evaluate(double, step, 4) < 1e-13
