"""A link is measured as it is: equal on all ranks, and slower for more bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.helpers import run_ranks

from lightning_pipe.errors import PlanError
from lightning_pipe.link_command import _measure, link
from lightning_pipe.planning.costs import CostTable, LinkCosts, UnitCosts
from lightning_pipe.runtime.link import measure_link
from lightning_pipe.runtime.ranks import make_ranks


def body() -> LinkCosts:
    ranks = make_ranks((0, 1), 2)
    return measure_link(ranks, torch.device("cpu"), repeats=5)


def test_latency_and_bandwidth() -> None:
    first, second = run_ranks(2, body)
    assert first == second
    assert 0 <= first.latency_s < 1
    assert 1e6 < first.bytes_per_s < 1e12
    assert first.transfer_s(2**30) > first.transfer_s(2**10)


def _command(costs: str) -> list[CostTable]:
    found = []
    for hosts in (("one", "one"), ("one", "two")):
        host = hosts[torch.distributed.get_rank()]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("socket.gethostname", lambda host=host: host)
            _measure("cpu", costs, 0)
        torch.distributed.barrier()
        found.append(CostTable.from_json(Path(costs).read_text()))
    return found


def test_the_command_adds_links_of_a_machine_and_between_two_to_the_costs(tmp_path: Path) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(CostTable((UnitCosts("head", 1.0, 1.0, 1.0),)).to_json())
    (one, two), _ = run_ranks(2, _command, str(costs))
    assert one.units == two.units == (UnitCosts("head", 1.0, 1.0, 1.0),)
    assert 1e6 < one.link.bytes_per_s < 1e12
    assert one.node_link is None
    assert two.link == one.link
    assert two.node_link is not None
    assert 1e6 < two.node_link.bytes_per_s < 1e12


def test_a_table_that_cannot_be_used_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="--save-costs FILE"):
        link(["--costs", str(tmp_path / "none.json")])
    (tmp_path / "wrong.json").write_text('{"units": [1]}')
    with pytest.raises(PlanError, match="the cost table cannot be read"):
        link(["--costs", str(tmp_path / "wrong.json")])
