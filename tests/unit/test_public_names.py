"""Compares the public names of the packages, and how each of them is called, with a stored list.

The list is `tests/golden/public_names.json`. A change that is meant needs the new list in the same commit:

    python -m tests.unit.test_public_names > tests/golden/public_names.json
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dpfuse
from tests.torch_ddp import TORCH

PACKAGES = [
    "dpfuse",
    "dpfuse.data",
    "dpfuse.ddp",
    "dpfuse.distributed",
    "dpfuse.errors",
    "dpfuse.launch",
    "dpfuse.paddle",
    "dpfuse.paddle.distributed.launch",
    "dpfuse.tune",
    "dpfuse_kernels",
]
# How an object is used without naming a method of it.
OPERATORS = {"__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__", "__len__", "__setitem__"}


def signature_text(function: Callable[..., Any]) -> str:
    """Return the signature without what depends on a process or on the folder of a file."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a class that leaves construction to a class of Python's own
        return "(...)"
    text = re.sub(r" at 0x[0-9a-f]+", "", str(signature))
    return re.sub(r"\b(?:dpfuse|dpfuse_kernels)(?:\.\w+)*\.(\w+)", r"\1", text)


def member_text(member: Any) -> str:
    """Return what a reader of a class can do with one of its attributes."""
    if isinstance(member, property):
        rights = "property, can be set" if member.fset else "property"
        return f"{rights}: {signature_text(member.fget)}" if member.fget else rights
    if isinstance(member, classmethod | staticmethod):
        return f"{type(member).__name__} {signature_text(member.__func__)}"
    return signature_text(member) if inspect.isroutine(member) and callable(member) else "attribute"


def members(cls: type) -> dict[str, str]:
    """Return the public attributes that our own classes define; those of torch's and Python's classes may change."""
    found: dict[str, str] = {}
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] not in ("dpfuse", "dpfuse_kernels"):
            continue
        for name in (*vars(owner), *inspect.get_annotations(owner)):
            if name not in found and (name in OPERATORS or not name.startswith("_")):
                found[name] = member_text(vars(owner).get(name))
    return found


def public_names(module: ModuleType) -> dict[str, str]:
    """Return each name of `__all__` with the text of its signature; of a class, its public attributes as well."""
    names: dict[str, str] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            names[name] = "module"
        elif isinstance(value, type):
            names[name] = f"class {signature_text(value)}"
            names |= {f"{name}.{member}": text for member, text in members(value).items()}
        elif callable(value):
            names[name] = signature_text(value)
        else:
            names[name] = f"value of type {type(value).__name__}"
    return dict(sorted(names.items()))


def public_modules() -> Iterator[ModuleType]:
    """Yield the packages, then the modules that their `__all__` names, down to the last level."""
    waiting = [import_module(name) for name in PACKAGES]
    seen: set[str] = set()
    while waiting:
        module = waiting.pop(0)
        if module.__name__ in seen:
            continue
        seen.add(module.__name__)
        yield module
        inner = [getattr(module, name) for name in module.__all__]
        waiting += [value for value in inner if isinstance(value, ModuleType)]


def snapshot() -> dict[str, dict[str, str]]:
    """Return the public names of every public module."""
    return {
        module.__name__: public_names(module) for module in sorted(public_modules(), key=lambda each: each.__name__)
    }


def differences(stored: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return a line for each name that was removed, added or changed."""
    lines = [f"removed: {name} {stored[name]}" for name in stored if name not in found]
    lines += [f"added:   {name} {found[name]}" for name in found if name not in stored]
    lines += [
        f"changed: {name}\n  stored {stored[name]}\n  found  {found[name]}"
        for name in stored
        if name in found and stored[name] != found[name]
    ]
    return lines


STORED: dict[str, dict[str, str]] = (
    json.loads((Path(__file__).parents[1] / "golden" / "public_names.json").read_text())
    if __name__ != "__main__"
    else {}
)


@pytest.mark.parametrize("module", sorted(STORED))
def test_the_names_and_signatures_of_a_module_are_those_of_the_stored_list(module: str):
    if module == "dpfuse.paddle.static" and TORCH < (2, 12):
        pytest.skip("torch before 2.12 writes the signature of torch.fx.Proxy in another way")
    lines = differences(STORED[module], public_names(import_module(module)))
    assert not lines, f"{module} differs from tests/golden/public_names.json:\n" + "\n".join(lines)


def test_the_stored_list_has_every_public_module():
    assert sorted(STORED) == sorted(module.__name__ for module in public_modules())


def test_type_checkers_see_what_a_program_gets():
    """The imports are there for them alone; a program gets the names from a table."""
    tree = ast.parse(Path(dpfuse.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: str(line.module) for line in block.body for alias in line.names}
    assert {*seen, "__version__"} == {*dpfuse.__all__}
    assert {name for name in seen if getattr(dpfuse, name) is not getattr(import_module(seen[name]), name)} == set()


def test_a_difference_is_told_by_name():
    stored = {"kept": "()", "gone": "(a)", "other": "(b: int = 1)"}
    found = {"kept": "()", "other": "(b: int = 2)", "new": "(c)"}
    assert differences(stored, found) == [
        "removed: gone (a)",
        "added:   new (c)",
        "changed: other\n  stored (b: int = 1)\n  found  (b: int = 2)",
    ]


if __name__ == "__main__":
    json.dump(snapshot(), sys.stdout, indent=1)
    print()
