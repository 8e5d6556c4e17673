"""A cut step has the loss and the gradients of the uncut one, wherever it is cut."""

from __future__ import annotations

import functools

import pytest
from tests.split.parity import compare, random_starts
from tests.zoo.modules import MODELS


def _assert_exact(result) -> None:
    assert result.missing == []
    assert result.loss_error < 1e-6
    assert result.gradient_error < 1e-5
    assert result.wrong_buffers == []


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_cut_step_equals_the_uncut_step(name: str, num_stages: int) -> None:
    _assert_exact(compare(MODELS[name], num_stages))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_any_place_to_cut_is_exact(name: str) -> None:
    for num_stages, seed in ((2, 1), (3, 2), (3, 3), (4, 4)):
        starts = functools.partial(random_starts, num_stages=num_stages, seed=seed)
        _assert_exact(compare(MODELS[name], num_stages, starts))


@pytest.mark.parametrize("name", ["unet", "residual_in_glue", "tied_embedding", "inplace_residual"])
def test_sending_unit_outputs_only_is_exact_too(name: str) -> None:
    _assert_exact(compare(MODELS[name], 3, glue_values=False))
