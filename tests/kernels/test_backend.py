"""Which implementation runs, and what importing the package costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpfuse_kernels import PointerTable, Slot, flatten, unflatten
from dpfuse_kernels.backend import uses_triton
from tests.patience import patience

KERNELS = Path(__file__).parents[2] / "kernels"

pytestmark = pytest.mark.usefixtures("usual_choice")


def small_table() -> PointerTable:
    return PointerTable(torch.zeros(4), [Slot("a", 0, (4,), (1,))], torch.float32)


def launches(table: PointerTable) -> int:
    flatten([torch.ones(4)], table, scale=0.5)
    out = torch.zeros(4)
    unflatten(table, [out], scale=2.0)
    assert out.tolist() == [1.0] * 4
    return table.launcher.dispatcher.launches


def test_cpu_tensors_use_the_reference() -> None:
    assert launches(small_table()) == 0


@pytest.mark.parametrize(("choice", "expected"), [("triton", 2), ("reference", 0), ("", 0)])
def test_the_environment_variable_overrides(monkeypatch: pytest.MonkeyPatch, choice: str, expected: int) -> None:
    monkeypatch.setenv("DPFUSE_KERNELS", choice)
    assert launches(small_table()) == expected


def test_a_bad_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFUSE_KERNELS", "cuda")
    with pytest.raises(ValueError, match=r"DPFUSE_KERNELS is 'cuda', expected 'triton' or 'reference'\. Correct it"):
        uses_triton(small_table())


def test_triton_without_gpu_or_interpreter_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setenv("DPFUSE_KERNELS", "triton")
    table = small_table()
    with pytest.raises(ValueError, match=r"expected one on a GPU\. Unset DPFUSE_KERNELS"):
        flatten([torch.ones(4)], table)
    assert table.flat.eq(0).all()


@pytest.mark.slow
def test_the_cpu_path_works_where_triton_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from dpfuse_kernels import PointerTable, Slot, flatten, unflatten\n"
        "table = PointerTable(torch.zeros(4), [Slot('a', 0, (4,), (1,))], torch.float32)\n"
        "flatten([torch.ones(4)], table, scale=0.5); unflatten(table, [torch.zeros(4)])\n"
        "assert table.flat.tolist() == [0.5] * 4\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(KERNELS)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=patience(60))
