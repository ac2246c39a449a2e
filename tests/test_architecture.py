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
import torch.distributed as dist
from torch.utils._device import _device_constructors

from tests.house import ENTRIES, MODULES, ROOT, SOURCES, floors, imports_of, layer_of, module_of, picture

FACES = {"data_parallel", "wrapper", "manual", "grad_scaler"}
WINGS = {"ddp", "paddle", "tune", "commands", "integrations"}
OPEN_TO_ALL = {"arguments", "errors", "exclusions", "version"}
# plan="auto" asks for the tuner when a wrapper was made.
CALLS_THE_TUNER = {"dpfuse.data_parallel -> dpfuse.tune"}


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
        ({"trace"}, {"engine", "trace_file"} | OPEN_TO_ALL),
        ({"findings"}, {"engine", "rules"} | OPEN_TO_ALL),
        ({"rules"}, {"trace_file"} | OPEN_TO_ALL),
        ({"weights", "loop"}, {"comm", "engine", "findings", "kernels", "rules"} | OPEN_TO_ALL),
        ({"stopping"}, {"comm", "engine"} | OPEN_TO_ALL),
        (
            {"model"},
            {"comm", "data", "engine", "findings", "gradients", "liveness", "loop", "measure", "stopping", "weights"}
            | OPEN_TO_ALL,
        ),
        ({"liveness", "job"}, {"comm", "engine", "liveness", "job", "startup"} | OPEN_TO_ALL),
        ({"data"}, {"engine", "job"} | OPEN_TO_ALL),
        (
            FACES,
            {"comm", "engine", "gradients", "measure", "model", "rules", "stopping", "trace", "weights", "kernels"}
            | {"checkpoint"}
            | FACES
            | OPEN_TO_ALL,
        ),
        ({"sharded"}, {"comm", "engine", "gradients", "measure", "model", "kernels"} | FACES | OPEN_TO_ALL),
    ],
    ids=[
        "kernels",
        "comm",
        "engine",
        "gradients",
        "measure",
        "trace",
        "findings",
        "rules",
        "weights and loop",
        "stopping",
        "model",
        "liveness and job",
        "data",
        "faces",
        "sharded",
    ],
)
def test_a_layer_imports_only_what_lies_below(layers, allowed):
    found = [breach for layer in sorted(layers) for breach in breaches(layer, allowed)]
    assert [breach for breach in found if breach not in CALLS_THE_TUNER] == []


def test_nothing_below_imports_the_wings():
    """They use the faces and public names; only `dpfuse/__init__.py` and the entry points hand their names on."""
    below = [
        f"{module} -> {other}"
        for module in MODULES
        if layer_of(module) not in WINGS | ENTRIES | {"dpfuse"}
        for other in imports_of(module)
        if layer_of(other) in WINGS
    ]
    assert [breach for breach in below if breach not in CALLS_THE_TUNER] == []


def test_there_is_no_import_cycle_those_for_types_and_through_package_faces_included():
    def path_to_itself(start: str, module: str, seen: set[str]) -> Iterator[str]:
        for other in imports_of(module):
            if other == start:
                yield module
            elif other not in seen:
                seen.add(other)
                yield from path_to_itself(start, other, seen)

    assert {module for module in MODULES if [*path_to_itself(module, module, set())]} == set()


def test_layers_form_at_most_eleven_floors():
    assert max(floors().values()) <= 11


def test_the_picture_of_the_house_is_made_from_the_code():
    """If this fails, `python -m tests.house` draws it again."""
    assert picture() in (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")


FILES = {path.stem for path in SOURCES} | {path.parent.name for path in SOURCES}
NAME = re.compile(r"`([a-z]\w*(?:/\w+)*)(\.py|/)?`")


def foreign_packages(module: str) -> set[str]:
    """The packages of others that a module imports."""
    nodes = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.ImportFrom)]
    return {str(node.module).partition(".")[0] for node in nodes}


def names_of_nothing(text: str, folder: Path) -> list[str]:
    """The names in backticks, written like files or folders, of which there is neither here nor in the packages."""
    here = {path.stem for path in folder.rglob("*") if path.suffix in ("", ".py")}
    named = ((name.rpartition("/")[2], suffix) for name, suffix in NAME.findall(text))
    return [name for name, suffix in named if name not in here | ({*FILES} if suffix else set())]


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module_of)
def test_the_docstring_of_a_folder_names_files_that_exist(path):
    """A map: a word in backticks that is written like a module is one, unless it is what the folder offers."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    offered = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    missing = names_of_nothing(ast.get_docstring(tree) or "", path.parent)
    assert [name for name in missing if name not in offered | layers_and_packages()] == []


def test_the_page_of_the_architecture_names_files_that_exist():
    text = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    known = {path.name for path in SOURCES} | FILES | {path.name for path in (ROOT / "tests").rglob("*.py")}
    named = [found.rpartition("/")[2] for found in re.findall(r"`([\w/]+\.py)`", text)]
    folders = [found.rstrip("/").rpartition("/")[2] for found in re.findall(r"`([\w/]+)/`", text)]
    assert named
    assert [name for name in named + folders if name not in known] == []


@cache
def layers_and_packages() -> set[str]:
    packages = {name for module in MODULES for name in foreign_packages(module)}
    return packages | {layer_of(module) for module in MODULES}


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def attributes_of(name: str) -> set[str]:
    """What a class declares, and what its methods assign to their attributes."""
    classes = (node for module in MODULES for node in tree_of(module).body if isinstance(node, ast.ClassDef))
    (found,) = (node for node in classes if node.name == name)
    names = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in found.body if isinstance(node, ast.AnnAssign)}
    names |= {ast.unparse(target) for node in found.body if isinstance(node, ast.Assign) for target in node.targets}
    stored = (node for node in ast.walk(found) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return names | {node.attr for node in stored}


def table_of_options() -> str:
    page = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    return page.partition("## An option is held once\n")[2].partition("\n## ")[0]


def test_the_table_of_options_names_objects_that_exist():
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", table_of_options())
    assert named
    assert [f"{name}.{held}" for name, held in named if held not in attributes_of(name)] == []


def readers_of_options() -> dict[str, set[str]]:
    """The modules that read an option from `SyncOptions` or `SyncSettings`, by its name there."""
    options = attributes_of("CommonOptions") | attributes_of("SyncOptions") | attributes_of("SyncSettings")
    readers: dict[str, set[str]] = {option: set() for option in options}
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("common"):
                readers.get(ast.unparse(node.slice).strip("'"), set()).add(module)
            elif isinstance(node, ast.Attribute) and re.search(r"(options|settings)$", ast.unparse(node.value)):
                readers.get(node.attr, set()).add(module)
    return readers


def test_each_option_that_more_than_two_files_read_is_in_the_table():
    table = table_of_options()
    read = {option for option, modules in readers_of_options().items() if len(modules) > 2}
    assert {"deterministic", "wire"} <= read
    assert {option for option in read if not re.search(rf"[`.]{option}`", table)} == set()


def test_files_begin_with_a_docstring():
    assert [path for path in SOURCES if not path.read_text().startswith('"""')] == []


