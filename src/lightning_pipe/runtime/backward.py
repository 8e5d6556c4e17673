"""A backward in two halves: input gradients now (I), weight gradients later (W).

Why not torch's `stage_backward_input` and `_weight`: they lose the gradients of weights that no
input leads through, and fail on several differentiable outputs (DESIGN.md section 3).

How the halves fit together. The I pass runs exactly the nodes from which an input can be reached:
call them inner. A path from an output to a weight is inner for a while and then leaves, never to
come back:

    output ── inner ── inner ── inner ── input
                │        │
                └─ x     └─ x ── x ── weight            x: not inner

The inner node where a path leaves is an exit. I records the gradient that arrives at every exit. W
starts from the exits with those gradients, so everything upstream of them is not computed again.
Weights that share an exit are done together. If one exit leads to another, the gradient that flows
there within W would count twice, so what arrives at an exit is replaced by what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from lightning_pipe.runtime.accumulation import Use, adding, bias_uses, weight_uses
from lightning_pipe.split.graph import Graph

# Nodes that hide weights or can run only once: the whole backward is done in I.
_INDIVISIBLE = frozenset({"CheckpointFunctionBackward", "CompiledFunctionBackward"})

Grads = tuple[Tensor | None, ...]


@dataclass(eq=False, slots=True)
class _Group:
    """Weights that share exits."""

    exits: list[Node] = field(default_factory=list)  # inner: their gradient is recorded in I
    roots: list[GradientEdge] = field(default_factory=list)  # outputs that are not inner
    root_grads: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    joined: _Group | None = None  # the group that took over this one


def backward_full(roots: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Accumulates the gradients of all leaves, inputs and weights, in `.grad`."""
    if not roots:
        return
    graph = Graph(roots)
    uses = [] if graph.has(_INDIVISIBLE) else weight_uses(graph)
    uses = [use for use in uses if use.weight.grad is not None]  # one micro-batch is as without
    if not uses:
        torch.autograd.backward(tuple(roots), tuple(grads))
        return
    added = {id(use.weight) for use in uses}
    asked: list[Any] = [leaf for _, leaf in graph.leaves() if id(leaf) not in added]
    asked += [GradientEdge(use.node, 0) for use in uses]  # so that the engine goes there
    with adding(uses):
        torch.autograd.backward(tuple(roots), tuple(grads), inputs=asked)


def backward_input(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[Grads, Callable[[], None]]:
    """Computes the gradients of `inputs` only.

    Args:
        roots: Outputs of the stage that require gradients, or its loss.
        grads: Their gradients; None for a loss.
        inputs: Leaves.

    Returns:
        The gradients of the inputs (None where no root depends on it), and a function that
        accumulates the gradients of the weights. It keeps the graph alive until it is dropped.
    """
    if not roots or not inputs:
        # Nobody waits for this stage: all of it can be done later.
        return (None,) * len(inputs), lambda: backward_full(roots, grads)
    filled = [torch.ones_like(r) if g is None else g for r, g in zip(roots, grads, strict=True)]
    edges = [get_gradient_edge(root) for root in roots]
    graph = Graph(roots)
    if graph.has(_INDIVISIBLE):
        backward_full(roots, filled)
        return _take_grads(inputs), lambda: None
    inner = graph.reaching({get_gradient_edge(leaf).node for leaf in inputs})
    added = _all_inner([*weight_uses(graph), *bias_uses(graph)], inner)
    alone = {id(use.weight) for use in added}
    groups = _group_weights(graph, inner, edges, filled, alone)
    recorded: dict[Node, Grads] = {}
    ends = dict.fromkeys([node for group in groups for node in group.exits])
    ends.update(dict.fromkeys(use.node for use in added))
    handles = [node.register_prehook(_recorder(node, recorded)) for node in ends]
    try:
        kept = [
            (root, grad)
            for root, grad, edge in zip(roots, filled, edges, strict=True)
            if edge.node in inner
        ]
        input_grads: Grads = (None,) * len(inputs)
        if kept:
            input_grads = torch.autograd.grad(
                tuple(root for root, _ in kept),
                tuple(inputs),
                tuple(grad for _, grad in kept),
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for handle in handles:
            handle.remove()
    return input_grads, lambda: _backward_weight(groups, added, recorded)


def _all_inner(uses: list[Use], inner: set[Node]) -> list[Use]:
    """Those of weights all of whose uses the I pass visits."""
    others = {id(use.weight) for use in uses if use.node not in inner}
    return [use for use in uses if id(use.weight) not in others]


def _backward_weight(groups: list[_Group], added: list[Use], recorded: dict[Node, Grads]) -> None:
    """The W pass. The graph is kept, since groups may cross the same node, and dies with its last
    user.
    """
    while added:
        use = added.pop()
        arrived = recorded.get(use.node)
        if arrived is not None and arrived[0] is not None:
            use.add(arrived[0])
    while groups:
        group = groups.pop()
        edges, grads, handles = list(group.roots), list(group.root_grads), []
        for node in group.exits:
            arrived = recorded.get(node)
            if arrived is None:  # every gradient that could have arrived was undefined
                continue
            handles.append(node.register_prehook(_replacer(arrived)))
            for index, grad in enumerate(arrived):
                if grad is not None:
                    edges.append(GradientEdge(node, index))
                    grads.append(grad)
        try:
            if edges:
                torch.autograd.backward(
                    tuple(edges), tuple(grads), inputs=tuple(group.weights), retain_graph=True
                )
        finally:
            for handle in handles:
                handle.remove()
    recorded.clear()


def _recorder(node: Node, recorded: dict[Node, Grads]) -> Callable[[Any], None]:
    def hook(grads: Grads) -> None:
        recorded[node] = tuple(grads)

    return hook


def _replacer(arrived: Grads) -> Callable[[Any], Grads]:
    return lambda _: arrived


def _take_grads(leaves: Iterable[Tensor]) -> Grads:
    taken = []
    for leaf in leaves:
        taken.append(leaf.grad)
        leaf.grad = None
    return tuple(taken)


def _group_weights(
    graph: Graph,
    inner: set[Node],
    roots: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    alone: Set[int],
) -> list[_Group]:
    """Finds the exits and joins the weights that are behind the same ones.

    Weights whose ids are ``alone`` need none.
    """
    group_of: dict[Node, _Group] = {}  # of nodes that are not inner and lead to a weight
    for node in reversed(graph.order):
        if node in inner:
            behind = [group_of[n] for n in graph.after[node] if n not in inner and n in group_of]
            if behind:
                _join(behind).exits.append(node)
        elif graph.is_leaf(node):
            if id(node.variable) not in alone:  # type: ignore[attr-defined]
                group_of[node] = _Group(weights=[node.variable])  # type: ignore[attr-defined]
        else:
            behind = [group_of[n] for n in graph.after[node] if n in group_of]
            if behind:
                group_of[node] = _join(behind)
    for edge, grad in zip(roots, grads, strict=True):
        if edge.node in group_of:
            group = _find(group_of[edge.node])
            group.roots.append(edge)
            group.root_grads.append(grad)
    return list(dict.fromkeys(_find(group) for group in group_of.values()))


def _find(group: _Group) -> _Group:
    while group.joined is not None:
        group = group.joined
    return group


def _join(groups: Iterable[_Group]) -> _Group:
    first, *others = dict.fromkeys(_find(group) for group in groups)
    for other in others:
        first.exits += other.exits
        first.weights += other.weights
        other.joined = first
    return first
