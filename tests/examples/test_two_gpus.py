"""The notebook for two GPUs: its cells compile, and run with CPUs and gloo in the place of the GPUs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributed.processes import run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "two_gpus.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[str]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    assert {"kernelspec", "language_info"} <= notebook["metadata"].keys()
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    return ["".join(cell["source"]) for cell in code]


def test_each_cell_compiles_without_the_magic_of_a_notebook(cells):
    assert len(cells) >= 3
    for number, text in enumerate(cells):
        compile(text, f"cell {number}", "exec")


@pytest.mark.slow
def test_the_cells_run_in_order_on_two_cpu_ranks(cells, tmp_path):
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join(cells))
    done = run(program, folder=tmp_path, warm_ranks=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on CPUs" in done.stdout
    rows = re.findall(r"^(\S.*?)  +[\d.]+ ms per step, weights differ by (\S+)$", done.stdout, re.MULTILINE)
    # With two ranks each mean is rounded once in any order, so all wrappers give the same bits.
    assert rows == [(name, "0.0e+00") for name in ("DDP", "DDP, views", "dpfuse", "dpfuse, DDP face")]
