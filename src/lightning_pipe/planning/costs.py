"""What units, stages and links cost, in seconds and bytes: from a trace or a clock, or from JSON.

A table measured once on one device (``CostTable``) plans a whole cluster of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning_pipe.errors import PlanError

__all__ = ["CostTable", "LinkCosts", "StageCosts", "UnitCosts", "stage_costs"]


@dataclass(frozen=True, slots=True)
class StageCosts:
    """One stage and one micro-batch. A full backward takes ``input_s + weight_s``.

    Args:
        forward_s: Seconds of F.
        input_s: Seconds of I, the gradient of the stage's inputs.
        weight_s: Seconds of W, the gradient of its weights.
        activation_bytes: Bytes held from F to the end of the backward.
        boundary_bytes: Bytes that go to the next stage after F.
        gradient_bytes: Bytes that come back from it; None means as many.
    """

    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: int = 0
    boundary_bytes: int = 0
    gradient_bytes: int | None = None

    @property
    def returned_bytes(self) -> int:
        """Bytes of gradients that the next stage sends back."""
        return self.boundary_bytes if self.gradient_bytes is None else self.gradient_bytes

    @property
    def backward_s(self) -> float:
        """Seconds of a full backward B."""
        return self.input_s + self.weight_s

    @property
    def total_s(self) -> float:
        """Seconds of forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """A link between two ranks: n bytes arrive ``latency_s + n / bytes_per_s`` after they left.

    The default is a link that costs nothing.

    >>> LinkCosts(latency_s=1e-3, bytes_per_s=1e9).transfer_s(2_000_000)
    0.003
    """

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def transfer_s(self, num_bytes: int) -> float:
        """Seconds until so many bytes have arrived over the idle link."""
        return self.latency_s + num_bytes / self.bytes_per_s


FREE = LinkCosts()
"""A link that costs nothing."""

GUESSED_FLOPS_PER_S = 1e14
"""Of a device, and its link to a neighbour, where nothing is measured: a large accelerator's."""
GUESSED_LINK = LinkCosts(latency_s=1e-5, bytes_per_s=5e10)
GUESSED_CPU_FLOPS_PER_S = 2e10
"""Of a core, and its link to another process of the machine."""
GUESSED_CPU_LINK = LinkCosts(latency_s=2e-4, bytes_per_s=1e9)


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """One unit call and one micro-batch; what ``StageCosts`` is made of.

    Args:
        unit: Dotted name of the module.
        forward_s: Seconds of F; likewise ``input_s`` for I and ``weight_s`` for W.
        activation_bytes: Bytes that its backward needs.
        output_bytes: Bytes of the boundary, if the model is cut after this call.
        parameter_bytes: Bytes of its weights.
    """

    unit: str
    forward_s: float
    input_s: float
    weight_s: float
    activation_bytes: int = 0
    output_bytes: int = 0
    parameter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of all unit calls of a model, in order, and of the link between ranks.

    Args:
        units: The calls.
        link: Between two ranks of a node.
        device: What they were measured on.
        rows: Rows of the measured micro-batch; 0 if unknown.
        overhead_s: Seconds of one action beside the code of its stage: the engine's.
        node_link: Between two nodes, if that is another.
        forward_overhead_s: Seconds of a stage's forward beside its units: glue, stand-ins.

    >>> table = CostTable((UnitCosts("head", 1.0, 1.0, 1.0),), LinkCosts(), device="cpu")
    >>> CostTable.from_json(table.to_json()) == table
    True
    """

    units: tuple[UnitCosts, ...]
    link: LinkCosts = LinkCosts()
    device: str = ""
    rows: int = 0
    overhead_s: float = 0.0
    node_link: LinkCosts | None = None
    forward_overhead_s: float = 0.0

    def to_json(self) -> str:
        """The table as text; a link without limit has ``null`` bytes per second."""
        table = asdict(self)
        for link in (table["link"], table["node_link"]):
            if link is not None and math.isinf(link["bytes_per_s"]):
                link["bytes_per_s"] = None
        return json.dumps(table, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Reads what ``to_json`` wrote.

        Raises:
            PlanError: The text is not JSON, or a field is missing, unknown or not a number >= 0.
        """
        try:
            table = json.loads(text)
            units = tuple(_read(UnitCosts, unit) for unit in table["units"])
            node_link = table.get("node_link")
            return cls(
                units,
                _read_link(table["link"]),
                str(table.get("device", "")),
                int(_number("rows", table.get("rows", 0))),
                float(_number("overhead_s", table.get("overhead_s", 0.0))),
                None if node_link is None else _read_link(node_link),
                float(table.get("forward_overhead_s", 0.0)),
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise PlanError(f"the cost table cannot be read: {error!r}") from error


def stage_costs(units: Sequence[UnitCosts], starts: Sequence[int]) -> tuple[StageCosts, ...]:
    """Sums units to stages.

    Args:
        units: All unit calls of the model, in order.
        starts: Index of the first unit of each stage, as ``balance`` makes them.

    >>> [stage.forward_s for stage in stage_costs([UnitCosts("a", 1, 0, 0)] * 3, (0, 1))]
    [1, 2]
    """
    ends = [*starts[1:], len(units)]
    return tuple(
        _sum_units(units[start:end], is_last=end == len(units))
        for start, end in zip(starts, ends, strict=True)
    )


def _sum_units(units: Sequence[UnitCosts], *, is_last: bool) -> StageCosts:
    return StageCosts(
        forward_s=sum(unit.forward_s for unit in units),
        input_s=sum(unit.input_s for unit in units),
        weight_s=sum(unit.weight_s for unit in units),
        activation_bytes=sum(unit.activation_bytes for unit in units),
        boundary_bytes=0 if is_last else units[-1].output_bytes,
    )


def _read_link(values: dict[str, Any]) -> LinkCosts:
    link = dict(values)
    if link.get("bytes_per_s") is None:
        link["bytes_per_s"] = math.inf
    made: LinkCosts = _read(LinkCosts, link)
    return made


def _read(kind: Any, values: dict[str, Any]) -> Any:
    """Makes a dataclass of numbers (and the unit's name) from a JSON object, checking both."""
    for field in fields(kind):
        if field.name != "unit":
            _number(field.name, values.get(field.name, 0), endless=field.name == "bytes_per_s")
        elif not isinstance(values.get("unit"), str):
            raise ValueError(f"unit is {values.get('unit')!r}; it must be the name of a module")
    if kind is LinkCosts and values.get("bytes_per_s") == 0:
        raise ValueError("bytes_per_s is 0; nothing would ever arrive")
    return kind(**values)


def _number(name: str, value: Any, *, endless: bool = False) -> int | float:
    """A number that is finite and not negative."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0
    if not known or not (endless or math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}; it must be a finite number >= 0")
    found: int | float = value
    return found
