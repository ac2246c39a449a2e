"""How `dpfuse run` and `dpfuse doctor` learn that torch was imported, in each way in which a program can import it.

A package of a few lines stands for torch, so that a program takes a tenth of a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from dpfuse.startup import FOLDER, startup_variables
from tests.commands.side_by_side import REPLACED, python
from tests.distributed.processes import clean_environment

FILES = {
    "torch/__init__.py": """
import importlib.metadata, os, time, warnings
if os.path.exists("broken"):
    raise OSError("libtorch.so is missing")
from torch import nn
time.sleep(float(os.environ.get("SLOW", 0)))
if "WARNS" in os.environ:
    warnings.warn("old", stacklevel=2)
finished = True
if os.getenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":  # as torch does
    [extension.load()() for extension in importlib.metadata.entry_points(group="torch.backends")]
""",
    "torch/nn/__init__.py": "from torch.nn import parallel",
    "torch/nn/parallel/__init__.py": "from .distributed import DistributedDataParallel",
    "torch/nn/parallel/distributed.py": """
class DistributedDataParallel:
    def __init__(self, module):
        self.made_by = "torch"
""",
    "acts.py": """
import torch
from torch.nn.parallel import DistributedDataParallel
def start():
    assert torch.finished
    print("started", flush=True)
    def construct(self, module):
        self.made_by = "dpfuse"
    DistributedDataParallel.__init__ = construct
""",
    "program.py": """
import torch
from torch.nn.parallel import DistributedDataParallel
print(DistributedDataParallel("module").made_by)
""",
    "elsewhere/torch/__init__.py": "raise ImportError('not this one')",
}
MADE = "import program"
LOOK = "import importlib.util; find = importlib.util.find_spec; "
BY_HAND = """
torch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = torch
spec.loader.exec_module(torch)
import program
"""
FINDS_IT_FIRST = """
import importlib.machinery, importlib.util, sys
class Finder:
    looks = False
    def find_spec(self, name, path, target=None):
        if name != "torch" or self.looks:
            return None
        self.looks = True
        try:
            return {found}
        finally:
            self.looks = False
sys.meta_path.insert(0, Finder())
import program
"""
WRAPS = """
kind, plain = torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DistributedDataParallel.__init__
kind.__init__ = lambda wrapper, *args: plain(wrapper, *args)
import program
"""
PROGRAMS = {
    "as usual": MADE,
    "a look first": f"{LOOK} find('torch'); {MADE}",
    "a part of it first": f"{LOOK} find('torch'); import torch.nn.parallel; {MADE}",
    "the class first": f"from torch.nn.parallel.distributed import DistributedDataParallel; {MADE}",
    "import_module": f"import importlib; importlib.import_module('torch.nn'); {MADE}",
    "in a thread": f"{LOOK} find('torch')\nfrom threading import Thread\n"
    "one = Thread(target=__import__, args=['program']); one.start(); one.join()",
    "in two threads": """
import importlib.util, os, sys, threading
os.environ["SLOW"] = "0.05"
begin = threading.Barrier(3)
def work():
    begin.wait()
    importlib.util.find_spec("torch")
    import torch
    assert torch.nn.parallel.DistributedDataParallel("module").made_by == "dpfuse"
