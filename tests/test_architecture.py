"""Reads every import of the packages and fails on an arrow that the design does not allow."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def rule_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if len(parts) > 2 else path.stem


SOURCES = sorted([*(ROOT / "dpfuse").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def test_files_begin_with_a_docstring():
    bare = [path for path in SOURCES if not path.read_text().startswith('"""')]
    assert bare == []


def test_the_paddle_wing_uses_only_public_names():
    """Of dpfuse.job, too, it takes what the package exports."""
    inner = re.compile(r"^\s*(from|import) dpfuse\.distributed\.", re.MULTILINE)
    assert [path for path in SOURCES if rule_of(path) == "paddle" and inner.search(path.read_text())] == []


def test_there_is_no_package_called_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_one_file_calls_collectives():
    """One of the library; the wing, a user of it like any other, has one for each of its systems that needs any."""
    calls = re.compile(
        r"\b(dist|group|torch\.distributed)\.(all_\w+|broadcast\w*|reduce\w*|barrier|gather\w*|scatter\w*)\("
    )
    callers = {path for path in SOURCES if calls.search(path.read_text()) and rule_of(path) != "job"}
    assert {str(path.relative_to(ROOT / "dpfuse")) for path in callers} == {
        "engine/collective.py", "paddle/gathered.py", "paddle/distributed/fleet/collective.py"
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
