"""Which of torch's tests are tests of DistributedDataParallel: read from their source, nothing is imported."""

from __future__ import annotations

import ast
from importlib.util import find_spec

__all__ = ["ddp_tests"]

MODULE = "torch.testing._internal.distributed.distributed_test"


def ddp_tests() -> set[str]:
    """The tests that construct a DistributedDataParallel, themselves or in a method of theirs that they call."""
    spec = find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    (cls,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    methods = {node.name: node for node in cls.body if isinstance(node, ast.FunctionDef)}
    used = {name: _names(node) for name, node in methods.items()}
    wrapping = {name for name, names in used.items() if "DistributedDataParallel" in names}
    while more := {name for name, names in used.items() if names & wrapping} - wrapping:
        wrapping |= more
    return {name for name in wrapping if name.startswith("test_")}


def _names(function: ast.FunctionDef) -> set[str]:
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }
