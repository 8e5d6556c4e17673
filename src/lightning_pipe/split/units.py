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
        unit.
    """
    units = dict(_coarse("", root, keep_whole, open_up, inside_container=False, top=True))
    _refine(units, num_parameters(root), num_stages, keep_whole, open_up)
    order = {name: i for i, (name, _) in enumerate(root.named_modules(remove_duplicate=False))}
    seen: set[int] = set()
    result: dict[str, nn.Module] = {}
    for name in sorted(units, key=order.__getitem__):
        if id(units[name]) not in seen:
            seen.add(id(units[name]))
            result[name] = units[name]
    return result


def has_children(module: nn.Module) -> bool:
    """Tell whether a module has submodules; their truth value is their length, if they have one."""
    return next(module.children(), None) is not None


def _must_open(name: str, open_up: Set[str]) -> bool:
    return name in open_up or any(inner.startswith(name + ".") for inner in open_up)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _coarse(
    name: str,
    module: nn.Module,
    keep_whole: Set[str],
    open_up: Set[str],
    *,
    inside_container: bool,
    top: bool = False,
) -> Iterator[tuple[str, nn.Module]]:
    if is_metric(module) or not has_parameters(module):
        return
    is_list = isinstance(module, _LISTS)
    whole = name in keep_whole or (
        not _must_open(name, open_up)
        and not isinstance(module, nn.Sequential)
        and (inside_container or not has_blocks(module))
    )
    if not top and not is_list and (whole or not has_children(module)):
        yield name, module
        return
    for child_name, child in module.named_children():
        yield from _coarse(
            _join(name, child_name),
            child,
            keep_whole,
            open_up,
            inside_container=isinstance(module, _CONTAINERS),
        )


def _children(name: str, module: nn.Module, open_up: Set[str]) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        full = _join(name, child_name)
        if is_metric(child) or not has_parameters(child):
            continue
        if isinstance(child, _CONTAINERS) or (full in open_up and has_children(child)):
            yield from _children(full, child, open_up)
        else:
            yield full, child


def _refine(
    units: dict[str, nn.Module],
    total: int,
    num_stages: int,
    keep_whole: Set[str],
    open_up: Set[str],
) -> None:
    settled = set(keep_whole)
    while candidates := [(num_parameters(m), n) for n, m in units.items() if n not in settled]:
        size, name = max(candidates)
        few = len(units) < 2 * num_stages
        if size <= total / (2 * num_stages) and not few:
            return
        module = units[name]
        opened = dict(_children(name, module, open_up))
        large = few or size > 0.8 * total / num_stages
        can_open = not isinstance(module, _NEVER_OPENED) and (
            has_blocks(module) or (large and len(opened) >= 2)
        )
        if not can_open or not opened:
            settled.add(name)
            continue
        del units[name]
        units.update(opened)
