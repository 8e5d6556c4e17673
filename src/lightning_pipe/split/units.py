"""Find the units of a module: the submodules whose calls are placed whole.

Coarse first: the children of containers are the blocks that people think in. Then the largest unit
is opened while it is too big for a good balance or while there are too few units for the stages. A
module without parameters is never a unit: it costs nothing to hold, so it runs wherever its inputs
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from weakref import WeakKeyDictionary

from torch import nn

_LISTS = (nn.ModuleList, nn.ModuleDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
#: their forward reads the children's weights directly
_NEVER_OPENED = (nn.MultiheadAttention, nn.RNNBase, nn.modules.adaptive.AdaptiveLogSoftmaxWithLoss)


def num_parameters(module: nn.Module) -> int:
    """Number of elements in the parameters of ``module``, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def has_parameters(module: nn.Module) -> bool:
    """Tell whether ``module`` or anything inside it has a parameter."""
    return next(module.parameters(), None) is not None


_IS_METRIC: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


def is_metric(module: nn.Module) -> bool:
    """Tell whether ``module`` is a torchmetrics object, without importing torchmetrics."""
    kind = type(module)
    known = _IS_METRIC.get(kind)
    if known is None:
        known = any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in kind.__mro__)
        _IS_METRIC[kind] = known
    return known


def modules_of(root: nn.Module) -> list[nn.Module]:
    """List what ``root.modules()`` yields, several times faster."""
    found: dict[int, nn.Module] = {}
    pending = [root]
    while pending:
        module = pending.pop()
        key = id(module)
        if key not in found:
            found[key] = module
            children = module._modules
            if children:
                pending += [child for child in reversed(children.values()) if child is not None]
    return list(found.values())


def has_blocks(module: nn.Module) -> bool:
    """Tell whether a container with more than one child that has parameters is inside
    ``module``."""
    return any(
        isinstance(m, _CONTAINERS) and sum(1 for c in m.children() if has_parameters(c)) > 1
        for m in module.modules()
    )


def find_units(
    root: nn.Module,
    num_stages: int,
    *,
    keep_whole: Set[str] = frozenset(),
    open_up: Set[str] = frozenset(),
) -> dict[str, nn.Module]:
    """Choose the units of ``root`` for ``num_stages`` stages.

    Args:
        root: The user's module.
        num_stages: Stages that the units will be dealt to; decides how fine the units must be.
        keep_whole: Names that must not be opened (a reversible block, a router and its experts).
        open_up: Names that must be opened because a tensor inside them is used outside.

    Returns:
        Name to module, in the order of ``root.named_modules()``; a module with two names is one
        unit, by the first of them.
    """
    search = _Search(root, keep_whole, open_up)
    units = dict(search.coarse(root, inside_container=False, top=True))
    search.refine(units, num_parameters(root), num_stages)
    order = {name: i for i, (name, _) in enumerate(root.named_modules())}
    return {name: units[name] for name in sorted(units, key=order.__getitem__)}


def has_children(module: nn.Module) -> bool:
    """Tell whether a module has submodules; their truth value is their length, if they have one."""
    return next(module.children(), None) is not None


class _Search:
    """Walks over the modules. Each has its first name: parameters, buffers and wishes know no
    other, and under another one a module would stay whole that is opened under this one."""

    def __init__(self, root: nn.Module, keep_whole: Set[str], open_up: Set[str]) -> None:
        self._keep_whole, self._open_up = keep_whole, open_up
        self._names = {id(module): name for name, module in root.named_modules()}
        self._visited: set[int] = set()

    def coarse(
        self, module: nn.Module, *, inside_container: bool, top: bool = False
    ) -> Iterator[tuple[str, nn.Module]]:
        """The blocks that people think in."""
        if is_metric(module) or not has_parameters(module) or id(module) in self._visited:
            return
        self._visited.add(id(module))
        name = self._names[id(module)]
        is_list = isinstance(module, _LISTS)
        whole = name in self._keep_whole or (
            not self._must_open(name)
            and not isinstance(module, nn.Sequential)
            and (inside_container or not has_blocks(module))
        )
        if not top and not is_list and (whole or not has_children(module)):
            yield name, module
            return
        for child in module.children():
            yield from self.coarse(child, inside_container=isinstance(module, _CONTAINERS))

    def refine(self, units: dict[str, nn.Module], total: int, num_stages: int) -> None:
        """Opens the largest ones."""
        settled = set(self._keep_whole)
        while candidates := [(num_parameters(m), n) for n, m in units.items() if n not in settled]:
            size, name = max(candidates)
            few = len(units) < 2 * num_stages
            if size <= total / (2 * num_stages) and not few:
                return
            module = units[name]
            opened = dict(self._children(module))
            large = few or size > 0.8 * total / num_stages
            can_open = not isinstance(module, _NEVER_OPENED) and (
                has_blocks(module) or (large and len(opened) >= 2)
            )
            if not can_open or not opened:
                settled.add(name)
                continue
            del units[name]
            units.update(opened)

    def _must_open(self, name: str) -> bool:
        inside = f"{name}."
        return name in self._open_up or any(inner.startswith(inside) for inner in self._open_up)

    def _children(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child in module.children():
            name = self._names[id(child)]
            if is_metric(child) or not has_parameters(child):
                continue
            if isinstance(child, _CONTAINERS) or (name in self._open_up and has_children(child)):
                yield from self._children(child)
            else:
                yield name, child
