"""SEAM: gradients of the weights of linear maps, added where they belong and not made first.

A backward makes the gradient of a weight and then adds it to ``weight.grad``. With many micro-
batches of few rows, making it costs more than the product itself: what is written, read again and
added has the size of the weight, whatever the number of rows. Here one call (``addmm_``) does both,
as Megatron-LM's gradient accumulation fusion does on a GPU. In the graph of autograd, such a map is
a node ``AddmmBackward0`` or ``MmBackward0`` with

    grad ── Addmm ── (T) ── AccumulateGrad of the weight
              └── what the map was given, ...

When ``grad`` arrives at the node, everything that is needed is there. The weight is then left out
of what the engine of autograd is asked for, so that it makes no gradient for it. Where the W pass
comes later, the engine is not needed for weights and biases of such maps at all.

Left to autograd: the first gradient of a weight in a whole backward, half precision (whose sums
would be rounded in another order), and whatever has a hook on its gradient, is no plain tensor, is
used in any other way too, or is given what a hook brings back (recomputation, offloading).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_pipe.runtime.graph import Graph

__all__ = ["Bias", "LinearMap", "adding", "biases", "linear_maps", "visited"]

#: node: place of the weight among what it leads to, what was given, and its factor
_MAPS = {
    "AddmmBackward0": (2, "mat1", "_saved_alpha"),
    "MmBackward0": (1, "self", None),
}
_TRANSPOSED = "TBackward0"
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, eq=False)
class LinearMap:
    """One use of a weight.

    Args:
        node: Its node in the graph.
        weight: The leaf.
        transposed: Whether rows of the weight are outputs, as in `nn.Linear`.
    """

    node: Node
    weight: Tensor
    transposed: bool

    def add(self, grad: Tensor) -> None:
        """Adds to the gradient of the weight.

        Args:
            grad: (rows, outputs), that of the map's result.
        """
        _, given, factor = _MAPS[self.node.name()]
        left, right = grad.t(), getattr(self.node, f"_saved_{given}")
        if not self.transposed:
            left, right = right.t(), grad
        alpha = 1 if factor is None else getattr(self.node, factor)
        with torch.no_grad():
            if self.weight.grad is None:
                self.weight.grad = torch.empty_like(self.weight)
                self.weight.grad.addmm_(left, right, beta=0, alpha=alpha)
            else:
                self.weight.grad.addmm_(left, right, alpha=alpha)


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """One use of a bias.

    Args:
        node: The map that adds it to each row.
        weight: The leaf.
    """

    node: Node
    weight: Tensor

    def add(self, grad: Tensor) -> None:
        """Adds to the gradient of the bias; ``grad`` (rows, outputs) is that of the result."""
        with torch.no_grad():
            summed = grad.sum(0)
            self.weight.grad = summed if self.weight.grad is None else self.weight.grad.add_(summed)


def linear_maps(graph: Graph) -> list[LinearMap]:
    """The maps whose weights are used by such maps only."""
    if torch.is_anomaly_enabled():  # which looks at every gradient that is made
        return []
    users = graph.users()
    found: list[LinearMap] = []
    for node, leaf in graph.leaves():
        if _is_plain(leaf):
            found.extend(_maps_of(node, leaf, graph, users))
    return found


def biases(graph: Graph) -> list[Bias]:
    """The biases that are used by such maps only."""
    if torch.is_anomaly_enabled():
        return []
    users = graph.users()
    found: list[Bias] = []
    for node, leaf in graph.leaves():
        nodes = users.get(node, [])
        if leaf.dim() == 1 and _is_plain(leaf) and all(_adds_it(user, node) for user in nodes):
            found.extend(Bias(user, leaf) for user in nodes)
    return found


def visited(maps: list[LinearMap], graph: Graph) -> list[LinearMap]:
    """Those whose nodes a backward visits for the sake of other leaves, and of weights that have a
    gradient already: the first one is made by autograd, so that one micro-batch is as without."""
    first = {id(entry.weight) for entry in maps if entry.weight.grad is None}
    maps = [entry for entry in maps if id(entry.weight) not in first]
    while maps:
        left_out = {id(entry.weight) for entry in maps}
        seen = graph.reaching([n for n, leaf in graph.leaves() if id(leaf) not in left_out])
        lost = {entry.node: entry.weight for entry in maps if entry.node not in seen}
        if not lost:
            return maps
        deepest = next(lost[node] for node in reversed(graph.order) if node in lost)
        maps = [entry for entry in maps if entry.weight is not deepest]  # others lead there
    return maps


@contextmanager
def adding(maps: Sequence[LinearMap]) -> Iterator[None]:
    """While the graph's backward runs: what arrives at the maps is added to their weights."""
    handles = [entry.node.register_prehook(_adds(entry)) for entry in maps]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adds(entry: LinearMap) -> Callable[[Any], None]:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            entry.add(grads[0])

    return hook


def _adds_it(node: Node, leaf: Node) -> bool:
    """Whether a map adds a leaf to each of its rows, once and as it is."""
    behind = [following for following, _ in node.next_functions]
    if node.name() != "AddmmBackward0" or behind[0] is not leaf or behind.count(leaf) != 1:
        return False
    return node._saved_beta == 1  # type: ignore[attr-defined,no-any-return]


def _is_plain(weight: Tensor) -> bool:
    grad = weight.grad
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.dtype in _DTYPES
        and (grad is None or _is_sum(grad, weight))
        and not weight._backward_hooks
        and not getattr(weight, "_post_accumulate_grad_hooks", None)
    )


def _is_sum(grad: Tensor, weight: Tensor) -> bool:
    """Whether it can be added to in place."""
    dense = type(grad) is Tensor and grad.layout == torch.strided
    return dense and grad.dtype == weight.dtype and not grad.requires_grad


def _has_hook(node: Node, given: str) -> bool:
    """Whether what was saved is brought back by a hook, some of which work once: recomputation."""
    saved = getattr(node, f"_raw_saved_{given}")
    return getattr(saved, "unpack_hook", saved) is not None


def _maps_of(
    leaf: Node, weight: Tensor, graph: Graph, users: dict[Node, list[Node]]
) -> list[LinearMap]:
    """All uses of a weight; none if one is something else."""
    found = []
    for user in users.get(leaf, ()):
        transposed = graph.names[user] == _TRANSPOSED
        origin = user if transposed else leaf
        for node in users.get(user, ()) if transposed else [user]:
            known = _MAPS.get(graph.names[node])
            if known is None or graph.after[node].count(origin) != 1:
                return []
            if node.next_functions[known[0]][0] is not origin or _has_hook(node, known[1]):
                return []
            found.append(LinearMap(node, weight, transposed))
    return found