threads = [threading.Thread(target=work) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import program
""",
    "in a child": f"{LOOK} find('torch')\n"
    "import subprocess, sys; subprocess.run([sys.executable, 'program.py'], check=True)",
    "in a fork": f"{LOOK} find('torch')\nimport os\nif not os.fork():\n    {MADE}\nelse:\n    os.wait()",
    "by runpy": f"{LOOK} find('torch'); import runpy; runpy.run_module('program', run_name='__main__')",
    "by the loader that was found": f"import importlib.util, sys\nspec = importlib.util.find_spec('torch'){BY_HAND}",
    "by the first of two that were found": f"import importlib.util, sys\nspec = importlib.util.find_spec('torch')\n"
    f"importlib.util.find_spec('torch'){BY_HAND}",
    "by load_module": f"{LOOK} find('torch').loader.load_module('torch'); {MADE}",
    "lazily": """
import importlib.util, sys
spec = importlib.util.find_spec("torch")
spec.loader = importlib.util.LazyLoader(spec.loader)
torch = importlib.util.module_from_spec(spec)
sys.modules["torch"] = torch
spec.loader.exec_module(torch)
torch.nn
import program
""",
    "after an import that failed": f"""
import importlib.util, os
for _ in range(2):
    open("broken", "w").close()
    importlib.util.find_spec("torch")
    try:
        import torch
    except OSError:
        os.remove("broken")
{MADE}
""",
    "after an import by hand that failed": f"""
import importlib.util, os, sys
spec = importlib.util.find_spec("torch")
open("broken", "w").close()
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
except OSError:
    os.remove("broken")
{BY_HAND}
""",
    "on a path that comes later": f"""
import importlib.util, sys, sysconfig
paths, sys.path[:] = sys.path[:], [sysconfig.get_path("stdlib")]
assert importlib.util.find_spec("torch") is None
try:
    import torch
except ImportError:
    sys.path[:] = paths
{MADE}
""",
    "after one that was the wrong one": f"""
import sys
sys.path.insert(0, "elsewhere")
try:
    import torch
except ImportError:
    del sys.path[0]
{MADE}
""",
    "reloaded": f"{LOOK} find('torch'); import importlib, torch; importlib.reload(torch); {MADE}",
    "by a finder that comes first": FINDS_IT_FIRST.format(found="importlib.util.find_spec(name)"),
    "by a loader with a function of its own": """
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        spec = sys.meta_path[-1].find_spec(name, path) if name == "torch" else None
        if spec is not None:
            plain = spec.loader.exec_module
            spec.loader.exec_module = lambda module: plain(module)
        return spec
sys.meta_path.insert(1, Finder())
import program
""",
    "by the finder of paths": "import importlib.machinery, importlib.util, sys\n"
    f"spec = importlib.machinery.PathFinder.find_spec('torch'){BY_HAND}",
    "by a finder that looks for itself": FINDS_IT_FIRST.format(found="importlib.machinery.PathFinder.find_spec(name)"),
    "by the finder of paths, and the constructor is wrapped": "import importlib.machinery, importlib.util, sys\n"
    f"spec = importlib.machinery.PathFinder.find_spec('torch'){BY_HAND.replace('import program', WRAPS)}",
    "from a file": "import importlib.util, os, sys\n"
    f"spec = importlib.util.spec_from_file_location('torch', os.path.abspath('torch/__init__.py')){BY_HAND}",
}


@pytest.fixture(scope="module")
def play(tmp_path_factory) -> Callable[..., CompletedProcess[str]]:
    """Runs Python where a small package stands for torch; `acts` says whether a module acts at its import."""
    folder = tmp_path_factory.mktemp("startup")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    path = os.pathsep.join([str(folder), clean_environment()["PYTHONPATH"]])

    def run(*words: object, acts: bool = True) -> CompletedProcess[str]:
        variables = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        return python(*words, folder=folder, **variables | (startup_variables("acts", variables) if acts else {}))

    return run


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_way_to_import_torch_is_seen(play, name, tmp_path):
    (tmp_path / "main.py").write_text(PROGRAMS[name])
    done = play(tmp_path / "main.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\ndpfuse\n", "")


@pytest.mark.parametrize("words", [["-m", "program"], ["-c", "import program"], ["program.py"]])
def test_the_program_may_be_a_module_a_text_or_a_file(play, words):
    done = play(*words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\ndpfuse\n", "")


IMPORTED_EARLY = f"""
import os, runpy, torch
os.environ["DPFUSE_STARTUP"] = "acts"
runpy.run_path({os.path.join(FOLDER, "sitecustomize.py")!r}, run_name="sitecustomize")
import program
"""


def test_torch_may_be_there_before_python_has_looked_for_our_file(play):
    """A .pth file in the folder of packages can import it."""
    done = play("-c", IMPORTED_EARLY, acts=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "started\ndpfuse\n", "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rank", ["", "0", "1"])
@pytest.mark.parametrize("hide", ["os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'", "sys.meta_path.pop()"])
def test_where_torch_does_not_call_us_rank_0_says_so_at_its_end(play, hide, rank):
    rank = f"os.environ['RANK'] = '{rank}'; " if rank else ""
    done = play("-c", f"import os, sys; {rank}{hide}; import program")
    told = "1" not in rank
    assert (done.returncode, done.stdout) == (0, "torch\n")
    assert bool(re.fullmatch(r"dpfuse: `import torch` has not called .* dpfuse\.patch\(\) .*\n", done.stderr)) == told
    assert bool(done.stderr) == told
    assert play("-c", f"import os, sys; {hide}; import json").stderr == ""


LISTED = """
import importlib.metadata as metadata
names = [(one.metadata["Name"], one.version, one.files is None) for one in metadata.distributions()]
print(("dpfuse-startup", "0", True) in names, "torch" in metadata.packages_distributions())
print([one.metadata["Name"] for one in metadata.distributions(path=["."])])
"""


def test_a_program_can_list_what_is_installed(play):
    done = play("-c", LISTED)
    assert (done.stdout, done.stderr) == ("True True\n[]\n", "")


LOOKS_AS = """
import copy, importlib.metadata, importlib.util, inspect, os, pickle, pkgutil, sys, traceback
from importlib.machinery import PathFinder, SourceFileLoader

def facts(spec):
    loader, plain = spec.loader, PathFinder.find_spec(spec.name)
    yield spec.name, spec.origin, spec.cached, spec.has_location, spec.parent, [*spec.submodule_search_locations]
    yield str(spec), sorted(vars(spec)), vars(loader), dir(loader), loader.__class__, type(loader).__name__
    yield isinstance(loader, SourceFileLoader), isinstance(loader, importlib.abc.SourceLoader), hasattr(loader, "start")
    yield loader == plain.loader, plain.loader == loader, spec == plain, plain == spec
    yield hash(loader) == hash(plain.loader)
    for other in (copy.copy(loader), copy.deepcopy(loader), *(pickle.loads(pickle.dumps(loader, n)) for n in range(6))):
        yield other == loader, type(other) is SourceFileLoader, vars(other)
    yield pickle.loads(pickle.dumps(spec)) == spec, pickle.dumps(spec) == pickle.dumps(plain)
    yield loader.get_filename(), loader.is_package(spec.name), len(loader.get_source(spec.name))
    yield inspect.signature(loader.exec_module), inspect.signature(type(loader))

def show(spec):
    for fact in facts(spec):
        print(str(fact).replace(hex(id(spec.loader)), "HERE"))

import importlib.abc
for name in ("torch", "torch"):
    show(importlib.util.find_spec(name))
print(importlib.metadata.version("pytest"), [*importlib.metadata.packages_distributions()["torch"]])
print(pkgutil.resolve_name("json").__name__, importlib.util.find_spec("no_torch"))
open("broken", "w").close()
try:
    import torch
except OSError:
    traceback.print_exc()
os.remove("broken")
os.environ["WARNS"] = "1"
import torch
for module in (torch, torch.nn.parallel.distributed):
    print(type(module.__loader__), type(module.__spec__.loader), module.__spec__.loader is module.__loader__)
    print(sorted(vars(module)))
show(torch.__spec__)
import broken_elsewhere
"""


def test_what_a_program_finds_looks_as_without_us(play):
    plain, ours = (play("-c", LOOKS_AS, acts=acts) for acts in (False, True))
    assert plain.stdout.count("\n") > 50, plain.stderr
    assert ours.stdout.replace("started\n", "") == plain.stdout
    assert ours.stderr == plain.stderr
    for part in ("libtorch.so is missing", "UserWarning: old\n", "No module named 'broken_elsewhere'"):
        assert part in plain.stderr


def test_a_process_without_torch_imports_no_module_for_us(play):
    listed = "import sys; print(sorted(sys.modules))"
    plain, ours = (eval(play("-c", listed, acts=acts).stdout) for acts in (False, True))
    slow = {"typing", "importlib.abc", "tempfile", "torch", "dpfuse"}
    assert (slow & {*plain}, slow & {*ours}) == (set(), set())


REALLY_MADE = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(type(DistributedDataParallel(torch.nn.Linear(2, 2))).__module__.split(".")[0])
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "lazily",
        "in a thread",
        "by the loader that was found",
        "by load_module",
        "by the finder of paths",
        "by a finder that looks for itself",
    ],
)
def test_torch_itself_is_seen_and_its_class_replaced(name, tmp_path):
    (tmp_path / "program.py").write_text(REALLY_MADE)
    (tmp_path / "main.py").write_text(PROGRAMS[name])
    done = python("-W", "ignore", "-m", "dpfuse", "run", "main.py", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "dpfuse\n"), done.stderr
    assert REPLACED.findall(done.stderr) == ["Linear"]
