"""Plans and cost tables: readable as text, and the same after a round trip."""

from __future__ import annotations

import json

import pytest

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import CostTable, LinkCosts, StageCosts, UnitCosts, stage_costs
from lightning_pipe.planning.plan import Plan, StagePlan, format_bytes, format_count

STAGES = (
    StagePlan(0, 1, "embed", "blocks.1", 3, 1_500_000, 6_000_000, 2 * 10**9, 4096, 512, ("tied",)),
    StagePlan(1, 0, "head", "head", 1, 999, 3996, 10**9, 0, 0, ("tied",)),
)
PLAN = Plan(STAGES, "1f1b", 2, 1, 8, "flops", 1 / 9, ("BatchNorm sees one micro-batch at a time.",))


def test_table() -> None:
    header, first, last = PLAN.table_rows()
    assert len(header) == len(first) == len(last)
    assert first == [
        "0", "1", "3", "embed .. blocks.1", "1.5 M", "5.7 MiB", "2.0 G (67%)", "4.0 KiB", "512 B",
    ]  # fmt: skip
    assert last[3] == "head"
    assert last[-1] == "-"


def test_describe() -> None:
    text = PLAN.describe().splitlines()
    assert text[0] == (
        "1f1b: 2 ranks, 8 micro-batches, balanced by flops (heaviest rank 1.33 x mean), "
        "ideal bubble 11.1%"
    )
    assert text[-1] == "note: BatchNorm sees one micro-batch at a time."
    assert text[2].index("embed") == text[3].index("head")


def test_describe_names_chunks() -> None:
    stages = tuple(StagePlan(s, 0, "a", "a", 1, 0, 0, 0, 0, 0) for s in range(2))
    text = Plan(stages, "zbv", 1, 2, 1, "uniform", 0.0).describe()
    assert text.startswith("zbv: 1 rank x 2 chunks, 1 micro-batch, balanced by uniform")
    assert "1.00 x mean" in text


def test_plan_round_trips_through_json() -> None:
    assert Plan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN


def test_a_wrong_plan_names_its_fields() -> None:
    values = PLAN.to_dict()
    del values["balance"]
    with pytest.raises(PlanError, match=r"Plan lacks \['balance'\] and has \['extra'\]"):
        Plan.from_dict({**values, "extra": 1})
    values = PLAN.to_dict()
    del values["stages"][0]["flops"]
    with pytest.raises(PlanError, match=r"StagePlan lacks \['flops'\] and has nothing"):
        Plan.from_dict(values)


def test_numbers_for_people() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 5 * 1024**5)] == [
        "0 B", "1023 B", "1.0 KiB", "5120.0 TiB",
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 999, 1000, 405e9, 3e19)] == [
        "0", "999", "1.0 K", "405.0 G", "30000.0 P",
    ]  # fmt: skip


UNITS = (
    UnitCosts("embed", 1.0, 0.0, 2.0, activation_bytes=5, output_bytes=7, parameter_bytes=9),
    UnitCosts("block", 2.0, 2.0, 2.0, activation_bytes=6, output_bytes=8),
    UnitCosts("head", 4.0, 4.0, 4.0, activation_bytes=1, output_bytes=3),
)


def test_units_sum_to_stages() -> None:
    assert stage_costs(UNITS, (0, 2)) == (
        StageCosts(3.0, 2.0, 4.0, activation_bytes=11, boundary_bytes=8),
        StageCosts(4.0, 4.0, 4.0, activation_bytes=1, boundary_bytes=0),
    )
    assert StageCosts(3.0, 2.0, 4.0).backward_s == 6.0
    assert StageCosts(3.0, 2.0, 4.0).total_s == 9.0


@pytest.mark.parametrize("link", [LinkCosts(), LinkCosts(1e-5, 25e9)])
def test_cost_table_round_trips_as_strict_json(link: LinkCosts) -> None:
    table = CostTable(UNITS, link, device="cpu")
    json.loads(table.to_json(), parse_constant=pytest.fail)
    assert CostTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "cannot be read"),
        ('{"units": []}', "link"),
        ('{"units": [{"unit": "a"}], "link": {}}', "forward_s"),
        ('{"units": [], "link": {"latency_s": -1}}', "latency_s is -1"),
        ('{"units": [], "link": {"latency_s": "1"}}', "latency_s is '1'"),
        ('{"units": [], "link": {"speed": 1}}', "speed"),
    ],
)
def test_a_wrong_cost_table_says_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CostTable.from_json(text)
