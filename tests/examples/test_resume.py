"""The example that resumes by itself: a planted crash, a restart by the launcher, the same weights."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.examples.test_fashion_mnist import folder  # noqa: F401  # a fixture
from tests.patience import patience
from tests.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]


def resume(checkpoints: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command of the example's first lines, on few images."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "MASTER", "TORCHEL"))
    }
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "PYTHON_EXEC": warm_python()}
    command = [warm_python(), "-m", "dpfuse.launch", "--nproc_per_node", "2", "--max_restarts", "1"]
    few = ["--limit", "512", "--epochs", "2", "--batch-size", "16", "--every", "5"]  # 32 steps, of which 16 an epoch
    return subprocess.run(
        [*command, "examples/resume.py", "--checkpoints", str(checkpoints), *few, *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patience(90),
    )  # fmt: skip


def weights(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"the weights after 32 steps: (\w{16})\n", done.stdout)
    assert found, done.stdout
    return found[1]


@pytest.mark.slow
def test_a_crash_changes_nothing_in_the_end(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    whole = resume(tmp_path / "whole", "--data", str(folder))
    crashed = resume(tmp_path / "crashed", "--data", str(folder), "--crash-at", "23")
    assert "step 0 of 32: begins" in whole.stdout
    lines = crashed.stdout.splitlines()
    assert lines.count("step 0 of 32: begins") == 1
    again = f"step 20 of 32: resumes from {tmp_path / 'crashed' / 'step-0000000020.pt'}"
    assert lines.count(again) == 1
    assert not any(line.startswith("step 20 of 32: saved") for line in lines[lines.index(again) :])
    assert weights(crashed) == weights(whole)
    assert sorted(path.name for path in (tmp_path / "crashed").iterdir()) == [
        f"step-00000000{step}.pt" for step in (25, 30, 32)
    ]
