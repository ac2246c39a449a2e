"""What a user installs: wheel, sdist and editable, without network, into environments of their own."""

from __future__ import annotations

import os
import sys
import tarfile
import textwrap
import zipfile
from pathlib import Path

import pytest

import dpfuse
from tests.check_wheel import check, fresh_environment, run_outside
from tests.patience import patience

ROOT = Path(__file__).parent.parent
LEFT_OUT = ("bench/results/", ".ci/", ".venv/", "docs/_build/", "data/")


def run(*command: object, cwd: Path, **environ: str) -> str:
    return run_outside(*command, cwd=cwd, timeout=patience(300), **environ)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what git would check out, so that no build leaves anything in the tree."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    copy = tmp_path_factory.mktemp("tree") / "dpfuse"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def built(tree) -> Path:
    """The folder with the sdist and the wheel that is built from it."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    run(sys.executable, "-m", "build", "--no-isolation", tree, cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """The Python of a new environment that sees torch, and whatever else is installed here, but not this tree."""
    return fresh_environment(tmp_path_factory.mktemp("environment"))


def only_one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_nothing_else(built):
    with zipfile.ZipFile(only_one(built, "*.whl")) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {
        "dpfuse", "dpfuse_kernels", f"dpfuse-{dpfuse.__version__}.dist-info"
    }  # fmt: skip
    assert {"dpfuse/__init__.py", "dpfuse/py.typed", "dpfuse_kernels/__init__.py", "dpfuse_kernels/py.typed"} <= {
        *names
    }
    assert f"dpfuse-{dpfuse.__version__}.dist-info/licenses/LICENSE" in names
    source = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dpfuse").rglob("*.py")}
    source |= {path.relative_to(ROOT / "kernels").as_posix() for path in (ROOT / "kernels").rglob("*.py")}
    assert source == {name for name in names if name.endswith(".py")}


@pytest.mark.slow
def test_the_sdist_holds_the_sources_and_no_results(built):
    top = f"dpfuse-{dpfuse.__version__}/"
    with tarfile.open(only_one(built, "*.tar.gz")) as archive:
        names = {name.removeprefix(top) for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "dpfuse/py.typed", "kernels/dpfuse_kernels/py.typed"} <= names
    assert [name for name in names if name.startswith(LEFT_OUT)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_it_installs_without_network_and_imports_from_anywhere(kind, built, tree, environment, tmp_path):
    what = {"wheel": [only_one(built, "*.whl")], "sdist": [only_one(built, "*.tar.gz")], "editable": ["-e", tree]}
    if kind == "editable":
        pytest.importorskip("editables")  # what hatchling needs for it, and pip would fetch
    flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--force-reinstall"]
    run(environment, "-m", "pip", "install", *flags, *what[kind], cwd=tmp_path)
    program = "import dpfuse, dpfuse_kernels; print(dpfuse.__version__, dpfuse.__file__, dpfuse_kernels.__file__)"
    version, *places = run(environment, "-c", program, cwd=tmp_path).split()
    assert version == dpfuse.__version__
    home = tree if kind == "editable" else environment.parent.parent
    assert all(Path(place).is_relative_to(home) for place in places)
    usage = run(environment.parent / "dpfuse-launch", "--help", cwd=tmp_path)
    assert "--nproc_per_node" in usage or "--nproc-per-node" in usage
    assert "--gpus" in usage
    assert "diff | plan | env" in run(environment.parent / "dpfuse", "--help", cwd=tmp_path)
    run(environment, "-m", "pip", "uninstall", "--quiet", "--yes", "dpfuse", cwd=tmp_path)


@pytest.mark.slow
def test_the_wheel_trains_on_two_ranks_as_make_wheel_checks(built, tmp_path):
    assert len(check(only_one(built, "*.whl"), tmp_path)) == 2


def python(program: str, cwd: Path) -> str:
    return run(
        sys.executable, "-c", textwrap.dedent(program), cwd=cwd, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    )


def test_importing_imports_no_package_but_torch(tmp_path):
    program = """
        import sys
        import torch
        before = set(sys.modules)
        from dpfuse import DataParallel  # the first use of a name imports the library
        packages = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(*(name for name in packages - sys.stdlib_module_names if not name.startswith("_sysconfigdata")))
    """
    assert set(python(program, tmp_path).split()) - {"torch"} == {"dpfuse", "dpfuse_kernels"}


@pytest.mark.slow
def test_a_step_works_where_triton_cannot_be_imported(tmp_path):
    program = """
        import sys
        sys.modules["triton"] = None  # importing it, or anything in it, is an ImportError from here on
        import torch
        import torch.distributed as dist
        import dpfuse

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = dpfuse.DataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        print(model.bias.grad.tolist())
        dist.destroy_process_group()
    """
    assert python(program, tmp_path) == "[3.0, 3.0]\n"
