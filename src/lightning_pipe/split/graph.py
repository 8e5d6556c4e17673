"""The graph of autograd behind some tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

__all__ = ["Graph", "leaves_of"]

_LEAF = "torch::autograd::AccumulateGrad"


class Graph:
    """All nodes from which gradients may flow.

    Args:
        tensors: What a backward would begin with; each requires a gradient.

    Attributes:
        order: The nodes, each before those it leads to.
        after: Those that each leads to.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.order: list[Node] = []
        self.after: dict[Node, list[Node]] = {}
        for tensor in tensors:
            stack = [(get_gradient_edge(tensor).node, False)]
            while stack:
                node, done = stack.pop()
                if done:
                    self.order.append(node)
                elif node not in self.after:
                    after = [following for following, _ in node.next_functions if following]
                    self.after[node] = after
                    stack.append((node, True))
                    stack.extend((following, False) for following in after)
        self.order.reverse()
        self.names = {node: node.name() for node in self.order}

    def has(self, names: Collection[str]) -> bool:
        """Whether a node has one of these names."""
        return not set(names).isdisjoint(self.names.values())

    def is_leaf(self, node: Node) -> bool:
        """Whether it accumulates the gradient of a tensor."""
        return self.names[node] == _LEAF

    def leaves(self) -> Iterator[tuple[Node, Tensor]]:
        """Nodes that accumulate, and the tensors whose gradients those are."""
        return ((n, n.variable) for n in self.order if self.names[n] == _LEAF)  # type: ignore[attr-defined]

    @cached_property
    def users(self) -> dict[Node, list[Node]]:
        """The nodes that lead to each; once for every edge."""
        found: dict[Node, list[Node]] = {}
        for node in self.order:
            for following in self.after[node]:
                found.setdefault(following, []).append(node)
        return found

    def reaching(self, targets: Collection[Node]) -> set[Node]:
        """The nodes from which a target can be reached, targets included."""
        found = set(targets)
        for node in reversed(self.order):
            if not found.isdisjoint(self.after[node]):
                found.add(node)
        return found


def leaves_of(tensor: Tensor) -> list[Tensor]:
    """What a tensor was made of, as far as it has gradients."""
    return [leaf for _, leaf in Graph([tensor]).leaves()] if tensor.requires_grad else []
