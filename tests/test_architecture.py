"""The rules of the house: which layer may import which.

The rules name layers, not files: a new file needs no new rule.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])
FACES = {"data_parallel", "wrapper", "manual", "grad_scaler", "hooks"}
WINGS = {"ddp", "paddle", "tune", "commands", "integrations"}
OPEN_TO_ALL = {"errors", "version"}
# A size of "auto" asks for the tuner when a wrapper was made.
CALLS_THE_TUNER = {"dpfuse.data_parallel -> dpfuse.tune"}


def module_of(path: Path) -> str:
    root = ROOT / "kernels" if ROOT / "kernels" in path.parents else ROOT
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SOURCES}


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of the project that a module imports, anywhere in it, also for types alone."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
    return frozenset(found & MODULES.keys()) - {module}


def layer_of(module: str) -> str:
    """The folder directly in dpfuse/ that a module lies in, or its own name; "kernels"; "dpfuse"."""
    parts = module.split(".")
    if parts[0] == "dpfuse_kernels":
        return "kernels"
    return parts[1] if len(parts) > 1 else "dpfuse"


def breaches(layer: str, allowed: set[str]) -> list[str]:
    """The imports of a layer that lead neither to itself nor to `allowed`."""
    return [
        f"{module} -> {other}"
        for module in MODULES
        if layer_of(module) == layer
        for other in sorted(imports_of(module))
        if layer_of(other) not in {layer, *allowed}
    ]


@pytest.mark.parametrize(
    ("layers", "allowed"),
    [
        ({"kernels"}, set()),
        ({"comm"}, OPEN_TO_ALL),
        ({"engine"}, {"comm", "kernels"} | OPEN_TO_ALL),
        ({"gradients"}, {"comm", "engine", "kernels"} | OPEN_TO_ALL),
        ({"measure"}, {"comm", "engine", "gradients", "kernels"} | OPEN_TO_ALL),
        ({"model"}, {"comm", "engine", "gradients", "liveness", "measure"} | OPEN_TO_ALL),
        ({"liveness", "job"}, {"comm", "engine", "liveness", "job"} | OPEN_TO_ALL),
        (FACES, {"comm", "engine", "gradients", "measure", "model", "kernels", "checkpoint"} | FACES | OPEN_TO_ALL),
        ({"sharded"}, {"comm", "engine", "gradients", "measure", "model", "kernels"} | FACES | OPEN_TO_ALL),
    ],
    ids=["kernels", "comm", "engine", "gradients", "measure", "model", "liveness and job", "faces", "sharded"],
)
def test_a_layer_imports_only_what_lies_below(layers, allowed):
    found = [breach for layer in sorted(layers) for breach in breaches(layer, allowed)]
    assert [breach for breach in found if breach not in CALLS_THE_TUNER] == []


def test_nothing_below_imports_the_wings():
    """They use the faces and public names; only `dpfuse/__init__.py` and the entry points hand their names on."""
    entries = {"dpfuse", "__main__", "bench", "launch", "distributed"}
    below = [
        f"{module} -> {other}"
        for module in MODULES
        if layer_of(module) not in WINGS | entries
        for other in imports_of(module)
        if layer_of(other) in WINGS
    ]
    assert [breach for breach in below if breach not in CALLS_THE_TUNER] == []


def test_there_is_no_import_cycle_types_included():
    def path_to_itself(start: str, module: str, seen: set[str]) -> Iterator[str]:
        for other in imports_of(module):
            if other == start:
                yield module
            elif other not in seen and not is_package_face(other):
                seen.add(other)
                yield from path_to_itself(start, other, seen)

    circles = {module for module in MODULES if not is_package_face(module) if [*path_to_itself(module, module, set())]}
    assert circles == set()


def is_package_face(module: str) -> bool:
    """An `__init__.py` that only hands names on."""
    path = MODULES[module]
    return path.name == "__init__.py" and not re.search(r"^class ", path.read_text(), re.MULTILINE)


def test_few_modules_lie_directly_in_the_package():
    assert len([path for path in (ROOT / "dpfuse").glob("*.py") if path.name != "__init__.py"]) <= 10


def test_files_begin_with_a_docstring():
    assert [path for path in SOURCES if not path.read_text().startswith('"""')] == []


def test_the_paddle_wing_uses_only_public_names():
    """Of dpfuse.job, too, it takes what the package exports."""
    inner = re.compile(r"^\s*(from|import) dpfuse\.(job|comm|engine|model|gradients)\.", re.MULTILINE)
    paddle = [path for path in SOURCES if layer_of(module_of(path)) == "paddle"]
    assert [path for path in paddle if inner.search(path.read_text())] == []


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_one_file_calls_collectives():
    """One of the library; the wing, a user of it like any other, has one for each of its systems that needs any."""
    calls = re.compile(
        r"\b(dist|group|torch\.distributed)\.(all\w+|broadcast\w*|reduce\w*|barrier|gather\w*|scatter\w*)[(,]"
    )
    callers = {path for path in SOURCES if calls.search(path.read_text()) and layer_of(module_of(path)) != "job"}
    assert {str(path.relative_to(ROOT / "dpfuse")) for path in callers} == {
        "comm/collective.py", "paddle/gathered.py", "paddle/distributed/fleet/collective.py"
    }  # fmt: skip


def test_nothing_that_peers_send_is_unpickled():
    """spawn() may read what its own children wrote into a folder of its own; no peer of a group is trusted so."""
    objects = re.compile(r"_object(_list)?\(|\bpickle\.loads?\(|\beval\([^)]")
    assert {path.name for path in SOURCES if objects.search(path.read_text())} == {"spawn_context.py"}


def test_the_tree_names_no_place_outside_of_it():
    """No path of some machine, no host of a package registry, no folder beside the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.decode()
    if not listed:
        pytest.skip("not a git checkout")
    words = re.compile("|".join([r"\.\./" + "shared", "/work" + "/", "pypi" + r"\.org", "files\\.python" + "hosted"]))
    guilty = [
        name
        for name in listed.split("\0")
        if name and (ROOT / name).is_file() and words.search((ROOT / name).read_text(errors="ignore"))
    ]
    assert guilty == []
