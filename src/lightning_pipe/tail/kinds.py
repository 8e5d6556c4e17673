"""How a class adds to its attributes, read from its source.

A step that counts ``self.steps += 1`` counts steps; one that says ``self.right +=
hits.sum().item()`` counts samples, and ``self.total += loss.item()`` adds a mean. After M micro-
batches these differ, and the values do not tell: two micro-batches may well have the same number of
hits.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from lightning_pipe.split.frozen import FRAMEWORKS

_SUMS = frozenset({"sum", "nansum", "count_nonzero"})
_SAME = frozenset(
    ("item", "detach", "cpu", "float", "double", "int", "long", "to", "numpy", "tolist", "clone")
) | {"tensor", "as_tensor"}
_ADDS = frozenset({"append", "extend", "appendleft", "add"})
_MAX_DEPTH = 6


class Kind(Enum):
    """What a step does to an attribute."""

    COUNT = "adds a constant, once per step"
    SUM = "adds a sum over rows"
    MEAN = "adds something that may be a mean over rows"
    SET_SUM = "sets it to a sum over rows, or appends one"
    SET = "sets it"
    UNKNOWN = "there is no source to read"


_PRIORITY = (Kind.SUM, Kind.MEAN, Kind.COUNT, Kind.SET_SUM)
_ANY = object()  # a subscript that is no constant

Path = tuple[Any, ...]


class Kinds:
    """The kinds of the attributes of a class.

    Args:
        cls: The class; its bases are read too.

    >>> class Counts:
    ...     def step(self, hits):
    ...         self.steps += 1
    """

    def __init__(self, cls: type) -> None:
        self._found: dict[tuple[Path, bool], set[Kind]] = {}
        self._has_source = True
        #: attributes that a step sets to something that depends on what they were, other than by
        #: adding to them: a running extreme, a queue
        self.rereads: set[str] = set()
        for part in cls.__mro__:
            package = part.__module__.split(".")[0]
            if package not in FRAMEWORKS and package not in sys.stdlib_module_names:
                self._read(part)

    def of(self, attribute: str, *keys: Any, appended: bool = False) -> Kind:
        """The kind of one attribute, or of an entry of it.

        Args:
            attribute: Its name.
            keys: The way from there into dicts and lists.
            appended: What is appended there, not what is set or added.
        """
        found: set[Kind] = set()
        for (path, appends), kinds in self._found.items():
            if appends == appended and _fits(path, (attribute, *keys)):
                found |= kinds
        for kind in _PRIORITY:
            if kind in found:
                return kind
        return Kind.SET if self._has_source else Kind.UNKNOWN

    def _read(self, cls: type) -> None:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            self._has_source = False
            return
        for function in ast.walk(tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._read_function(function)
                if not function.name.startswith(("on_", "configure_", "__")):
                    self.rereads |= set(_reread(function))

    def _read_function(self, function: ast.AST) -> None:
        nodes = list(ast.walk(function))
        names = {
            node.targets[0].id: node.value
            for node in nodes
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in nodes:
            if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
                self._note_sum(node.target, node.value, names)
            elif isinstance(node, ast.Assign):
                self._read_assignment(node, names)
            elif isinstance(node, ast.Call) and _name(node.func) in _ADDS and node.args:
                appended_to = getattr(node.func, "value", node.func)
                self._note_set(appended_to, node.args[0], names, appended=True)

    def _read_assignment(self, node: ast.Assign, names: Mapping[str, ast.expr]) -> None:
        target, value = node.targets[0], node.value
        if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)):
            terms = [value.left, value.right]
            same = [term for term in terms if _place(term) == ast.unparse(target)]
            if same:
                other = next((term for term in terms if term is not same[0]), same[0])
                self._note_sum(target, other, names)
                return
        self._note_set(target, value, names)

    def _note_sum(self, target: ast.expr, value: ast.expr, names: Mapping[str, ast.expr]) -> None:
        self._note(target, Kind.SUM if _is_product(value) else _kind(value, names))

    def _note_set(
        self,
        target: ast.expr,
        value: ast.expr,
        names: Mapping[str, ast.expr],
        *,
        appended: bool = False,
    ) -> None:
        if _kind(value, names) is Kind.SUM:
            self._note(target, Kind.SET_SUM, appended)

    def _note(self, target: ast.expr, kind: Kind, appended: bool = False) -> None:
        keys: list[Any] = []
        while isinstance(target, ast.Subscript) or _is_lookup(target):
            if isinstance(target, ast.Subscript):
                key, target = target.slice, target.value
            else:
                assert isinstance(target, ast.Call)
                assert isinstance(target.func, ast.Attribute)
                key, target = target.args[0], target.func.value
            keys.insert(0, getattr(key, "value", _ANY))
        if isinstance(target, ast.Attribute):
            path = (target.attr, *keys)
            self._found.setdefault((path, appended), set()).add(kind)


def _place(value: ast.expr) -> str:
    """The text of an expression; ``x.get(key, 0)`` reads ``x[key]``."""
    if _is_lookup(value):
        assert isinstance(value, ast.Call)
        assert isinstance(value.func, ast.Attribute)
        return f"{ast.unparse(value.func.value)}[{ast.unparse(value.args[0])}]"
    return ast.unparse(value)


def _reread(function: ast.AST) -> Iterator[str]:
    """Attributes that are set, by a call or a choice, to what depends on what they were."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            calls = [n for n in ast.walk(node.value) if isinstance(n, (ast.Call, ast.IfExp))]
            read = [inner for call in calls for inner in _arguments(call)]
            if any(ast.unparse(inner) == ast.unparse(node.targets[0]) for inner in read):
                yield node.targets[0].attr
        elif isinstance(node, ast.If):
            tested = {ast.unparse(n) for n in ast.walk(node.test) if isinstance(n, ast.Attribute)}
            for inner in ast.walk(node):
                if isinstance(inner, ast.Assign) and ast.unparse(inner.targets[0]) in tested:
                    target = inner.targets[0]
                    if isinstance(target, ast.Attribute) and not _is_start(node.test):
                        yield target.attr