def test_the_paddle_wing_uses_only_public_names_but_for_votes_and_the_names_in_files():
    """Of dpfuse.job, too, it takes what the package exports.

    One file shares the library's votes: so ranks in a call of Paddle's API, and in one of ours, read the same vote. Two
    files read the keys of a state dict as the wrappers do: there is one place that knows their prefixes.
    """
    inner = re.compile(r"^\s*(from|import) dpfuse\.(job|comm|engine|model|gradients)\.", re.MULTILINE)
    paddle = [path for path in SOURCES if layer_of(module_of(path)) == "paddle"]
    found = {path.stem for path in paddle if inner.search(path.read_text())}
    assert found == {"collectives", "model_files", "paddle_files"}


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


# What starts a collective: methods of process groups, and functions of torch.distributed.
BY_GROUP = re.compile(
    r"_?all_?(gather|reduce|to_?all)\w*|_?reduce_scatter\w*|(monitored_)?barrier|broadcast|i?recv\w*|batch_isend_irecv"
    r"|_?(broadcast|gather|scatter|send|recv)_object\w*|reduce|gather|scatter|i?send"
)
COMMON = {"broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier"}  # other objects have these, too
HOLDERS = re.compile(r"(.*\.)?(dist|distributed|_?\w*group)")  # what a process group, or torch.distributed, is called


def is_collective(name: str) -> bool:
    return BY_GROUP.fullmatch(name) is not None and not name.endswith("_hook")  # a hook is no call


def collectives_in(tree: ast.AST) -> list[str]:
    """The calls of collectives in a syntax tree, and references to them, without those through `comm.collective`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_collective(node.attr):
            holder = ast.unparse(node.value)
            if holder != "collective" and (node.attr not in COMMON or HOLDERS.fullmatch(holder)):
                found.append(f"{holder}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch.distributed"):
            found += [alias.name for alias in node.names if is_collective(alias.name)]
    return found


def test_only_one_folder_calls_collectives():
    """One of the library; the Paddle wing has one file."""
    callers = {str(path.relative_to(ROOT)) for path in SOURCES if collectives_in(ast.parse(path.read_text()))}
    assert callers == {
        "dpfuse/comm/collective.py",
        "dpfuse/job/env.py",  # a barrier, before there is anything to average
        "dpfuse/paddle/collectives.py",
    }


METHODS_OF_GROUPS = {
    name
    for name in dir(dist.ProcessGroup)
    if re.search(r"gather|reduce|to_?all|barrier|broadcast|scatter|send|recv", name) and not name.startswith("__")
}


@pytest.mark.parametrize("name", sorted(METHODS_OF_GROUPS))
def test_every_collective_of_a_group_is_seen(name):
    assert collectives_in(ast.parse(f"work = self._group.{name}([flat])"))
    assert collectives_in(ast.parse(f"start = partial(process_group.{name}, [flat])"))


@pytest.mark.parametrize(
    "source",
    ["dist.all_reduce(flat)", "torch.distributed.broadcast(flat, 0)", "from torch.distributed import all_gather as g"],
)
def test_every_way_to_a_collective_is_seen(source):
    assert collectives_in(ast.parse(source))


@pytest.mark.parametrize("source", ["bucket.send(flat)", "collective.all_reduce(flat, group)", "flat.scatter(0, a, b)"])
def test_what_is_no_collective_is_left_alone(source):
    assert collectives_in(ast.parse(source)) == []


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


def tensors_without_a_device(source: str) -> list[int]:
    """The lines of calls such as `torch.zeros(3)`: `torch.set_default_device` decides where the tensor is."""
    makers = {maker.__name__ for maker in _device_constructors()} - {"as_tensor"}  # which may keep a user's device
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in makers
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_every_new_tensor_names_its_device():
    assert tensors_without_a_device("import torch\ntorch.ones(1, device='cpu')\ntorch.ones(1)") == [3]
    found = {name: lines for name, path in MODULES.items() if (lines := tensors_without_a_device(path.read_text()))}
    found.pop("dpfuse.paddle.static.scope")  # a variable that a program sets to numbers: there it is the user's choice
    assert found == {}
