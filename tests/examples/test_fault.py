"""The demonstration of a mistake: what each wrapper says, and what `make` says before it installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import fault

from tests.distributed.processes import ROOT, launch
from tests.patience import patience


def test_ddp_says_nothing_of_another_learning_rate_and_dpfuse_names_it() -> None:
    done = launch("--nproc_per_node", "2", "examples/fault.py", folder=ROOT, warm_ranks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    rows = {int(cells[0]): cells[1:] for cells in lines if cells[0]}
    apart = {
        step: float(row[0].removeprefix("weights apart by up to ")) for step, row in rows.items() if "by" in row[0]
    }
    assert [*apart] == [*fault.SHOWN]
    assert 0 < apart[1] < apart[fault.STEPS]
    assert rows[1][1] == rows[1][0], "both wrappers train the same"
    said = {step: row for step, row in rows.items() if step not in apart}
    assert [row[1].partition(":")[0] for row in said.values()] == ["DPF-W01", fault.CODE]
    assert {row[0] for row in said.values()} == {"(no word)"}
    assert rows[10][1] == rows[fault.STEPS][1] == "(training ended)"
    assert len(re.findall(r"^passed  ", done.stdout, re.MULTILINE)) == 3


def test_the_first_two_sentences_are_shown() -> None:
    assert fault.shortened("One of 0.1. Two.") == "One of 0.1. Two."
    assert fault.shortened("One of 0.1. Two. Three.") == "One of 0.1. Two. …"


def make(folder: Path, missing: str) -> subprocess.CompletedProcess[str]:
    """Run `make demo` in a folder without environments, with a Python that lacks a package and does nothing."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" != -c ] || echo {missing}\n')
    python.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    command = ["make", "demo", f"PYTHON={python}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patience(30), check=False
    )


def test_make_says_what_is_missing_before_it_builds_an_environment(tmp_path: Path) -> None:
    done = make(tmp_path, missing="rich")
    assert done.returncode != 0  # this Python makes no environment
    first = done.stdout.splitlines()[0]
    assert first.startswith(
        f"{tmp_path}/python lacks rich: installing torch, numpy, rich and scikit-learn into .venv-demo, once;"
    )


def test_make_installs_nothing_where_nothing_is_missing(tmp_path: Path) -> None:
    done = make(tmp_path, missing="")
    assert done.stdout.splitlines() == [
        f"{tmp_path}/python -m dpfuse.launch --nproc_per_node 2 examples/{name}.py"
        for name in ("fault", "fashion_mnist")
    ]