def _arguments(call: ast.AST) -> Iterator[ast.AST]:
    if isinstance(call, ast.Call):
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            yield from ast.walk(argument)
    else:
        yield from ast.walk(call)


def _is_start(test: ast.expr) -> bool:
    """Whether a condition asks if there is something yet, and not how large it is."""
    orders = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    compared = [n for n in ast.walk(test) if isinstance(n, ast.Compare)]
    return not any(isinstance(op, orders) for n in compared for op in n.ops)


def _is_lookup(value: ast.expr) -> bool:
    """Whether this is `x.setdefault(key, ...)` or `x.get(key)`."""
    is_call = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute)
    return is_call and _name(value.func) in ("setdefault", "get") and bool(value.args)  # type: ignore[attr-defined]


def _fits(path: Path, place: Path) -> bool:
    return len(path) == len(place) and all(
        known is _ANY or known == key for known, key in zip(path, place, strict=True)
    )


_KNOWN: WeakKeyDictionary[type, Kinds] = WeakKeyDictionary()


def kinds_of(cls: type) -> Kinds:
    """The kinds of a class, read once."""
    if cls not in _KNOWN:
        _KNOWN[cls] = Kinds(cls)
    return _KNOWN[cls]


def _kind(value: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> Kind:
    """What an expression is, from the outside in: the mean of a sum is a mean."""
    if depth > _MAX_DEPTH:
        return Kind.MEAN
    if isinstance(value, ast.Constant):
        return Kind.COUNT
    if isinstance(value, ast.Name) and value.id in names:
        return _kind(names[value.id], names, depth + 1)
    if isinstance(value, ast.BinOp):
        return _kind_of_operation(value, names, depth + 1)
    if isinstance(value, ast.UnaryOp):
        return _kind(value.operand, names, depth + 1)
    if isinstance(value, ast.Subscript) and getattr(value.value, "attr", "") == "shape":
        return Kind.SUM if ast.unparse(value.slice) == "0" else Kind.COUNT
    if isinstance(value, ast.Call):
        return _kind_of_call(value, names, depth + 1)
    return Kind.MEAN


def _kind_of_operation(value: ast.BinOp, names: Mapping[str, ast.expr], depth: int) -> Kind:
    kinds = [_kind(part, names, depth) for part in (value.left, value.right)]
    if isinstance(value.op, (ast.Div, ast.FloorDiv)):
        return Kind.SUM if kinds[0] is Kind.SUM and kinds[1] is not Kind.SUM else Kind.MEAN
    if all(kind is Kind.COUNT for kind in kinds):
        return Kind.COUNT
    return Kind.SUM if Kind.SUM in kinds else Kind.MEAN


def _kind_of_call(value: ast.Call, names: Mapping[str, ast.expr], depth: int) -> Kind:
    function, name = value.func, _name(value.func)
    arguments = [*value.args, *(keyword.value for keyword in value.keywords)]
    given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in value.keywords}
    if given.get("reduction") == "sum" or name in ("len", "numel"):
        return Kind.SUM
    if name in _SUMS:
        is_method = isinstance(function, ast.Attribute) and _is_value(function.value)
        over_rows = len(arguments) <= (not is_method) or ast.unparse(arguments[-1]) == "0"
        is_torch = isinstance(function, ast.Attribute)
        return Kind.SUM if over_rows and is_torch else Kind.MEAN
    if name == "size":
        return Kind.SUM if arguments and ast.unparse(arguments[0]) == "0" else Kind.COUNT
    if name in _SAME and isinstance(function, ast.Attribute):
        return _kind(function.value, names, depth)
    if name in _SAME and value.args:
        return _kind(value.args[0], names, depth)
    return Kind.MEAN


def _name(function: ast.expr) -> str:
    return str(getattr(function, "attr", getattr(function, "id", "")))


def _is_value(receiver: ast.expr) -> bool:
    return not (isinstance(receiver, ast.Name) and receiver.id in ("torch", "F", "np", "math"))


def _is_product(value: ast.expr) -> bool:
    """Whether something is multiplied by something: by the rows, most likely, before it is
    added."""
    if isinstance(value, ast.Call):
        inner = [value.func.value] if isinstance(value.func, ast.Attribute) else value.args[:1]
        return _name(value.func) in _SAME and any(map(_is_product, inner))
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return False
    return not any(isinstance(part, ast.Constant) for part in (value.left, value.right))
