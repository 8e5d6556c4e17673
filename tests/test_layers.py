"""The architecture, as a test: who may import whom, and who may touch private names of others."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lightning_pipe"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# From the ground up. A layer imports itself and those above it here; the set holds the packages
# from outside that it may use beside the standard library.
LAYERS: dict[str, set[str]] = {
    "errors": set(),
    "registration": set(),
    "planning": {"matplotlib"},
    "split": {"torch", "torchmetrics", "networkx", "numpy"},
    "runtime": {"torch", "psutil"},
    "_lightning": {"torch", "lightning", "lightning_utilities"},
    "_loops": {"lightning", "lightning_utilities"},
    "statistics": {"torch"},
    "grouping": set(),
    "layout": set(),
    "placing": set(),
    "planned": set(),
    "planfile": {"yaml"},
    "decide": set(),
    "activations": {"torch"},
    "home": {"torch"},
    "ways": {"torch"},
    "cuts": {"torch"},
    "gradients": {"torch"},
    "replicas": {"torch"},
    "data": {"torch", "lightning", "numpy"},
    "tail": {"torch", "torchmetrics", "numpy"},
    "iterated": {"torch"},
    "guards": {"torch", "numpy"},
    "synced": {"torch"},
    "work": {"torch"},
    "whole": {"torch"},
    "sameness": set(),
    "preflight": set(),
    "conditions": {"torch"},
    "sharding": {"torch"},
    "shared_tensors": {"torch"},
    "cutting": {"torch"},
    "hookparts": {"torch"},
    "steps": {"torch"},
    "report": set(),
    "stage_memory": {"torch"},
    "states": {"torch", "psutil"},
    "parts": {"torch"},
    "hyperparameters": {"torch"},
    "conversion": {"torch"},
    "hooks": {"torch"},
    "norms": {"torch"},
    "manners": {"torch", "torchmetrics", "lightning", "lightning_utilities"},
    "facts": {"torch", "lightning"},
    "signals": {"lightning"},
    "debug": {"lightning_utilities"},
    "folders": set(),
    "sharded": {"torch", "lightning"},
    "agreement": {"torch", "lightning", "lightning_utilities"},
    "follow": {"lightning_utilities"},
    "processes": {"torch", "lightning", "typing_extensions"},
    "construction": {"torch", "lightning", "typing_extensions"},
    "readings": {"lightning"},
    "checkpoints": {"torch", "lightning", "typing_extensions"},
    "strategy": {"torch", "lightning", "typing_extensions"},
    "callbacks": {"torch", "lightning"},
    "config_file": {"lightning"},
    "plan_command": {"torch", "lightning", "yaml"},
    "link_command": {"torch"},
    "checking": {"torch", "lightning"},
    "check_command": set(),
    "cli": {"lightning", "jsonargparse"},
}
ORDER = list(LAYERS)

# The only files that may use underscored names of another package, and of which.
SEAMS = {
    "runtime/_dtensor.py": {"torch"},
    "runtime/_torch.py": {"torch"},
    "split/_fake.py": {"torch"},
    "split/parted.py": {"torch"},
    "split/compiled.py": {"torch"},
    "split/recompute.py": {"torch"},
    "split/schemas.py": {"torch"},  # of operators
    "split/stand_ins.py": {"torch"},
    "split/tree.py": {"torch"},  # torch's pytree
    "_loops.py": {"lightning"},
    "_lightning.py": {"lightning", "torch"},  # torch for the pytree of CombinedLoader
}
# Names that reach up on purpose, inside a function, when they are used and not before.
LATE = {("registration", "lightning_pipe.strategy")}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yields (module, name or "", the local name that it is bound to) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            assert node.module is not None
            for alias in node.names:
                yield node.module, alias.name, alias.asname or alias.name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", alias.asname or alias.name.split(".")[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_only_layers_above(path: Path) -> None:
    layer = layer_of(path)
    if layer == "__init__":
        return
    assert layer in LAYERS, f"{name_of(path)} belongs to no layer: give it its place in LAYERS"
    for module, name, _ in imported(ast.parse(path.read_text())):
        root, *rest = module.split(".")
        if root != "lightning_pipe":
            assert root in LAYERS[layer] | sys.stdlib_module_names, f"{layer} may not use {root}"
        elif (layer, module) not in LATE:
            imported_layer = rest[0] if rest else name
            assert imported_layer in LAYERS, f"import from the module that defines it: {name}"
            assert ORDER.index(imported_layer) <= ORDER.index(layer), f"{layer} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_private_names_stay_behind_the_seams(path: Path) -> None:
    tree = ast.parse(path.read_text())
    allowed = SEAMS.get(name_of(path), set())
    guests = {}
    for module, name, bound in imported(tree):
        root, *rest = module.split(".")
        if root == "lightning_pipe" or root in sys.stdlib_module_names or root in allowed:
            continue
        assert not any(map(is_private, [*rest, name])), f"private import {module}.{name}"
        guests[bound] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            parts = ast.unparse(node).split(".")
            source = guests.get(parts[0])
            assert source is None, f"line {node.lineno}: {ast.unparse(node)} is private to {source}"


def test_examples_do_not_know_us() -> None:
    for path in (PACKAGE.parents[1] / "examples").glob("*.py"):
        for module, _, _ in imported(ast.parse(path.read_text())):
            assert not module.startswith("lightning_pipe"), f"{path.name} imports {module}"


def test_the_plugin_imports_what_torch_has_anyway() -> None:
    tree = ast.parse((PACKAGE.parent / "_lightning_pipe_autoload.py").read_text())
    on_load = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert {module for node in on_load for module, _, _ in imported(node)} == {
        "os",
        "sys",
        "typing",
    }
