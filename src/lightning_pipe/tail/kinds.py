"""How a class adds to its attributes, read from its source.

A step that counts ``self.steps += 1`` counts steps; one that says ``self.right +=
hits.sum().item()`` counts samples, and ``self.total += loss.item()`` adds a mean. After M micro-
batches these differ, and the values do not tell: two micro-batches may well have the same number of
hits.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from enum import Enum

_EXTENSIVE = frozenset({"sum", "len", "size", "shape", "numel", "count_nonzero"})


class Kind(Enum):
    """What is added to an attribute in a step."""

    COUNT = "a constant, once per step"
    SUM = "a sum over rows"
    MEAN = "something that may be a mean over rows"
    SET = "nothing: it is set"
    UNKNOWN = "there is no source to read"


class Kinds:
    """The kinds of the attributes of a class.

    Args:
        cls: The class; its bases are read too.

    >>> class Counts:
    ...     def step(self, hits):
    ...         self.steps += 1
    """

    def __init__(self, cls: type) -> None:
        self._found: dict[str, set[Kind]] = {}
        self._has_source = True
        for part in cls.__mro__:
            if part.__module__.split(".")[0] not in ("torch", "lightning", "builtins"):
                self._read(part)

    def of(self, attribute: str) -> Kind:
        """The kind of one attribute."""
        found = self._found.get(attribute, set())
        for kind in (Kind.SUM, Kind.MEAN, Kind.COUNT):
            if kind in found:
                return kind
        return Kind.SET if self._has_source else Kind.UNKNOWN

    def _read(self, cls: type) -> None:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError, SyntaxError):
            self._has_source = False
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Add, ast.Sub)):
                self._note(node.target, node.value)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
                target, terms = node.targets[0], [node.value.left, node.value.right]
                same = [term for term in terms if ast.unparse(term) == ast.unparse(target)]
                if same and isinstance(node.value.op, (ast.Add, ast.Sub)):
                    self._note(target, next((t for t in terms if t is not same[0]), same[0]))

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            self._found.setdefault(target.attr, set()).add(_kind(value))


def _kind(value: ast.expr) -> Kind:
    if isinstance(value, ast.Constant):
        return Kind.COUNT
    for node in ast.walk(value):
        name = getattr(node, "attr", getattr(node, "id", ""))
        product = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
        if name in _EXTENSIVE:
            return Kind.SUM
        if product and not any(isinstance(n, ast.Constant) for n in (node.left, node.right)):  # type: ignore[attr-defined]
            return Kind.SUM
    return Kind.MEAN
