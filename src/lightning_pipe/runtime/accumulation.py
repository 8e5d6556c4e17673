"""SEAM: gradients of weights, added where they belong and not made first.

A backward makes the gradient of a weight and then adds it to ``weight.grad``. With many micro-
batches of few rows, that costs more than the work itself: what is written, read again and added has
the size of the weight, whatever the number of rows. Here one call does both: ``addmm_`` for linear
maps, as Megatron-LM's gradient accumulation fusion does on a GPU, and ``index_add_`` for lookups,
which touches the rows that were looked up and no others. In the graph of autograd, these are

    grad ── Addmm or Mm ── (T) ── AccumulateGrad         grad ── Embedding ── AccumulateGrad
                └── what the map was given, ...

When ``grad`` arrives at such a node, everything that is needed is there. The engine of autograd is
asked to visit the node, and not for the weight, so that it makes no gradient for that. Where the W
pass comes later, the engine is not needed for such weights, and their biases, at all.

Left to autograd: the first gradient of a weight in a whole backward, half precision (whose sums
would be rounded in another order), and whatever has a hook on its gradient, is no plain tensor, is
used in any other way too, or is given what a hook brings back (recomputation, offloading); lookups
on other devices than CPUs, where such sums have no fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from lightning_pipe.split.graph import Graph

__all__ = ["Use", "adding", "bias_uses", "weight_uses"]

#: node: place of the weight among what it leads to, what was given, and its factor
_MAPS = {
    "AddmmBackward0": (2, "mat1", "_saved_alpha"),
    "MmBackward0": (1, "self", None),
}
_TRANSPOSED = "TBackward0"
_LOOKUP = "EmbeddingBackward0"
_DTYPES = (torch.float32, torch.float64)

Add = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One use of a weight.

    Args:
        node: Its node in the graph.
        weight: The leaf.
        add: Adds to the gradient of the weight, given that of the result of the node.
    """

    node: Node
    weight: Tensor
    add: Add


def weight_uses(graph: Graph) -> list[Use]:
    """The uses of weights of linear maps and embeddings that can be added in place."""
    if torch.is_anomaly_enabled():  # which looks at every gradient that is made
        return []
    found: list[Use] = []
    for node, leaf in graph.leaves():
        if _is_plain(leaf):
            found.extend(_uses_of(node, leaf, graph))
    return found


def bias_uses(graph: Graph) -> list[Use]:
    """Those of biases that are added to each row of a linear map."""
    if torch.is_anomaly_enabled():
        return []
    found: list[Use] = []
    for node, leaf in graph.leaves():
        users = graph.users.get(node, [])
        if leaf.dim() == 1 and _is_plain(leaf) and all(_adds_it(u, node, graph) for u in users):
            found.extend(Use(user, leaf, _bias(leaf)) for user in users)
    return found


@contextmanager
def adding(uses: Sequence[Use]) -> Iterator[None]:
    """While the graph's backward runs: what arrives at the nodes is added to their weights."""
    handles = [use.node.register_prehook(_adds(use)) for use in uses]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _adds(use: Use) -> Callable[[Any], None]:
    def hook(grads: tuple[Tensor | None, ...]) -> None:
        if grads[0] is not None:
            use.add(grads[0])

    return hook


def _map(node: Node, weight: Tensor, given: str, factor: str | None, transposed: bool) -> Add:
    """``transposed``: whether rows of the weight are outputs, as in `nn.Linear`."""

    def add(grad: Tensor) -> None:
        left, right = grad.t(), getattr(node, f"_saved_{given}")
        if not transposed:
            left, right = right.t(), grad
        alpha = 1 if factor is None else getattr(node, factor)
        with torch.no_grad():
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
                weight.grad.addmm_(left, right, beta=0, alpha=alpha)
            else:
                weight.grad.addmm_(left, right, alpha=alpha)

    return add


def _lookup(node: Any, weight: Tensor) -> Add:
    def add(grad: Tensor) -> None:
        rows, places = grad.flatten(0, -2), node._saved_indices.flatten()
        if node._saved_padding_idx < len(weight):  # none is -1, as a number without a sign
            rows = rows.masked_fill((places == node._saved_padding_idx)[:, None], 0)
        with torch.no_grad():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, places, rows)

    return add


def _bias(bias: Tensor) -> Add:
    def add(grad: Tensor) -> None:
        with torch.no_grad():
            summed = grad.sum(0)
            bias.grad = summed if bias.grad is None else bias.grad.add_(summed)

    return add


def _uses_of(leaf: Node, weight: Tensor, graph: Graph) -> list[Use]:
    """All uses of a weight; none if one cannot be added in place."""
    found = []
    for user in graph.users.get(leaf, ()):
        transposed = graph.names[user] == _TRANSPOSED
        origin = user if transposed else leaf
        for node in graph.users.get(user, ()) if transposed else [user]:
            add = _adder(node, origin, weight, graph, transposed=transposed)
            if add is None:
                return []
            found.append(Use(node, weight, add))
    return found


def _adder(
    node: Node, origin: Node, weight: Tensor, graph: Graph, *, transposed: bool
) -> Add | None:
    """What adds for a node that uses a weight; None if it cannot be done in place."""
    name, place = graph.names[node], 0
    if name in _MAPS:
        place, given, factor = _MAPS[name]
        add = _map(node, weight, given, factor, transposed)
    elif name == _LOOKUP and not transposed and _is_lookup(node, weight):
        given, add = "indices", _lookup(node, weight)
    else:
        return None
    if not _leads_once(node, place, origin, graph) or _has_hook(node, given):
        return None
    return add


def _leads_once(node: Node, place: int, origin: Node, graph: Graph) -> bool:
    """Whether a node leads to another at this place and at no other."""
    return graph.after[node].count(origin) == 1 and node.next_functions[place][0] is origin


def _is_lookup(node: Any, weight: Tensor) -> bool:
    special = node._saved_sparse or node._saved_scale_grad_by_freq
    return weight.device.type == "cpu" and not special


def _has_hook(node: Node, given: str) -> bool:
    """Whether what was saved is brought back by a hook, some of which work once: recomputation."""
    saved = getattr(node, f"_raw_saved_{given}")
    return getattr(saved, "unpack_hook", saved) is not None


def _adds_it(node: Any, leaf: Node, graph: Graph) -> bool:
    """Whether a map adds a leaf to each of its rows, once and as it is."""
    if graph.names[node] != "AddmmBackward0" or not _leads_once(node, 0, leaf, graph):
        return False
    return bool(node._saved_beta == 1)


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
