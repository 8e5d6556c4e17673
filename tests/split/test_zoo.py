"""The zoo: every architecture in tiny, cut into stages, has the uncut numbers or is refused."""

from __future__ import annotations

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence

import pytest
from tests.split.parity import Parity, compare, random_starts
from tests.zoo.catalogue import ZOO
from tests.zoo.modules import MODELS

from lightning_pipe.errors import PlanError

#: what cannot run over the stages, and what says so
REFUSED = {
    "one_recurrent_module": (4, PlanError, "cannot make 4 stages out of 3 units"),
    "bare_parameters": (2, PlanError, "cannot make 2 stages out of 1 units"),
}
#: fp32 sums of many thousand terms in another order
LOOSE = {"timm_inception": 1e-4}
OTHERS = sorted(ZOO.keys() - REFUSED.keys() - MODELS.keys())
CHEAP = [name for name in OTHERS if not name.startswith("timm_")]


def _compare(
    name: str, num_stages: int, starts: Callable[[int], Sequence[int]] | None = None
) -> Parity:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        return compare(ZOO[name], num_stages, starts)


def _assert_exact(name: str, result: Parity) -> None:
    assert result.missing == []
    assert result.loss_error < 1e-6
    assert result.gradient_error < LOOSE.get(name, 1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_four_stages_equal_one(name: str) -> None:
    result = _compare(name, 4)
    _assert_exact(name, result)
    assert name == "siamese_batch_norm" or result.wrong_buffers == []


@pytest.mark.parametrize("name", sorted({*CHEAP[::4], "bart_with_layer_drop"}))
def test_two_stages_equal_one(name: str) -> None:
    _assert_exact(name, _compare(name, 2))


@pytest.mark.parametrize(
    ("name", "seed"), [(name, zlib.crc32(name.encode()) % 1000) for name in CHEAP[2::4]]
)
def test_stages_cut_anywhere_equal_one(name: str, seed: int) -> None:
    starts = functools.partial(random_starts, num_stages=3, seed=seed)
    _assert_exact(name, _compare(name, 3, starts))


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    num_stages, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        _compare(name, num_stages)
