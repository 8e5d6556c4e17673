"""Which ranks are on one machine, and what a link between two ranks costs.

The ranks of a pipeline are neighbours in the job, so a pipeline crosses as few machines as it can.
Between machines the link is slower: a border of stages that lies there is priced with it, and the
cut puts a thin boundary there if it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pipe.errors import PlanError
from lightning_pipe.planning.costs import FREE, LinkCosts

__all__ = ["ONE_NODE", "Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """The machines of a job.

    Args:
        devices_per_node: Ranks on one machine; None if all are on one.
        link: Between two ranks of one machine.
        node_link: Between two machines; as ``link`` if None.

    >>> two_nodes = Topology(devices_per_node=2)
    >>> [two_nodes.node_of(rank) for rank in range(4)]
    [0, 0, 1, 1]
    >>> two_nodes.crossings((0, 1, 2, 3))
    (1,)
    """

    devices_per_node: int | None = None
    link: LinkCosts = FREE
    node_link: LinkCosts | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node is not None and self.devices_per_node < 1:
            raise PlanError(f"devices_per_node={self.devices_per_node}: at least 1")

    def node_of(self, rank: int) -> int:
        """The machine of a rank."""
        return 0 if self.devices_per_node is None else rank // self.devices_per_node

    def between(self, source: int, target: int) -> LinkCosts:
        """The link from one rank to another; what ``simulate`` takes as ``link``."""
        if self.node_link is not None and self.node_of(source) != self.node_of(target):
            return self.node_link
        return self.link

    def crossings(self, stage_to_rank: Sequence[int]) -> tuple[int, ...]:
        """The stages whose border to the next one lies between two machines."""
        return tuple(
            stage
            for stage in range(len(stage_to_rank) - 1)
            if self.node_of(stage_to_rank[stage]) != self.node_of(stage_to_rank[stage + 1])
        )


ONE_NODE = Topology()
"""All ranks on one machine, with links that cost nothing."""
