"""The three GPU targets on a machine as they are lent: torch 2.11 with its Triton, pytest, and nothing else; no .git.

Without a GPU they plan, import and collect, and say what they skipped. An environment of 7 GB is made and thrown away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.pieces import LIMIT, PIECES

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch==2.11.0", "numpy", "pytest", "pytest-benchmark")
PARTS = ("Makefile", "pyproject.toml", "README.md", "dpfuse", "kernels", "tests", "bench", "docs", "examples")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of a new environment; of version 3.12 where there is one."""
    folder = tmp_path_factory.mktemp("machine")
    version = shutil.which("python3.12") or sys.executable
    if subprocess.run([version, "--version"], capture_output=True, check=False).returncode:
        version = sys.executable  # a shim of pyenv, without that version behind it
    subprocess.run([version, "-m", "venv", folder], check=True, timeout=120)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *PACKAGES], check=True, timeout=900)
    yield python
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """What is committed or about to be, without .git and without what was built or recorded."""
    folder = tmp_path_factory.mktemp("checkout") / "dpfuse"
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "_build", "out")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=ignored)
        else:
            shutil.copy(source, folder / part)
    return folder


@pytest.fixture
def make(python, checkout):
    def run(*words):
        names = ("PATH", "HOME", "LANG", "TMPDIR")
        environment = {name: os.environ[name] for name in names if name in os.environ}
        return subprocess.run(
            ["make", f"PYTHON={python}", *words],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.mark.timeout(1500)  # the environment is made in the first of these
@pytest.mark.parametrize("name", PIECES)
def test_nothing_is_installed(name, make, python):
    done = make("-n", f"gpu-{name}")
    assert done.returncode == 0, done.stderr
    assert f"{python} -m bench.pieces {name}" in done.stdout
    assert "pip" not in done.stdout


@pytest.mark.parametrize("name", PIECES)
def test_a_target_plans_collects_and_archives(name, make, tmp_path):
    done = make(f"gpu-{name}", f"OUT={tmp_path}", "DPFUSE_COMMIT=planned")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"{name}: at most {LIMIT:.0f} s" in done.stdout
    steps = [step for phase in PIECES[name] for step in phase.steps]
    with tarfile.open(tmp_path / f"gpu-{name}.tar.gz") as archive:
        members = archive.getnames()
        summary = archive.extractfile(f"gpu-{name}/summary.json").read().decode()
    assert {f"gpu-{name}/logs/{step.name}.log" for step in steps if not step.program} <= set(members)
    assert '"torch": "2.11.0' in summary
    assert '"commit": "planned"' in summary
    tested = [step for step in steps if any(word.startswith("tests/gpu") for word in step.arguments)]
    skipped = re.findall(r"^\[(\S+)\] SKIPPED .*needs a CUDA device", done.stdout, re.MULTILINE)
    assert {step.name for step in tested if not step.program} <= set(skipped)
