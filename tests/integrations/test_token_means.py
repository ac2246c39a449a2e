"""Trainer and accelerate give the weights of one process with all tokens, in float64, to 1e-12."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.processes import launch

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("with_accelerate.py", "accelerate"),
        ("with_trainer.py", "transformers"),
        ("with_own_trainers.py", "transformers"),
        ("with_lightning.py", "lightning"),
    ],
)
def test_weights_are_those_of_one_process_with_all_tokens(program, package, size):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; `make test-all` does it")
    done = launch("--nproc_per_node", size, PROGRAMS / program, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("fine") == size
